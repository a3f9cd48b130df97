"""Memory and time of ShadowKV on one GPU by arithmetic: what fits, how fast it decodes, and when dense is better.

Bytes, seconds and tokens; GB = 1e9 bytes. Needs neither torch nor a GPU. The time model was fitted to measurements on
one H200 with Llama-3.1-8B's shape and is scaled to other models and GPUs: an estimate, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.footprint import SCALE_BYTES, SequenceBytes, sequence_bytes
from trtllm_shadowkv.hardware import KERNEL_FLOOR, matrices_time
from trtllm_shadowkv.workload import Batch, Workload, dense_batch, largest_batch, longest_context, on_host_share

__all__ = [
    "Batch",
    "Comparison",
    "Dense",
    "LayerTime",
    "SequenceBytes",
    "Step",
    "Workload",
    "compare",
    "dense_batch",
    "dense_step",
    "largest_batch",
    "layer_time",
    "longest_context",
    "paper_bandwidth",
    "paper_memory_saving",
    "sequence_bytes",
    "shadow_step",
]

# Where the constants come from: M measured on the H200, A assumption.
SCORE_SHARE, ATTENTION_SHARE = 0.85, 0.75  # A: shares of the memory bandwidth that these kernels reach
TILE_SHARE = 300 / 989  # A: share of the tensor rate that small tiles reach (300 TFLOP/s on the H200)
SELECT_TIME = 8e-6  # A: softmax, top-k, look-up and victims in one kernel, without the reading of scores
LINK_START = 3e-6  # A: from "selected" to the first byte
STEP_FIXED = 0.25e-3  # A: sampling, step prologue, graph launch
ONE_ROW_SHARE = 3.4 / 4.2  # M: dense attention of a single row (0.159 ms a layer at 128K)
GROUP_LAUNCHES = 3  # A: further kernels for each further row group
CLEAR_GAIN = 1.1
"""A: gains below this are within the model's error."""
Kind = Literal["weights", "short", "staging", "gpu", "host", "dense", "even", "gain"]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's attention, part by part; parts overlap, so ``total`` is less than their sum.

    Attributes:
        append: RoPE, keys and values into the live pages.
        score, select: landmarks against queries; softmax, top-k, cache look-up.
        link: missing values over the host link.
        rebuild: keys of missing chunks from A and B.
        hits: attention over the window, outliers and cached chunks.
        misses: attention over fetched chunks, and the merge.
        waiting: time in which only the link works.
    """

    append: float
    score: float
    select: float
    link: float
    rebuild: float
    hits: float
    misses: float
    waiting: float
    total: float


def layer_time(w: Workload, rows: int, on_host: float = 1.0) -> LayerTime:
    """Time of one layer's attention for ``rows`` sealed rows, ``on_host`` of whose values lie in host memory."""
    m, c, n, k = w.model, w.kv.chunk_size, w.chunks, w.top_k
    rank, miss = w.kv.rank or 0, 1 - w.hits
    bandwidth = w.gpu.bandwidth
    logits = rows * m.num_heads * n * 4 / bandwidth  # fp32: score writes them, select reads them
    landmark = m.head_size * w.landmark_bytes + (SCALE_BYTES if w.landmark_bytes == 1 else 0)
    score = KERNEL_FLOOR + rows * m.num_kv_heads * n * landmark / (SCORE_SHARE * bandwidth) + logits
    select = SELECT_TIME + logits
    fetched = rows * k * miss * c * w.width * w.value_bytes * on_host
    link = fetched / w.gpu.link + LINK_START if fetched else 0.0
    new = rows * m.num_kv_heads * k * miss * c  # tokens of single heads
    by_memory = new * (rank + m.head_size) * 2 / bandwidth
    by_tensor = new * rank * m.head_size * 2 / (TILE_SHARE * w.gpu.tensor)
    rebuild = KERNEL_FLOOR + max(by_memory, by_tensor)
    token = (2 + w.value_bytes) * w.width * rows / (ATTENTION_SHARE * bandwidth)
    exact = 4 * w.width * rows / (ATTENTION_SHARE * bandwidth)
    hits = 1.5 * KERNEL_FLOOR + k * (1 - miss) * c * token + (w.outliers * c + w.kv.window) * exact
    misses = 2 * KERNEL_FLOOR + k * miss * c * token
    g = min(w.row_groups, rows)
    launches = GROUP_LAUNCHES * (g - 1) * KERNEL_FLOOR
    body = (score + select + misses) * (1 - 1 / g) + rebuild + hits + launches  # what the link can hide behind
    total = KERNEL_FLOOR + (score + select) / g + max(link, body) + misses / g
    return LayerTime(KERNEL_FLOOR, score, select, link, rebuild, hits, misses, max(0.0, link - body), total)


@dataclass(frozen=True)
class Step:
    """One decode step of ``rows`` rows: seconds of all layers' attention, of everything else, and their sum."""

    rows: int
    attention: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.attention + self.rest

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


