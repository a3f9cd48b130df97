"""One planning question (model, GPU, settings, context) and the answer to what fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from trtllm_shadowkv.config import PAGE_TOKENS, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.footprint import SequenceBytes, paged, sequence_bytes
from trtllm_shadowkv.hardware import Gpu, Shape, check_positive, weight_bytes

Limit = Literal["gpu", "host", "both"]

GPU_RESERVE = 3.0e9
"""Bytes for CUDA contexts, activations, logits and scores (assumption)."""
HOST_MEMORY = 115 * 2**30
"""Bytes that a machine of 128 GiB leaves for values (assumption)."""
HITS = (
    (0.0080, (0.496, 0.671, 0.792, 0.870)),
    (0.0159, (0.557, 0.745, 0.861, 0.927)),
    (0.0319, (0.617, 0.814, 0.916, 0.964)),
    (0.0638, (0.665, 0.865, 0.950, 0.982)),
)
"""Budget share k / chunks, and the hit rate of an LRU of 1, 2, 4 and 8 times k chunks: measured on SmolLM2-135M with 8K
tokens of real text; the last row is extrapolated."""


@dataclass(frozen=True)
class Workload:
    """Rows of equal length on one GPU, 2-byte weights and keys.

    Attributes:
        tokens: context of every row.
        host_memory: bytes of host memory that may be pinned for values.
        value_bytes, landmark_bytes: 1 (fp8) or 2 (bfloat16, float16).
        hit_rate: of the chunk cache; None: the measured table :data:`HITS`.
        spare_tier: values go to spare GPU memory first and only the rest to the host.
        row_groups: group g + 1 is scored while group g is fetched; never more than rows.

    Raises:
        ConfigError: a number out of range, or a rank larger than the keys are wide.
    """

    model: Shape
    gpu: Gpu
    kv: ShadowKVConfig
    tokens: int
    host_memory: float = HOST_MEMORY
    value_bytes: int = 2
    landmark_bytes: int = 2
    hit_rate: float | None = None
    spare_tier: bool = False
    row_groups: int = 4

    def __post_init__(self) -> None:
        for name, value, high in (("context", self.tokens, 1 << 30), ("number of row groups", self.row_groups, 1024)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ConfigError(f"the {name} is {value!r}", f"a whole number from 1 to {high}")
        check_positive("the host memory", self.host_memory)
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"the hit rate is {self.hit_rate!r}", "a number from 0 to 1")
        for name, size in (("value", self.value_bytes), ("landmark", self.landmark_bytes)):
            if size not in (1, 2):
                raise ConfigError(f"a {name} of {size} bytes on the GPU", "1 (fp8) or 2 (bfloat16, float16)")
        object.__setattr__(self, "kv", self.kv.resolved(self.width))

    @property
    def width(self) -> int:
        return self.model.num_kv_heads * self.model.head_size

    @property
    def bytes(self) -> SequenceBytes:
        return sequence_bytes(
            self.model, self.kv, self.tokens, value_bytes=self.value_bytes, landmark_bytes=self.landmark_bytes
        )

    @property
    def budget(self) -> float:
        """GPU bytes left for sequences; may be negative."""
        return self.gpu.memory - weight_bytes(self.model) - GPU_RESERVE

    @property
    def chunks(self) -> int:
        return self.kv.sealed_chunks(self.tokens)

    @property
    def outliers(self) -> int:
        return min(self.kv.outliers, self.chunks)

    @property
    def top_k(self) -> int:
        """Chunks really selected: no more than are selectable."""
        return min(self.kv.top_k, self.chunks - self.outliers)

    @property
    def attended(self) -> int:
        """Tokens that exact attention reads in one step."""
        return (self.top_k + self.outliers) * self.kv.chunk_size + self.kv.window

    @property
    def budget_share(self) -> float:
        """Selected tokens over all tokens."""
        return self.top_k * self.kv.chunk_size / self.tokens

    @property
    def hits(self) -> float:
        """Share of the selected chunks found in the chunk cache."""
        if self.hit_rate is not None:
            return self.hit_rate
        selectable = self.chunks - self.outliers
        if self.kv.cache_factor * self.kv.top_k >= selectable:
            return 1.0
        return measured_hit_rate(self.budget_share, self.kv.cache_factor)


def measured_hit_rate(share: float, factor: int) -> float:
    """Hit rate of an LRU of ``factor`` times k chunks where k is ``share`` of all; log-linear in :data:`HITS`.

    Shares above the table take its last row, shares below it follow the slope of its first two.
    """
    column = min(math.log2(factor), 3.0)
    left = min(int(column), 2)

    def at(row: int) -> float:
        rates = HITS[row][1]
        return rates[left] + (column - left) * (rates[left + 1] - rates[left])

    row = next((i for i in range(len(HITS) - 2) if share <= HITS[i + 1][0]), len(HITS) - 2)
    low, high = HITS[row][0], HITS[row + 1][0]
    position = min(math.log(share / low) / math.log(high / low), 1.0)
    return max(0.0, at(row) + position * (at(row + 1) - at(row)))


@dataclass(frozen=True)
class Batch:
    """The most rows that fit, the share of their values in host memory, and what limits them."""

    rows: int
    on_host: float
    limit: Limit


def on_host_share(w: Workload, rows: int) -> float:
    """Share of the values that ``rows`` rows keep in host memory; 1 without the spare tier."""
    if not w.spare_tier or rows == 0:
        return 1.0
    spare = w.budget - w.bytes.prefill - rows * w.bytes.gpu
    return min(1.0, max(0.0, 1 - spare / (rows * w.bytes.host)))


def largest_batch(w: Workload) -> Batch:
    """Rows that fit beside the weights and the live pages of one prompt in flight; a sealed context is assumed."""
    need = w.bytes
    room = w.budget - need.prefill
    by_gpu = max(0, int(room // need.gpu))
    if w.spare_tier:
        by_host = max(0, int((w.host_memory + room) // (need.gpu + need.host)))
    else:
        by_host = int(w.host_memory // need.host)
    rows = min(by_gpu, by_host)
    limit: Limit = "gpu" if by_gpu <= by_host else "both" if w.spare_tier else "host"
    return Batch(rows, on_host_share(w, rows), limit)


def dense_batch(w: Workload, kv_bytes: int) -> int:
    """Rows with a whole key/value cache of ``kv_bytes`` an element on the GPU."""
    return max(0, int(w.budget // (2 * w.width * w.model.num_layers * kv_bytes * paged(w.tokens, PAGE_TOKENS))))


def longest_context(w: Workload) -> int:
    """Largest context (a multiple of 1,024) of which one sequence fits with these settings; 0: none."""
    low, high = 0, 1 << 16
    while high - low > 1:
        middle = (low + high) // 2
        tokens = middle * 1024
        fits = (tokens <= w.kv.limit and dense_batch(replace(w, tokens=tokens), 2)) or (
            tokens > w.kv.limit and largest_batch(replace(w, tokens=tokens)).rows
        )
        low, high = (middle, high) if fits else (low, middle)
    return low * 1024
