"""Decode kernels on one GPU: each stage and a whole layer's step, beside torch's dense attention in the same run.

python -m trtllm_shadowkv.bench.kernels --output docs/results/kernels-h200.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtllm_shadowkv.bench.gpu_baselines import (
    copy_bandwidth,
    dense_baseline,
    elapsed,
    kernel_events,
    microseconds,
    torch_stages,
)
from trtllm_shadowkv.bench.report import as_json, gpu_report, run_on_gpu
from trtllm_shadowkv.bench.synthetic import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    MEASURED,
    OUTLIERS,
    RANK,
    TOP_K,
    WARM_UP,
    WINDOW,
    Case,
    SyntheticRows,
)
from trtllm_shadowkv.library import load
from trtllm_shadowkv.runtime.cuda_state import PinnedSlab

CONTEXTS = (61_440, 124_928)
CACHES = (
    ("previous step", 1, "hit60"),
    ("previous step", 1, "hit80"),
    ("lru2k", 2, "text"),
    ("lru4k", 4, "text"),
)
Rows = list[dict[str, Any]]


def measure_layer(rows: SyntheticRows) -> tuple[float, float]:
    """Microseconds of a layer in a step, and the hit rate, over MEASURED steps after WARM_UP steps."""
    rows.run(range(1))  # kernels are loaded before one is captured
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=rows.stream):
        rows.run(range(WARM_UP, WARM_UP + MEASURED))
    times = []
    hits = misses = 0
    for _ in range(5):
        rows.run(range(WARM_UP))  # each time, because going back to the first step is a jump of the drift
        before = rows.lookups()
        times.append(elapsed(rows.stream, graph.replay) / (MEASURED * rows.case.layers))
        after = rows.lookups()
        hits, misses = hits + after[0] - before[0], misses + after[1] - before[1]
    return statistics.median(times[1:]), hits / max(1, hits + misses)


def stage_times(rows: SyntheticRows, copy: float, link: float) -> Rows:
    """Every kernel alone, all rows in one group, repeated over the layers; the misses are those of the last step."""
    case, state, stream = rows.case, rows.state, rows.stream
    b, n = case.batch, case.context // CHUNK
    rows.stream.synchronize()
    misses = int(rows.memory.miss_counts[:b].sum())
    hits = int(rows.memory.hit_counts[:b].sum())
    lb, vb = (1 if case.landmarks == "fp8" else 2), (1 if case.values == "fp8" else 2)
    pairs = b * KV_HEADS
    token = (2 + vb) * HEAD_SIZE
    # Of 256 tokens each: the window and what is newer, outliers, hits, misses.
    partials = 2 + -(-OUTLIERS * CHUNK // 256) + -(-hits * CHUNK // (256 * pairs)) + -(-misses * CHUNK // (256 * pairs))
    moved = {
        "append": b * (2 * HEADS + 4 * KV_HEADS) * HEAD_SIZE * 2,
        "score": pairs * n * (HEAD_SIZE * lb + 4 * (lb == 1)) + b * HEADS * n * 4,
        "fetch": misses * CHUNK * HEAD_SIZE * vb,
        "rebuild": misses * CHUNK * (RANK + HEAD_SIZE) * 2 + pairs * RANK * HEAD_SIZE * 2,
        "attend_resident": hits * CHUNK * token + pairs * (OUTLIERS * CHUNK + WINDOW) * 4 * HEAD_SIZE,
        "attend_fetched": misses * CHUNK * token,
        "merge": pairs * partials * (HEADS // KV_HEADS) * (HEAD_SIZE + 2) * 4,
        "select": b * HEADS * n * 4,  # last: once repeated it leaves no misses
    }
    limits = dict.fromkeys(moved, copy) | {"fetch": link}
    found: Rows = []
    for name, size in moved.items():

        def work(name: str = name) -> None:
            for layer in list(range(case.layers)) * 8:
                state.stage(
                    name,
                    layer,
                    0,
                    b,
                    b,
                    qkv=rows.qkv[-1, layer].data_ptr(),
                    positions=rows.positions.data_ptr(),
                    q=rows.q.data_ptr(),
                    selection=rows.selection.data_ptr(),
                    out=rows.out.data_ptr(),
                    stream=stream.cuda_stream,
                )

        time = microseconds(stream, work) / (8 * case.layers)
        row = {"kernel": name, "batch": b, "context": case.context, "values": case.values, "landmarks": case.landmarks}
        found.append(row | {"microseconds": time, "bytes": size, "share_of_limit": size / time * 1e6 / limits[name]})
    return found


def overlap(rows: SyntheticRows) -> dict[str, float]:
    """Microseconds of scoring alone, of the fetch alone, and of both side by side on two streams of one graph."""
    case, state, b = rows.case, rows.state, rows.case.batch
    other = torch.cuda.Stream(priority=-1)

    def stage(name: str, layer: int, stream: torch.cuda.Stream) -> None:
        q, selection, out = rows.q.data_ptr(), rows.selection.data_ptr(), rows.out.data_ptr()
        pointers = {"qkv": rows.qkv.data_ptr(), "positions": rows.positions.data_ptr(), "q": q, "selection": selection}
        state.stage(name, layer, 0, b, b, out=out, stream=stream.cuda_stream, **pointers)

    def score() -> None:
        for layer in range(case.layers):
            stage("score", layer, rows.stream)

    def fetch(stream: torch.cuda.Stream = rows.stream) -> None:
        stage("fetch", 0, stream)

    def both() -> None:
        other.wait_stream(rows.stream)
        fetch(other)
        score()
        rows.stream.wait_stream(other)

    works: dict[str, Callable[[], None]] = {"score": score, "fetch": fetch, "both": both}
    return {name: microseconds(rows.stream, work) for name, work in works.items()}


def timeline(rows: SyntheticRows) -> list[tuple[str, int, float, float]]:
    """Kernels of one layer in a graph: name, stream, start and duration in microseconds, by torch's profiler.

    The queries take two new steps, so that chunks are missing as in any other step; the last layer is reported.
    """
    steps = range(WARM_UP // 2, WARM_UP // 2 + 2)
    rows.run(range(steps.start))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=rows.stream):
        rows.run(steps)
    events = sorted(kernel_events(graph.replay), key=lambda pair: pair[1].start_ns())
    last = max(i for i, (name, _) in enumerate(events) if name == "append")
    first = events[last][1].start_ns()
    return [
        (name, e.device_resource_id(), round((e.start_ns() - first) * 1e-3, 2), round(e.duration_ns() * 1e-3, 2))
        for name, e in events[last:]
    ]


def seal_cost(rows: SyntheticRows) -> dict[str, float]:
    """Microseconds of a layer in steps in which every row seals a chunk and in those in which none does, and what
    sealing adds to the mean over a chunk's steps, as a share. The queries stay, so that nothing else varies."""
    case, state, stream = rows.case, rows.state, rows.stream
    slots = torch.arange(case.batch, device="cuda", dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        state.step_prologue(slots.data_ptr(), case.batch, stream.cuda_stream)
        for layer in range(case.layers):
            rows.layer(WARM_UP, layer)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4 * CHUNK):
        state.begin_pass("generation", list(range(case.batch)), 0, 1, False)
        row = state.row(0)
        with torch.cuda.stream(stream):
            rows.positions += 1
        time = elapsed(stream, graph.replay)
        seals = state.config.sealed_chunks(row.length + 1) > row.published
        times[seals].append(time / case.layers)
    assert state.fault(stream.cuda_stream) == 0
    sealing, other = (statistics.median(times[kind][1:]) for kind in (True, False))
    return {"sealing": sealing, "other": other, "share": max(0.0, sealing - other) / CHUNK / other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 24])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--pool-gib", type=int, default=64, help="pinned memory over which values are spread")
    parser.add_argument("--caches", type=int, nargs="+", default=list(range(len(CACHES))), help="which of CACHES")
    parser.add_argument("--groups", type=int, nargs="+", default=[0], help="row groups to try; 0: the state's choice")
    parser.add_argument("--output")
    o = parser.parse_args()
    library = load()
    size = o.pool_gib << 30
    copy = copy_bandwidth()
    link = 1e9 * library.measure_link(0, 2048, 1 << 30)
    found: Rows = []
    data = gpu_report("make bench-kernels")
    data |= {"copy_gigabytes_per_second": copy / 1e9, "link_gigabytes_per_second": link / 1e9}
    cases = [(b, s) for s in sorted(o.contexts, reverse=True) for b in sorted(o.batches, reverse=True)]
    if 1 in o.batches and len(o.contexts) > 1:
        cases.append((1, 131_072))
    baselines = {(b, s): dense_baseline(b, s) for b, s in cases}
    torch.cuda.empty_cache()
    with PinnedSlab(size) as pool:
        for b, s in cases:
            with SyntheticRows(Case(b, s, "bf16", "bf16", 1, "text", dense=True), pool, size) as rows:
                time, _ = measure_layer(rows)
            found.append(
                {"kernel": "layer", "batch": b, "context": s, "cache": "dense", "microseconds": time}
                | {"baseline_microseconds": baselines[b, s], "speedup": baselines[b, s] / time}
            )
            for kind, (cache, factor, profile) in itertools.product(o.formats, [CACHES[i] for i in o.caches]):
                if profile == "text" and s < 100_000:
                    profile = "text_61k"  # the same rates among fewer chunks
                for groups in o.groups:
                    with SyntheticRows(Case(b, s, kind, kind, factor, profile), pool, size, groups) as rows:
                        time, hit = measure_layer(rows)
                        row = {"kernel": "layer", "batch": b, "context": s, "values": kind, "landmarks": kind}
                        row |= {"cache": cache, "hit_rate": hit, "microseconds": time, "groups": groups}
                        row |= {"baseline_microseconds": baselines[b, s], "speedup": baselines[b, s] / time}
                        miss_bytes = b * KV_HEADS * TOP_K * (1 - hit) * CHUNK * HEAD_SIZE * (1 if kind == "fp8" else 2)
                        row |= {"link_microseconds": miss_bytes / link * 1e6}
                        found.append(row)
                        print(row, flush=True)
                        if profile == "hit60" and groups == o.groups[0]:
                            side = {"batch": b, "context": s, "values": kind}
                            found.append({"kernel": "overlap"} | side | overlap(rows))
                            found.append({"kernel": "timeline"} | side | {"launches": timeline(rows)})
                            found += stage_times(rows, copy, link)
                            found.append({"kernel": "seal"} | side | seal_cost(rows))
            found.append({"kernel": "torch", "batch": b, "context": s} | torch_stages(b, s))
            if o.output:  # after each case, so that a run that is cut short leaves what it has
                Path(o.output).write_text(as_json(data, found), encoding="utf-8")
    print(as_json(data, [row for row in found if row["kernel"] == "layer"]))


if __name__ == "__main__":
    run_on_gpu(main)
