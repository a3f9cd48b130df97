"""Context kernels on one GPU: attention of a stretch beside torch's, sealing, and a prefill's breakdown.

python -m trtllm_shadowkv.bench.context --output docs/results/context-h200.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from trtllm_shadowkv.bench.gpu_baselines import elapsed, kernel_events
from trtllm_shadowkv.bench.report import as_json, gpu_report, run_on_gpu
from trtllm_shadowkv.bench.synthetic import CHUNK, HEAD_SIZE, HEADS, KV_HEADS, OUTLIERS, RANK, TOP_K, WINDOW, llama
from trtllm_shadowkv.config import PAGE_TOKENS, ShadowKVConfig
from trtllm_shadowkv.footprint import SEALED_PAGE_TOKENS
from trtllm_shadowkv.runtime.cuda_memory import CudaMemory
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab

STRETCH = 8192
CONTEXTS = (61_440, 124_928)
LAYERS = 32
SAMPLE = 4
"""Layers that a stretch is measured over."""
DENSE_FLOPS = 720e12
"""What cuBLAS reaches with the dense layers of a Llama-3.1-8B on an H200, a second."""
PARAMETERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
"""Of those layers."""


def torch_attention(length: int, context: int) -> tuple[str, float]:
    """torch's fastest causal attention of the last ``length`` of ``context`` tokens: its name and microseconds."""
    q = torch.randn(1, HEADS, length, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, HEADS, context, HEAD_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def work() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(length, context))

        try:
            with sdpa_kernel(backend):
                work()
                stream = torch.cuda.current_stream()
                found[backend.name.lower()] = statistics.median(elapsed(stream, work) for _ in range(5))
        except RuntimeError:  # a backend that does not take this mask
            continue
    name = min(found, key=lambda backend: found[backend])
    return name, found[name]


