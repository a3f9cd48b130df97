"""Bytes of one sequence on the GPU and on the host, part by part: what the scheduler reserves."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_shadowkv.config import PAGE_TOKENS, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.hardware import Shape

SEALED_PAGE_TOKENS = 512
"""Tokens that share one page id of A and landmarks, in all layers."""
SCALE_BYTES = 4
"""An fp32 scale of one fp8 chunk and head, or one element of the landmarks' fp32 centre."""


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence over all layers. Tables of chunk ids (below 0.5 %) are not counted.

    Attributes:
        factor_a, factor_b: A [S, r] and B [r, num_kv_heads · head_size] of the low-rank keys.
        landmarks: chunk means [num_kv_heads, S / C, head_size], without their scales.
        outliers: exact keys and values of the outlier chunks.
        cache: keys and values of the chunk cache.
        live: live pages of keys and values: the window of a sealed row, all tokens of a dense one.
        scales: of landmarks and values, where they are fp8; on the GPU.
        values: of sealed chunks, in host memory unless they go to spare GPU memory.
        prefill: live pages held until the row is sealed. One long prompt is in flight at a time; a row that starts
            below the dense limit holds them until it outgrows it.
    """

    factor_a: int = 0
    factor_b: int = 0
    landmarks: int = 0
    outliers: int = 0
    cache: int = 0
    live: int = 0
    scales: int = 0
    values: int = 0
    prefill: int = 0

    @property
    def gpu(self) -> int:
        """Bytes that stay on the GPU."""
        return sum((self.factor_a, self.factor_b, self.landmarks, self.outliers, self.cache, self.live, self.scales))

    @property
    def host(self) -> int:
        return self.values


def paged(tokens: int, page: int) -> int:
    """Tokens rounded up to whole pages."""
    return -(-tokens // page) * page


def window_pages(window: int) -> int:
    """Live pages of a sealed row: its window is ``window`` + C − 1 tokens at most, from any chunk of a page on."""
    return (PAGE_TOKENS + window - 2) // PAGE_TOKENS + 1


def sequence_bytes(
    shape: Shape,
    kv: ShadowKVConfig,
    tokens: int,
    *,
    prompt: int | None = None,
    element_bytes: int = 2,
    value_bytes: int = 2,
    landmark_bytes: int = 2,
) -> SequenceBytes:
    """What one sequence of at most ``tokens`` tokens needs, prompt and generated (design section 4).

    Args:
        kv: settings with ``top_k`` and ``cache_factor`` of this request.
        prompt: tokens of its prompt; None: all of them.
        element_bytes: of A, B, live pages, outliers and cached keys.
        value_bytes, landmark_bytes: 1 (fp8, with fp32 scales), 2 or 4.

    Raises:
        ConfigError: tokens, prompt or an element size out of range, or a rank above the keys' width.
    """
    prompt = tokens if prompt is None else prompt
    if not 1 <= prompt <= tokens:
        raise ConfigError(f"a prompt of {prompt} tokens in a sequence of {tokens}", "from 1 to the sequence's tokens")
    for name, size, sizes in (
        ("element", element_bytes, (2, 4)),
        ("value", value_bytes, (1, 2, 4)),
        ("landmark", landmark_bytes, (1, 2, 4)),
    ):
        if size not in sizes:
            raise ConfigError(f"a {name} of {size!r} bytes", f"one of {', '.join(map(str, sizes))}")
    width = shape.num_kv_heads * shape.head_size
    per_token = width * shape.num_layers  # elements of keys, or of values, of one token
    pair = 2 * per_token * element_bytes
    if tokens <= kv.limit:
        return SequenceBytes(live=paged(tokens, PAGE_TOKENS) * pair)
    rank, c = kv.resolved(width).rank or 0, kv.chunk_size
    chunks = kv.sealed_chunks(tokens)
    slots = paged(chunks * c, SEALED_PAGE_TOKENS) // c
    heads = shape.num_kv_heads * shape.num_layers
    scales = slots * heads * SCALE_BYTES * ((landmark_bytes == 1) + (value_bytes == 1))
    centre = per_token * SCALE_BYTES if landmark_bytes == 1 else 0
    return SequenceBytes(
        factor_a=slots * c * rank * shape.num_layers * element_bytes,
        factor_b=rank * per_token * element_bytes,
        landmarks=slots * per_token * landmark_bytes,
        outliers=min(kv.outliers, chunks) * c * pair,
        cache=min(kv.cache_factor * kv.top_k, chunks) * c * per_token * (element_bytes + value_bytes),
        live=window_pages(kv.window) * PAGE_TOKENS * pair,
        scales=scales + centre,
        values=chunks * c * per_token * value_bytes,
        prefill=paged(max(prompt, int(min(tokens, kv.limit))), PAGE_TOKENS) * pair,
    )
