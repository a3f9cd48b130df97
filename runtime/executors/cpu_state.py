"""The state of the CPU executor: ``reference.state.ReferenceState`` made fast, with contiguous buffers and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference.factors import factorise, project
from trtllm_shadowkv.reference.landmarks import landmarks, outlier_chunks
from trtllm_shadowkv.runtime.executors.chunk_caches import ChunkCaches
from trtllm_shadowkv.runtime.executors.cpu_rows import Live, Row, RowShape, Sealed
from trtllm_shadowkv.runtime.executors.rotary import RotaryTable, rotate
from trtllm_shadowkv.runtime.state import PADDING, Footprint, PassKind, RowStatistics, check_allocation, check_pass
from trtllm_shadowkv.runtime.value_pool import ValuePool


class CpuState:
    """Keys and values of all rows in float32.

    Args:
        model: shape of the model.
        config: settings, rank resolved.
        values: host memory for the values of sealed chunks.
    """

    def __init__(self, model: ModelConfig, config: ShadowKVConfig, values: ValuePool) -> None:
        assert config.rank is not None
        self.model, self.config, self.rank, self.values = model, config, config.rank, values
        self.rotary = RotaryTable(model.rope.inverse_frequencies(model.head_size))
        self.rows: dict[int, Row] = {}
        self.kind: PassKind = "context"
        self.slots: tuple[int, ...] = ()
        self.start = 0
        self._positions = torch.empty(0, dtype=torch.int64)
        self._angles = (torch.empty(0), torch.empty(0))

    # --- rows -----------------------------------------------------------------------------------------------------

    def _shape(self, prompt_tokens: int, total_tokens: int, dense: bool) -> RowShape:
        limit = math.inf if dense else self.config.limit
        return RowShape(self.model, self.config, prompt_tokens, total_tokens, limit)

    def footprint(self, prompt_tokens: int, total_tokens: int, dense: bool) -> Footprint:
        """Bytes a sequence will need: what admission reserves."""
        return self._shape(prompt_tokens, total_tokens, dense).footprint()

    def allocate(self, slot: int, *, prompt_tokens: int, total_tokens: int, top_k: int, dense: bool) -> None:
        check_allocation(self.rows, slot, top_k, self.config)
        shape = self._shape(prompt_tokens, total_tokens, dense)
        self.rows[slot] = Row(shape, top_k, Live.empty(self.model, shape.live_tokens))

    def release(self, slot: int) -> None:
        row = self.rows.pop(slot, None)
        if row is not None and row.sealed is not None:
            self.values.give(row.sealed.values)

    def length(self, slot: int) -> int:
        return self.rows[slot].length

    def is_sealed(self, slot: int) -> bool:
        return self.rows[slot].sealed is not None

    def must_seal(self, slot: int) -> bool:
        row = self.rows[slot]
        return row.sealed is None and row.length + 1 > row.shape.limit

    def statistics(self, slot: int) -> RowStatistics:
        return self.rows[slot].statistics

    # --- passes ---------------------------------------------------------------------------------------------------

    def begin_pass(self, kind: PassKind, slots: Sequence[int], start: int, length: int, is_last: bool) -> None:
        check_pass(self.rows, self.must_seal, kind, slots, start, length)
        if kind == "context":
            row = self.rows[slots[0]]
            if start + length > row.shape.prompt_tokens:
                raise StateError(f"a stretch to {start + length}", f"at most {row.shape.prompt_tokens} prompt tokens")
            row.length, row.prompt_done = start + length, is_last
            self._set_positions(torch.arange(start, start + length))
        elif any(self.rows[s].length >= self.rows[s].shape.total_tokens for s in slots if s != PADDING):
            raise StateError("a generation pass over a row that is full", "at most total_tokens as allocated")
        self.kind, self.slots, self.start = kind, tuple(slots), start

    def _set_positions(self, positions: Tensor) -> None:
        self._positions, self._angles = positions, self.rotary.at(positions)

    def step_prologue(self) -> None:
        """Advance the counters as ``ReferenceState.step_prologue`` does."""
        chunk = self.config.chunk_size
        for slot in self.slots:
            if slot == PADDING:
                continue
            row = self.rows[slot]
            row.live.make_room(row.length)
            row.length += 1
            sealed = row.sealed
            if sealed is None:
                continue
            if sealed.sealing is not None:
                sealed.published = sealed.sealing + 1
                row.statistics.sealed_tokens += chunk
                row.statistics.generated_sealed += chunk
                row.live.drop_before(sealed.published * chunk)
            due = self.config.sealed_chunks(row.length + 1) > sealed.published
            sealed.sealing = sealed.published if due else None
        lengths = [0 if s == PADDING else self.rows[s].length - 1 for s in self.slots]
        self._set_positions(torch.tensor(lengths, dtype=torch.int64))

    def seal_prompt(self, slot: int) -> None:
        row, config, m = self.rows[slot], self.config, self.model
        if not row.prompt_done or not self.must_seal(slot):
            raise StateError(f"seal_prompt of slot {slot}", "a row whose prompt is done and that must be sealed")
        chunk, chunks, capacity = config.chunk_size, config.sealed_chunks(row.length + 1), row.shape.chunks
        tokens, width = chunks * chunk, chunk * m.head_size
        layers, heads, outliers = m.num_layers, m.num_kv_heads, min(config.outliers, chunks)
        positions = torch.arange(tokens)
        angles = self.rotary.at(positions)
        slab = self.values.take(layers, heads, capacity, width)
        try:
            sealed = Sealed(
                coordinates=torch.empty(layers, capacity, chunk, self.rank),
                basis=torch.empty(layers, heads, self.rank, m.head_size),
                means=torch.empty(layers, heads, capacity, m.head_size),
                bias=torch.zeros(layers, heads, capacity),
                values=slab,
                outlier_keys=torch.empty(layers, heads, outliers * chunk, m.head_size),
                outlier_values=torch.empty(layers, heads, outliers * chunk, m.head_size),
                caches=ChunkCaches(layers, heads, row.shape.slots, capacity, width),
                published=chunks,
            )
            for layer in range(layers):
                keys = row.live.keys[layer, :, :tokens]
                plain = rotate(keys.transpose(0, 1), angles, backwards=True).flatten(1)
                a, b = factorise(plain, self.rank)
                sealed.coordinates[layer, :chunks] = a.view(chunks, chunk, self.rank)
                sealed.basis[layer] = b.view(self.rank, heads, m.head_size).transpose(0, 1)
                by_chunk = keys.view(heads, chunks, chunk, m.head_size)
                sealed.means[layer, :, :chunks] = landmarks(by_chunk)
                slab[layer, :, :chunks] = row.live.values[layer, :, :tokens].reshape(heads, chunks, width)
                ids = outlier_chunks(by_chunk, config.outliers)
                sealed.bias[layer].scatter_(1, ids, -math.inf)
                pick = ids[:, :, None].expand(-1, -1, width)
                exact = (heads, outliers * chunk, m.head_size)
                sealed.outlier_keys[layer] = by_chunk.flatten(2).gather(1, pick).view(exact)
                sealed.outlier_values[layer] = slab[layer].gather(1, pick).view(exact)
            window = Live.empty(m, row.shape.window_tokens, tokens)
            kept = row.length - tokens
            window.keys[:, :, :kept] = row.live.keys[:, :, tokens : row.length]
            window.values[:, :, :kept] = row.live.values[:, :, tokens : row.length]
        except BaseException:
            self.values.give(slab)
            raise
        row.sealed, row.live = sealed, window
        row.statistics.sealed_tokens = tokens

    # --- ops ------------------------------------------------------------------------------------------------------

    def landmark_topk(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        m = self.model
        if layer == 0 and (tuple(slots.tolist()) != self.slots or not torch.equal(positions.long(), self._positions)):
            raise StateError(
                f"the graph was given slots {slots.tolist()} and {len(positions)} positions",
                f"those of begin_pass: slots {list(self.slots)} and {len(self._positions)} positions, each its index",
            )
        n = len(qkv)
        heads = qkv.view(n, m.num_heads + 2 * m.num_kv_heads, m.head_size)
        turned = rotate(heads[:, : m.num_heads + m.num_kv_heads], self._angles)
        q, k, v = turned[:, : m.num_heads], turned[:, m.num_heads :], heads[:, m.num_heads + m.num_kv_heads :]
        selection = torch.full((len(self.slots), m.num_kv_heads, self.config.top_k), -1, dtype=torch.int32)
        if self.kind == "context":
            live, end = self.rows[self.slots[0]].live, self.start + n
            live.keys[layer, :, self.start : end] = k.transpose(0, 1)
            live.values[layer, :, self.start : end] = v.transpose(0, 1)
            return q.reshape(n, -1), selection
        for b, slot in enumerate(self.slots):
            if slot == PADDING:
                q[b] = 0
                continue
            row = self.rows[slot]
            at = row.live.at(row.length - 1)
            row.live.keys[layer, :, at] = k[b]
            row.live.values[layer, :, at] = v[b]
            if row.sealed is not None:
                if row.sealed.sealing is not None:
                    self._seal_keys(row, row.sealed, layer)
                chosen = self._select(row, row.sealed, layer, q[b].view(m.num_kv_heads, m.group, m.head_size))
                selection[b, :, : chosen.shape[1]] = chosen
        return q.reshape(n, -1), selection

    def _select(self, row: Row, sealed: Sealed, layer: int, q: Tensor) -> Tensor:
        """The chunks of this step, [Hkv, min(top_k, selectable)] ascending; ties take the lower id.

        Every head has the same number of outliers, so the heads' selections are equally long.
        """
        n = sealed.published
        scores = torch.baddbmm(
            sealed.bias[layer, :, None, :n], q, sealed.means[layer, :, :n].transpose(1, 2), alpha=q.shape[2] ** -0.5
        )
        if not torch.isfinite(scores.amax()):  # NaN or +∞ somewhere: rare, and the rule is −∞ for what is undefined
            bias = sealed.bias[layer, :, None, :n]
            defined = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            scores = torch.where(torch.isneginf(bias), bias, defined)
        best = torch.log_softmax(scores, dim=2).nan_to_num_(nan=-math.inf).amax(dim=1)
        selectable = n - sealed.outlier_keys.shape[2] // self.config.chunk_size
        count = min(row.top_k, selectable)
        if count == selectable:
            return torch.isfinite(sealed.bias[layer, :, :n]).nonzero()[:, 1].view(len(best), count)
        # Chunks above the count-th best score, then those equal to it in order of id. Outliers must not tie with
        # selectable chunks whose score is −∞ too.
        outlier = torch.isneginf(sealed.bias[layer, :, :n])
        best = best.clamp_min_(torch.finfo(torch.float32).min).masked_fill_(outlier, -math.inf)
        threshold = best.topk(count, dim=1).values[:, -1:]
        above, equal = best > threshold, best == threshold
        room = count - above.sum(dim=1, keepdim=True)
        return (above | (equal & (equal.cumsum(dim=1) <= room))).nonzero()[:, 1].view(len(best), count)

    def _seal_keys(self, row: Row, sealed: Sealed, layer: int) -> None:
        """Landmark and A rows of the chunk that leaves the window at the next step."""
        assert sealed.sealing is not None
        chunk, m = self.config.chunk_size, self.model
        first = sealed.sealing * chunk
        at = row.live.at(first)
        keys = row.live.keys[layer, :, at : at + chunk]
        angles = self.rotary.at(torch.arange(first, first + chunk))
        plain = rotate(keys.transpose(0, 1), angles, backwards=True).flatten(1)
        basis = sealed.basis[layer].transpose(0, 1).reshape(self.rank, m.key_width)
        a, lost, total = project(plain, basis)
        sealed.coordinates[layer, sealed.sealing] = a
        sealed.means[layer, :, sealed.sealing] = landmarks(keys[:, None])[:, 0]
        row.statistics.residual_lost += lost
        row.statistics.residual_total += total

    def key_reconstruct(self, layer: int, selection: Tensor, slots: Tensor) -> Tensor:
        if self.kind == "generation":
            for b, slot in enumerate(self.slots):
                row = None if slot == PADDING else self.rows[slot]
                if row is not None and row.sealed is not None:
                    self._fetch(row, row.sealed, layer, selection[b])
        return torch.zeros(1, dtype=torch.int32)

    def _fetch(self, row: Row, sealed: Sealed, layer: int, selection: Tensor) -> None:
        """Look the selection up, rebuild the missing chunks' keys and fetch their values."""
        m, chunk, caches = self.model, self.config.chunk_size, sealed.caches
        count = int((selection[0] >= 0).sum())
        chosen = selection[:, :count].to(torch.int64)
        slots, head, index = caches.look_up(layer, chosen.numpy())
        base = torch.arange(m.num_kv_heads)[:, None]
        sealed.cache_rows = (torch.from_numpy(slots) + base * caches.slots).flatten()
        row.statistics.hits += slots.size - len(head)
        row.statistics.misses += len(head)
        if not len(head):
            return
        heads, missing = torch.from_numpy(head), chosen[head, index]
        into = torch.from_numpy(slots[head, index]) + heads * caches.slots
        coordinates = sealed.coordinates[layer].index_select(0, missing)
        keys = torch.empty(len(missing), chunk, m.head_size)
        ends = torch.bincount(heads, minlength=m.num_kv_heads).cumsum(0).tolist()
        for h, (begin, end) in enumerate(pairwise([0, *ends])):
            # One small product a chunk, so that a chunk's bits do not depend on which others are missing.
            torch.bmm(coordinates[begin:end], sealed.basis[layer, h].expand(end - begin, -1, -1), out=keys[begin:end])
        turned = rotate(keys, self.rotary.chunks(missing, chunk), per_token=True)
        caches.keys[layer].index_copy_(0, into, turned.flatten(1))
        pool = sealed.values[layer].flatten(0, 1)
        fetched = pool.index_select(0, heads * sealed.values.shape[2] + missing)
        caches.values[layer].index_copy_(0, into, fetched)
        row.statistics.bytes_fetched += fetched.numel() * fetched.element_size()

    def sparse_attention(self, layer: int, q: Tensor, selection: Tensor, ticket: Tensor, slots: Tensor) -> Tensor:
        m, n = self.model, len(q)
        if self.kind == "context":
            queries = q.view(n, m.num_kv_heads, m.group, m.head_size).permute(1, 2, 0, 3)
            return self._context(self.rows[self.slots[0]], layer, queries).permute(2, 0, 1, 3).reshape(n, -1)
        out = torch.zeros(n, m.num_heads * m.head_size)
        queries = q.view(n, m.num_kv_heads, m.group, m.head_size)
        for b, slot in enumerate(self.slots):
            if slot == PADDING:
                continue
            row = self.rows[slot]
            out[b] = self._attend(row, layer, queries[b]).flatten()
            if row.sealed is not None and row.sealed.sealing is not None:
                at = row.live.at(row.sealed.sealing * self.config.chunk_size)
                values = row.live.values[layer, :, at : at + self.config.chunk_size]
                row.sealed.values[layer, :, row.sealed.sealing] = values.flatten(1)
        return out

    def _context(self, row: Row, layer: int, q: Tensor) -> Tensor:
        """Causal attention of a stretch [Hkv, G, N, D]: everything before it, and itself, merged by log-sum-exp."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        end = self.start + q.shape[2]

        def keys_and_values(tokens: slice) -> tuple[Tensor, Tensor]:
            shape = (-1, q.shape[1], -1, -1)  # every query head of a group reads the same memory
            both = row.live.keys[layer, :, None, tokens], row.live.values[layer, :, None, tokens]
            return both[0].expand(shape), both[1].expand(shape)

        own, own_lse = flash(q, *keys_and_values(slice(self.start, end)), 0.0, True)
        if self.start == 0:
            return own  # type: ignore[no-any-return]
        before, before_lse = flash(q, *keys_and_values(slice(0, self.start)))
        share = torch.sigmoid(before_lse - own_lse).unsqueeze(-1)
        return torch.lerp(own, before, share)

    def _attend(self, row: Row, layer: int, q: Tensor) -> Tensor:
        """One token's attention, q [Hkv, G, D]: one softmax over outliers, selected chunks and live tokens."""
        live = slice(row.live.offset, row.live.at(row.length))
        keys, values = [row.live.keys[layer, :, live]], [row.live.values[layer, :, live]]
        if row.sealed is not None:
            sealed, shape = row.sealed, (q.shape[0], -1, q.shape[2])
            cached_keys, cached_values = (t[layer].index_select(0, sealed.cache_rows) for t in sealed.caches.stores)
            keys += [sealed.outlier_keys[layer], cached_keys.view(shape)]
            values += [sealed.outlier_values[layer], cached_values.view(shape)]
        scores = torch.cat([torch.bmm(q, k.transpose(1, 2)) for k in keys], dim=2)
        weights = scores.mul_(q.shape[2] ** -0.5).softmax(dim=2).split([k.shape[1] for k in keys], dim=2)
        out = torch.bmm(weights[0], values[0])
        for w, v in zip(weights[1:], values[1:], strict=True):
            out.baddbmm_(w, v)
        return out
