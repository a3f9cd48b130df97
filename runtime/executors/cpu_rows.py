"""What one row holds on the CPU: contiguous live keys and values, and its sealed state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.runtime.executors.chunk_caches import ChunkCaches
from trtllm_shadowkv.runtime.state import Footprint, RowStatistics

FLOAT_BYTES = 4
WINDOW_SLACK = 256
"""Tokens a window's buffer holds beyond the window, so that it is moved to the front once in as many steps."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of one row's buffers, all of them known when it is admitted.

    Args:
        prompt_tokens, total_tokens: of the sequence, prompt alone and with everything it may generate.
        limit: its dense limit in tokens.
    """

    model: ModelConfig
    config: ShadowKVConfig
    prompt_tokens: int
    total_tokens: int
    limit: float

    @property
    def live_tokens(self) -> int:
        """Capacity of the live buffer before sealing."""
        return int(max(self.prompt_tokens, min(self.total_tokens, self.limit)))

    @property
    def is_sealed_some_day(self) -> bool:
        return self.total_tokens > self.limit

    @property
    def chunks(self) -> int:
        """Sealed chunks at the row's longest, the one in the making included."""
        return self.config.sealed_chunks(self.total_tokens + 1)

    @property
    def slots(self) -> int:
        """Cache slots of a KV head: no more than there are chunks to hold."""
        return min(self.config.cache_factor * self.config.top_k, self.chunks)

    @property
    def window_tokens(self) -> int:
        return self.config.window + 2 * self.config.chunk_size + WINDOW_SLACK

    @property
    def outliers(self) -> int:
        """Outlier chunks at most (fewer where fewer chunks are sealed)."""
        return min(self.config.outliers, self.chunks)

    def footprint(self) -> Footprint:
        m, c = self.model, self.config
        token = m.num_layers * m.key_width * FLOAT_BYTES
        live = 2 * self.live_tokens * token
        if not self.is_sealed_some_day:
            return Footprint(live, 0, 0)
        assert c.rank is not None
        tokens = self.chunks * c.chunk_size
        factors = (tokens + m.key_width) * c.rank * m.num_layers * FLOAT_BYTES
        landmarks = self.chunks * (token + m.num_layers * m.num_kv_heads * FLOAT_BYTES)  # and the exclusion bias
        kept = 2 * (self.outliers * c.chunk_size + self.window_tokens) * token
        width = c.chunk_size * m.head_size
        cache = ChunkCaches.nbytes(m.num_layers, m.num_kv_heads, self.slots, width)
        return Footprint(live, factors + landmarks + kept + cache, tokens * token)


@dataclass
class Live:
    """Post-RoPE keys and values of tokens [start, …), all layers: [L, Hkv, capacity, D] each."""

    keys: Tensor
    values: Tensor
    start: int = 0
    offset: int = 0  # of token ``start`` in the buffers

    @classmethod
    def empty(cls, model: ModelConfig, capacity: int, start: int = 0) -> Live:
        shape = (model.num_layers, model.num_kv_heads, capacity, model.head_size)
        return cls(torch.empty(shape), torch.empty(shape), start)

    def at(self, token: int) -> int:
        """Index of a token in the buffers."""
        return token - self.start + self.offset

    def drop_before(self, token: int) -> None:
        self.offset += token - self.start
        self.start = token

    def make_room(self, length: int) -> None:
        """Move the kept tokens to the front when token ``length`` would not fit any more."""
        if self.at(length) < self.keys.shape[2]:
            return
        kept = slice(self.offset, self.at(length))
        for buffer in (self.keys, self.values):
            moved = buffer[:, :, kept].clone()
            buffer[:, :, : moved.shape[2]] = moved
        self.offset = 0


@dataclass
class Sealed:
    """Sealed state of a row, all layers stacked (L layers, n chunks of capacity).

    Attributes:
        coordinates: A, [L, n, C, r].
        basis: B by head, [L, Hkv, r, D].
        means: landmarks, [L, Hkv, n, D].
        bias: 0, or −∞ for an outlier chunk, [L, Hkv, n].
        values: [L, Hkv, n, C·D], a slab of the value pool.
        outlier_keys, outlier_values: [L, Hkv, o·C, D].
        published: chunks that may be selected; ``sealing``: the chunk that is sealed in this step.
        cache_rows: where this step's selected chunks of the current layer lie in the caches, [Hkv · m].
    """

    coordinates: Tensor
    basis: Tensor
    means: Tensor
    bias: Tensor
    values: Tensor
    outlier_keys: Tensor
    outlier_values: Tensor
    caches: ChunkCaches
    published: int
    sealing: int | None = None
    cache_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass
class Row:
    shape: RowShape
    top_k: int
    live: Live
    length: int = 0
    prompt_done: bool = False
    sealed: Sealed | None = None
    statistics: RowStatistics = field(default_factory=RowStatistics)