def shadow_step(w: Workload, rows: int, on_host: float = 1.0) -> Step:
    """A step of ShadowKV. Rows below the dense limit attend to everything."""
    if w.tokens <= w.kv.limit:
        return dense_step(w, rows, 2)
    attention = w.model.num_layers * layer_time(w, rows, on_host).total
    return Step(rows, attention, matrices_time(w.model, w.gpu, rows) + STEP_FIXED)


def dense_step(w: Workload, rows: int, kv_bytes: int) -> Step:
    """A step of exact attention over a cache of ``kv_bytes`` an element; whether it fits is not asked."""
    rate = w.gpu.bandwidth * (ONE_ROW_SHARE if rows == 1 else 1.0)
    layer = max(2 * KERNEL_FLOOR, rows * w.tokens * 2 * w.width * kv_bytes / rate)
    return Step(rows, w.model.num_layers * layer, matrices_time(w.model, w.gpu, rows) + STEP_FIXED)


@dataclass(frozen=True)
class Dense:
    """Dense attention beside ShadowKV: the most rows that fit, and a step of the rows asked for (None: none fit)."""

    largest: int
    step: Step | None


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        kind: ``weights``: they leave no room; ``short``: rows stay below the dense limit; ``staging``: the live pages
            of one prompt do not fit; ``gpu``, ``host``: one row does not fit there; ``dense``, ``even``, ``gain``:
            tokens/s against dense bfloat16.
        batch: the largest one; None where the context stays dense.
        shadow, layer: a step of the rows asked for and one layer of it; None where nothing fits.
        dense: by key/value type, ``bfloat16`` and ``fp8``.
        gains: ShadowKV's tokens/s over dense's, by the same keys; None where ShadowKV fits no row. (Where it fits, so
            does a dense row: prefill needs the room for one.)
    """

    kind: Kind
    bytes: SequenceBytes
    batch: Batch | None
    shadow: Step | None
    layer: LayerTime | None
    dense: dict[str, Dense]
    gains: dict[str, float | None]


def compare(w: Workload, rows: int | None = None) -> Comparison:
    """ShadowKV and dense attention, each with ``rows`` rows or as many of them as fit; None: as many as fit.

    Raises:
        ConfigError: rows below one.
    """
    if rows is not None and rows < 1:
        raise ConfigError(f"the batch size is {rows}", "at least 1")

    def chosen(largest: int) -> int:
        return largest if rows is None else min(rows, largest)

    dense = {}
    for name, size in (("bfloat16", 2), ("fp8", 1)):
        fits = dense_batch(w, size)
        dense[name] = Dense(fits, dense_step(w, chosen(fits), size) if fits else None)
    short = w.tokens <= w.kv.limit
    batch = None if short else largest_batch(w)
    layer = None
    if batch is None:
        shadow = dense["bfloat16"].step
    elif batch.rows:
        count = chosen(batch.rows)
        shadow = shadow_step(w, count, on_host_share(w, count))
        layer = layer_time(w, count, on_host_share(w, count))
    else:
        shadow = None
    gains = {
        name: shadow.tokens_per_second / d.step.tokens_per_second if shadow and d.step else None
        for name, d in dense.items()
    }
    return Comparison(_kind(w, shadow, gains["bfloat16"]), w.bytes, batch, shadow, layer, dense, gains)


def _kind(w: Workload, shadow: Step | None, gain: float | None) -> Kind:
    if w.budget <= 0:
        return "weights"
    if w.tokens <= w.kv.limit:
        return "short" if shadow else "gpu"
    if gain is None:
        room = w.budget - w.bytes.prefill
        return "staging" if room <= 0 else "gpu" if room < w.bytes.gpu else "host"
    return "dense" if gain < 1 else "even" if gain < CLEAR_GAIN else "gain"


def paper_memory_saving(width: int, chunk: int, tokens: int, top_k: int, outliers: int, rank: int) -> float:
    """GPU memory saving, 2SM / (SM/C + 2(K+O)CM + Sr + rM): arXiv 2410.21465, appendix, with the factor M put back.

    The paper prints the second term without M, and 7.08 for width M = 1024, C = 8, S = 128K, K = 256, O = 48, r = 160;
    with all terms in elements it is 6.26.
    """
    s, m = tokens, width
    return 2 * s * m / (s * m / chunk + 2 * (top_k + outliers) * chunk * m + s * rank + rank * m)


def paper_bandwidth(
    bandwidth: float, link: float, chunk: int, tokens: int, top_k: int, outliers: int, hit_rate: float
) -> float:
    """Equivalent bandwidth, 2S·B / (S/C + 2(K+O)C + (1-hit)·K·C·B/link), in bytes/s (arXiv 2410.21465, section 4)."""
    read = tokens / chunk + 2 * (top_k + outliers) * chunk
    return 2 * tokens * bandwidth / (read + (1 - hit_rate) * top_k * chunk * bandwidth / link)