class Prompt:
    """One row of ``context`` tokens whose live pages hold noise in every layer."""

    def __init__(self, context: int, kind: str, dense: bool) -> None:
        element = {"bf16": "element", "fp8": "e4m3"}[kind]
        config = ShadowKVConfig(chunk_size=CHUNK, rank=RANK, top_k=TOP_K, outliers=OUTLIERS, window=WINDOW)
        self.context, total = context, context + 64
        self.state = CudaState(
            llama(LAYERS),
            config,
            dtype="bfloat16",
            landmark_format=element,
            value_format=element,
            slots=1,
            sealed_rows=1,
            max_batch=1,
            live_pages=-(-total // PAGE_TOKENS) + 4,
            sealed_pages=-(-total // SEALED_PAGE_TOKENS) + 1,
            max_tokens=total,
        )
        self.memory = CudaMemory(self.state)
        self.memory.live_keys.normal_()
        self.memory.live_values.normal_()
        self.stream = torch.cuda.Stream()
        stride = self.state.config.sealed_chunks(total + 1)
        layer_bytes = KV_HEADS * stride * CHUNK * HEAD_SIZE * self.memory.value_dtype.itemsize
        self.slab = None if dense else PinnedSlab(LAYERS * layer_bytes)
        addresses = None
        if self.slab is not None:
            addresses = [self.slab.device_address + i * layer_bytes for i in range(LAYERS)]
        self.value_bytes = KV_HEADS * self.state.config.sealed_chunks(context + 1) * (layer_bytes // KV_HEADS // stride)
        self.state.allocate(
            0,
            prompt_tokens=context,
            total_tokens=total,
            top_k=TOP_K,
            dense=dense,
            value_addresses=addresses,
            value_stride=0 if dense else stride,
            stream=self.stream.cuda_stream,
        )

    def __enter__(self) -> Prompt:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.state.close()
        if self.slab is not None:
            self.slab.close()
        del self.memory
        torch.cuda.empty_cache()

    def begin(self, start: int, length: int) -> None:
        """Begins a stretch, of noise."""
        width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        self.length = length
        self.qkv = torch.randn(length, width, device="cuda", dtype=torch.bfloat16)
        self.q = torch.empty(length, HEADS * HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.positions = torch.arange(start, start + length, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        end = start + length
        self.state.begin_pass("context", [0], start, length, end == self.context, stream=self.stream.cuda_stream)

    def append(self, layer: int = 0) -> None:
        """RoPE and append, and the stretch's values on their way to the host."""
        q, stream = self.q.data_ptr(), self.stream.cuda_stream
        self.state.landmark_topk(layer, self.qkv.data_ptr(), self.positions.data_ptr(), self.length, q, None, stream)

    def attend(self, layer: int = 0) -> None:
        self.state.sparse_attention(layer, self.q.data_ptr(), self.length, self.out.data_ptr(), self.stream.cuda_stream)

    def layers(self) -> None:
        """Both, of a few layers."""
        for layer in range(SAMPLE):
            self.append(layer)
            self.attend(layer)

    def seal(self) -> tuple[float, dict[str, float]]:
        """Microseconds of sealing all layers, and of its kernels, a layer, by torch's profiler."""
        assert self.state.fault(self.stream.cuda_stream) == 0
        total = 0.0

        def work() -> None:
            nonlocal total
            total = elapsed(self.stream, lambda: self.state.seal_prompt(0, self.stream.cuda_stream))

        parts: dict[str, float] = {}
        for name, event in kernel_events(work):
            parts[name] = parts.get(name, 0.0) + event.duration_ns() * 1e-3 / LAYERS
        assert self.state.fault(self.stream.cuda_stream) == 0
        return total, parts


def median(stream: torch.cuda.Stream, work: Callable[[], None]) -> float:
    """Microseconds of ``work``."""
    return statistics.median(elapsed(stream, work) for _ in range(3))


def read(dense: Prompt, storing: Prompt) -> list[dict[str, Any]]:
    """Reads the same prompt in stretches, as a dense row and as one whose values leave; microseconds a layer.

    ``read`` and ``read_and_store`` are RoPE, append and attention of a layer without and with the stretch's values on
    their way to the host, by turns; ``store`` is the time that they take beside the attention.
    """
    rows = []
    for start in range(0, dense.context, STRETCH):
        n = min(STRETCH, dense.context - start)
        for prompt in (dense, storing):
            prompt.begin(start, n)
            prompt.layers()
        torch.cuda.synchronize()
        flops = 4 * HEADS * HEAD_SIZE * (n * start + n * (n + 1) / 2)
        attend = median(dense.stream, dense.attend)
        row = {"start": start, "length": n, "append": median(dense.stream, dense.append), "attend": attend}
        turns = [(elapsed(dense.stream, dense.layers), elapsed(storing.stream, storing.layers)) for _ in range(5)]
        row["read"], row["read_and_store"] = (statistics.median(t) / SAMPLE for t in zip(*turns, strict=True))
        events = kernel_events(storing.layers)
        row["store"] = statistics.median(e.duration_ns() * 1e-3 for name, e in events if name.startswith("store"))
        rows.append(row | {"teraflops": flops / attend * 1e-6})
    return rows


def measure(context: int, kind: str) -> list[dict[str, Any]]:
    """Attention of every stretch, the seal, and what they are of a whole prefill."""
    with Prompt(context, kind, dense=True) as dense, Prompt(context, kind, dense=False) as storing:
        stretches = read(dense, storing)
        total, parts = storing.seal()
        value_bytes = storing.value_bytes
    side = {"context": context, "values": kind, "landmarks": kind}
    rows: list[dict[str, Any]] = []
    for found in stretches:
        row = {"kernel": "attend_stretch", "start": found["start"], "length": found["length"], "values": kind}
        row |= {"microseconds": found["attend"], "teraflops": found["teraflops"]}
        rows.append(
            row | {f"{name}_microseconds": found[name] for name in ("append", "read", "read_and_store", "store")}
        )
    layers = 2 * PARAMETERS * context / DENSE_FLOPS * 1e3
    attention = LAYERS * sum(row["read"] for row in stretches) * 1e-3
    storing_time = LAYERS * sum(row["read_and_store"] - row["read"] for row in stretches) * 1e-3
    store = LAYERS * sum(row["store"] for row in stretches) * 1e-3
    rows.append({"kernel": "seal", "milliseconds": total * 1e-3, "microseconds_a_layer": parts} | side)
    rows.append(
        {"kernel": "prefill", "dense_layers_milliseconds": layers, "attention_milliseconds": attention}
        | {"seal_milliseconds": total * 1e-3, "storing_milliseconds": storing_time}
        | {"store_milliseconds": store, "store_gigabytes_a_second": LAYERS * value_bytes / store * 1e-6}
        | {"sealing_share": (total * 1e-3 + max(storing_time, 0.0)) / (layers + attention)}
        | side
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--output")
    o = parser.parse_args()
    data = gpu_report("make bench-context")
    found: list[dict[str, Any]] = []
    for context in sorted(o.contexts, reverse=True):
        for kind in o.formats:
            found += measure(context, kind)
            if o.output:
                Path(o.output).write_text(as_json(data, found), encoding="utf-8")
    for row in found:
        if row["kernel"] == "attend_stretch" and row["values"] == o.formats[0]:
            row["baseline"], row["baseline_microseconds"] = torch_attention(row["length"], row["start"] + row["length"])
            row["speedup"] = row["baseline_microseconds"] / row["microseconds"]
    text = as_json(data, found)
    if o.output:
        Path(o.output).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_on_gpu(main)
