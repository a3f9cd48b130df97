"""The three ops and the state they work on (design sections 3 and 4), one loop a row, a head, a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference import rope
from trtllm_shadowkv.reference.attention import causal_attention, merge, partial_attention
from trtllm_shadowkv.reference.chunk_cache import ChunkCache
from trtllm_shadowkv.reference.factors import factorise, project, rebuild
from trtllm_shadowkv.reference.landmarks import landmarks, outlier_chunks
from trtllm_shadowkv.reference.pages import LivePages, PagePool
from trtllm_shadowkv.reference.selection import chunk_scores, top_chunks
from trtllm_shadowkv.runtime.state import PADDING, PassKind, RowStatistics, check_allocation, check_pass


@dataclass
class SealedLayer:
    """Sealed state of one row in one layer; n sealed chunks (the one being sealed may be among them)."""

    coordinates: Tensor  # A [n·C, r]
    basis: Tensor  # B [r, Hkv·D]
    means: Tensor  # [Hkv, n, D]
    values: Tensor  # [Hkv, n, C, D], host memory on a GPU system
    outliers: Tensor  # ids [Hkv, o]
    outlier_keys: Tensor  # [Hkv, o, C, D], exact
    outlier_values: Tensor
    caches: list[ChunkCache]  # one a KV head
    missing: list[list[int]]  # selected chunks of this step that each cache lacks, ascending


@dataclass
class Row:
    pages: LivePages
    top_k: int
    limit: float
    length: int = 0
    prompt_done: bool = False
    published: int = 0  # sealed chunks that may be selected
    sealing: int | None = None  # chunk being sealed in this step
    layers: list[SealedLayer] = field(default_factory=list)
    statistics: RowStatistics = field(default_factory=RowStatistics)


class ReferenceState:
    """A state of float32 CPU tensors that follows the design to the letter.

    Args:
        model: shape of the model.
        config: settings, rank resolved.
        pages: live pages in the pool.
    """

    def __init__(self, model: ModelConfig, config: ShadowKVConfig, pages: int = 256) -> None:
        assert config.rank is not None
        self.model, self.config, self.rank = model, config, config.rank
        self.inverse_frequencies = torch.tensor(model.rope.inverse_frequencies(model.head_size), dtype=torch.float32)
        self.pool = PagePool(pages, model.num_layers, model.num_kv_heads, model.head_size)
        self.rows: dict[int, Row] = {}
        self.kind: PassKind = "context"
        self.slots: tuple[int, ...] = ()
        self.start = 0

    # --- rows -----------------------------------------------------------------------------------------------------

    def allocate(self, slot: int, *, prompt_tokens: int, total_tokens: int, top_k: int, dense: bool) -> None:
        check_allocation(self.rows, slot, top_k, self.config)
        self.rows[slot] = Row(LivePages(self.pool), top_k, math.inf if dense else self.config.limit)

    def release(self, slot: int) -> None:
        row = self.rows.pop(slot, None)
        if row is not None:
            row.pages.release()

    def length(self, slot: int) -> int:
        return self.rows[slot].length

    def is_sealed(self, slot: int) -> bool:
        return bool(self.rows[slot].layers)

    def must_seal(self, slot: int) -> bool:
        row = self.rows[slot]
        return not row.layers and row.length + 1 > row.limit

    def statistics(self, slot: int) -> RowStatistics:
        return self.rows[slot].statistics

    # --- passes ---------------------------------------------------------------------------------------------------

    def begin_pass(self, kind: PassKind, slots: Sequence[int], start: int, length: int, is_last: bool) -> None:
        check_pass(self.rows, self.must_seal, kind, slots, start, length)
        if kind == "context":
            row = self.rows[slots[0]]
            row.pages.reserve(start, start + length)
            row.length, row.prompt_done = start + length, is_last
        self.kind, self.slots, self.start = kind, tuple(slots), start

    def step_prologue(self) -> None:
        """Advance the counters. A chunk is sealed one step before it leaves the window, so that after this call a
        sealed row of S tokens, the current one included, has exactly floor((S − W)/C) chunks to select from."""
        for slot in self.slots:
            if slot == PADDING:
                continue
            row = self.rows[slot]
            row.length += 1
            row.pages.reserve(row.length - 1, row.length)
            if not row.layers:
                continue
            if row.sealing is not None:
                row.published = row.sealing + 1
                row.statistics.sealed_tokens += self.config.chunk_size
                row.statistics.generated_sealed += self.config.chunk_size
                row.pages.release_before(row.published * self.config.chunk_size)
            assert row.published == self.config.sealed_chunks(row.length)
            due = self.config.sealed_chunks(row.length + 1) > row.published
            row.sealing = row.published if due else None

    def seal_prompt(self, slot: int) -> None:
        row, config, model = self.rows[slot], self.config, self.model
        if not row.prompt_done or not self.must_seal(slot):
            raise StateError(f"seal_prompt of slot {slot}", "a row whose prompt is done and that must be sealed")
        chunks = config.sealed_chunks(row.length + 1)
        tokens = chunks * config.chunk_size
        shape = (model.num_kv_heads, chunks, config.chunk_size, model.head_size)
        capacity = config.cache_factor * config.top_k
        layers = []
        for layer in range(model.num_layers):
            keys, values = row.pages.read(layer, 0, tokens)
            a, b = factorise(self._unrotated(keys, 0), self.rank)
            keys, values = keys.reshape(shape), values.reshape(shape)
            ids = outlier_chunks(keys, config.outliers)
            pick = ids[:, :, None, None].expand(-1, -1, *shape[2:])
            caches = [ChunkCache(capacity) for _ in range(model.num_kv_heads)]
            outlier_keys, outlier_values = keys.gather(1, pick), values.gather(1, pick)
            exact = (ids, outlier_keys, outlier_values)
            layers.append(SealedLayer(a, b, landmarks(keys), values.clone(), *exact, caches, [[] for _ in caches]))
        row.layers, row.published = layers, chunks
        row.statistics.sealed_tokens = tokens
        row.pages.release_before(tokens)

    def _unrotated(self, keys: Tensor, start: int) -> Tensor:
        """Pre-RoPE keys, heads concatenated: [Hkv, n, D] post-RoPE from position ``start`` -> [n, Hkv·D]."""
        positions = torch.arange(start, start + keys.shape[1])
        return rope.unrotate(keys.transpose(0, 1), positions, self.inverse_frequencies).flatten(1)

    # --- ops ------------------------------------------------------------------------------------------------------

    def _check(self, slots: Tensor) -> None:
        if tuple(slots.tolist()) != self.slots:
            raise StateError(f"an op was given slots {slots.tolist()}, begin_pass {list(self.slots)}")

    def _check_positions(self, positions: Tensor) -> None:
        """Position = index; a padding row stands at 0."""
        if self.kind == "context":
            expected = list(range(self.start, self.rows[self.slots[0]].length))
        else:
            expected = [0 if s == PADDING else self.rows[s].length - 1 for s in self.slots]
        if positions.tolist() != expected:
            raise StateError(f"an op was given positions {positions.tolist()}", f"{expected}, as begin_pass says")

    def landmark_topk(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE, append, and in a generation pass the choice of chunks and their look-up in the cache.

        Args:
            qkv: [N, (Hq + 2·Hkv)·D] float32, Q then K then V, pre-RoPE.
            positions: [N]; slots: [B].

        Returns:
            q [N, Hq·D] post-RoPE; selection [B, Hkv, top_k] int32, ascending chunk ids padded with −1.
        """
        self._check(slots)
        self._check_positions(positions)
        m = self.model
        heads = qkv.reshape(len(qkv), m.num_heads + 2 * m.num_kv_heads, m.head_size)
        q, k, v = heads.split((m.num_heads, m.num_kv_heads, m.num_kv_heads), dim=1)
        q = rope.rotate(q, positions, self.inverse_frequencies)
        k = rope.rotate(k, positions, self.inverse_frequencies)
        selection = torch.full((len(slots), m.num_kv_heads, self.config.top_k), -1, dtype=torch.int32)
        if self.kind == "context":
            self.rows[self.slots[0]].pages.write(layer, self.start, k, v)
            return q.flatten(1), selection
        for b, slot in enumerate(self.slots):
            if slot == PADDING:
                q[b] = 0
                continue
            row = self.rows[slot]
            row.pages.write(layer, row.length - 1, k[b : b + 1], v[b : b + 1])
            if not row.layers:
                continue
            sealed = row.layers[layer]
            if row.sealing is not None:
                self._seal_keys(row, layer)
            for h in range(m.num_kv_heads):
                excluded = torch.zeros(row.published, dtype=torch.bool)
                excluded[sealed.outliers[h]] = True
                group = q[b, h * m.group : (h + 1) * m.group]
                scores = chunk_scores(group, sealed.means[h, : row.published], excluded)
                chosen = top_chunks(scores, excluded, row.top_k)
                selection[b, h, : len(chosen)] = chosen
                hits, sealed.missing[h] = sealed.caches[h].look_up(chosen.tolist())
                row.statistics.hits += len(hits)
                row.statistics.misses += len(sealed.missing[h])
        return q.flatten(1), selection

    def _seal_keys(self, row: Row, layer: int) -> None:
        """Landmark and A rows of the chunk that leaves the window at the next step."""
        assert row.sealing is not None
        c, sealed = self.config.chunk_size, row.layers[layer]
        keys, _ = row.pages.read(layer, row.sealing * c, (row.sealing + 1) * c)
        a, lost, total = project(self._unrotated(keys, row.sealing * c), sealed.basis)
        sealed.coordinates = torch.cat((sealed.coordinates, a))
        sealed.means = torch.cat((sealed.means, landmarks(keys[:, None])), dim=1)
        row.statistics.residual_lost += lost
        row.statistics.residual_total += total

    def key_reconstruct(self, layer: int, selection: Tensor, slots: Tensor) -> Tensor:
        """Rebuild the keys, and fetch the values, of the selected chunks that are not in the cache.

        Returns:
            ticket [1] int32, which only orders the ops.
        """
        self._check(slots)
        c, d = self.config.chunk_size, self.model.head_size
        for slot in self.slots:
            if slot == PADDING or self.kind == "context" or not self.rows[slot].layers:
                continue
            row, sealed = self.rows[slot], self.rows[slot].layers[layer]
            for h, cache in enumerate(sealed.caches):
                for chunk in sealed.missing[h]:
                    positions = torch.arange(chunk * c, (chunk + 1) * c)
                    keys = rebuild(sealed.coordinates[positions], sealed.basis, h, d)
                    values = sealed.values[h, chunk]
                    cache.insert(chunk, rope.rotate(keys, positions, self.inverse_frequencies), values)
                    row.statistics.bytes_fetched += values.numel() * values.element_size()
        return torch.zeros(1, dtype=torch.int32)

    def sparse_attention(self, layer: int, q: Tensor, selection: Tensor, ticket: Tensor, slots: Tensor) -> Tensor:
        """Attention over outliers, selected chunks and window (generation), or causally over the live pages.

        Args:
            q: [N, Hq·D] post-RoPE.

        Returns:
            [N, Hq·D].
        """
        self._check(slots)
        m = self.model
        queries = q.reshape(len(q), m.num_heads, m.head_size)
        if self.kind == "context":
            keys, values = self.rows[self.slots[0]].pages.read(layer, 0, self.start + len(q))
            return causal_attention(queries, keys.transpose(0, 1), values.transpose(0, 1)).flatten(1)
        out = torch.zeros_like(queries)
        for b, slot in enumerate(self.slots):
            if slot == PADDING:
                continue
            row = self.rows[slot]
            first = row.published * self.config.chunk_size
            keys, values = row.pages.read(layer, first, row.length)
            for h in range(m.num_kv_heads):
                group = slice(h * m.group, (h + 1) * m.group)
                parts = [(keys[h], values[h])]
                if row.layers:
                    sealed = row.layers[layer]
                    parts.append((sealed.outlier_keys[h].flatten(0, 1), sealed.outlier_values[h].flatten(0, 1)))
                    held = [sealed.caches[h].get(i) for i in selection[b, h].tolist() if i >= 0]
                    parts += [(s.keys, s.values) for s in held]
                out[b, group] = merge([partial_attention(queries[b, group], k, v) for k, v in parts])
            if row.sealing is not None:
                self._seal_values(row, layer)
        return out.flatten(1)

    def _seal_values(self, row: Row, layer: int) -> None:
        assert row.sealing is not None
        c, sealed = self.config.chunk_size, row.layers[layer]
        _, values = row.pages.read(layer, row.sealing * c, (row.sealing + 1) * c)
        sealed.values = torch.cat((sealed.values, values[:, None]), dim=1)
