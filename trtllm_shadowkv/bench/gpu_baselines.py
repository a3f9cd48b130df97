"""Timing on a GPU, and what torch reaches there: the baselines of the kernel bench."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.profiler
from torch import Tensor
from torch._C._autograd import DeviceType

from trtllm_shadowkv.bench.synthetic import CHUNK, HEAD_SIZE, HEADS, KV_HEADS, OUTLIERS, TOP_K, WINDOW


def elapsed(stream: torch.cuda.Stream, work: Callable[[], Any]) -> float:
    """Microseconds of what ``work`` puts on ``stream``; waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        begin.record(stream)
        work()
        end.record(stream)
    stream.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e3


def microseconds(stream: torch.cuda.Stream, work: Callable[[], None], repeats: int = 7) -> float:
    """Median time of one replay of ``work``, captured as a graph on ``stream``."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return statistics.median([elapsed(stream, graph.replay) for _ in range(repeats + 1)][1:])


def device_kernels(work: Callable[[], Any]) -> list[tuple[str | None, Any]]:
    """Event of each kernel that ``work`` runs, and its name where it is ours, by torch's profiler; waits for the GPU.

    Copies and fills are not among them.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    ours = re.compile(r"kernels::.*?(\w+)Kernel")
    found: list[tuple[str | None, Any]] = []
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset")):
            match = ours.search(event.name())
            found.append((match[1] if match else None, event))
    return found


def kernel_events(work: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Name and event of each kernel of ours that ``work`` runs, by torch's profiler; waits for the device."""
    return [(name, event) for name, event in device_kernels(work) if name is not None]


def copy_bandwidth() -> float:
    """Bytes a second of a large copy inside the GPU, read and written bytes counted."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)

    # Not in a graph, where copies are left to a slower copy engine.
    times = [elapsed(torch.cuda.current_stream(), lambda: target.copy_(source)) for _ in range(6)]
    return 2 * source.nbytes / statistics.median(times[1:]) * 1e6


def dense_baseline(batch: int, context: int) -> float:
    """Microseconds of torch's attention over dense bfloat16 keys and values."""
    q = torch.randn(batch, HEADS, 1, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    kv = [torch.randn(batch, KV_HEADS, context, HEAD_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def work() -> None:
        for _ in range(8):
            torch.nn.functional.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)

    work()
    return microseconds(torch.cuda.Stream(), work) / 8


def torch_stages(batch: int, context: int) -> dict[str, float]:
    """Microseconds of torch's own operations for scoring (bf16 landmarks), for softmax and top-k, for attention over
    the sparse budget."""
    n, g = context // CHUNK, HEADS // KV_HEADS
    q = torch.randn(batch * KV_HEADS, g, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    marks = torch.randn(batch * KV_HEADS, HEAD_SIZE, n, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(batch * KV_HEADS, g, n, device="cuda")
    tokens = (TOP_K + OUTLIERS) * CHUNK + WINDOW
    query = torch.randn(batch, HEADS, 1, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(batch, KV_HEADS, tokens, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)

    works: dict[str, Callable[[], Any]] = {
        "score": lambda: q @ marks,
        "select": lambda: scores.softmax(-1).amax(1).topk(TOP_K),
        "attend": attend,
    }
    times = {}
    for name, work in works.items():
        work()

        def repeated(work: Callable[[], Any] = work) -> None:
            for _ in range(8):
                work()

        times[name] = microseconds(stream, repeated) / 8
    return times
