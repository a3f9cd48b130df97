"""Decode steps of a whole TensorRT engine of Llama-3.1-8B's shape on one H200: ShadowKV beside its own dense mode.

python -m trtllm_shadowkv.bench.engine --output docs/results/engine-h200.json

Wall-clock time is that of ``TensorRtExecutor.generation``, the copy of the logits to the host included: the median of
MEASURED steps. GPU time is from the start of a step's first kernel to the end of its last one by torch's profiler: the
median of PROFILED further steps, whose kernels the breakdown sums up (they overlap, so it adds up to more).

Weights are random, so the token decides a row's queries: each row keeps its token with a probability that gives about
the hit rate wanted, and draws another one otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from trtllm_shadowkv import names
from trtllm_shadowkv.bench.gpu_baselines import device_kernels
from trtllm_shadowkv.bench.report import as_json, gpu_report, run_on_gpu
from trtllm_shadowkv.bench.synthetic import choose_outliers, fill_pools, fill_values, llama
from trtllm_shadowkv.bench.synthetic_engine import write_synthetic_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig, StoredDtype
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.hardware import gpu_by_name, weight_bytes
from trtllm_shadowkv.native_state import DRY
from trtllm_shadowkv.plan import Workload, dense_step, shadow_step
from trtllm_shadowkv.runtime.cuda_memory import CudaMemory
from trtllm_shadowkv.runtime.cuda_state import STORED, CudaState
from trtllm_shadowkv.runtime.executors.gpu_state import Capacity, GpuState, RowPages
from trtllm_shadowkv.runtime.executors.tensorrt import TensorRtExecutor, batch_sizes

CONTEXTS = (61_440, 124_928)
MAX_BATCH, MAX_SEQ_LEN = 64, 131_072
"""Of the engine that is written."""
HIT_RATES = (0.6, 0.8)
WARM_UP, MEASURED, PROFILED = 16, 32, 16
CALIBRATION_WARM_UP, CALIBRATED = 8, 24
GENERATED = 512
"""Room for the tokens of all these steps in every row."""
MATRICES = "matrices and the rest"
NOTES = (
    "weights are random; where all layers share one layer's, a tensor takes the place of those that are missing, so "
    "that as many rows fit as beside the real model",
    "the values of all ShadowKV rows lie in one row's pinned memory: each row fetches as many bytes as from its own",
    "max_seq_len is the context and a little; as many rows as fit: GPU memory is what limits them, not host memory",
    "rows are padded to padded_batch, as in serving; speedups are tokens/s over those of as many dense rows as fit",
)


class Rows:
    """The first ``count`` rows of an executor, and the token that each takes next."""

    def __init__(self, executor: TensorRtExecutor, count: int) -> None:
        self.executor, self.slots = executor, list(range(count))
        self.random = np.random.default_rng(20260711)
        self.tokens = self._draw()

    def _draw(self) -> Any:
        return self.random.integers(self.executor.engine.model.vocab_size, size=len(self.slots))

    def step(self, keep: float) -> float:
        """A step in which a row keeps its token with this probability: the executor's seconds."""
        kept = self.random.random(len(self.slots)) < keep
        self.tokens = np.where(kept, self.tokens, self._draw())
        tokens = self.tokens.tolist()
        begin = time.perf_counter()
        self.logits = self.executor.generation(self.slots, tokens)
        return time.perf_counter() - begin

    def steps(self, count: int, keep: float) -> tuple[list[float], float | None]:
        """Seconds of each step, and the hit rate over all of them; None for dense rows."""
        before = self._lookups()
        times = [self.step(keep) for _ in range(count)]
        hits, misses = (after - b for after, b in zip(self._lookups(), before, strict=True))
        if not np.isfinite(self.logits).all():
            raise ArithmeticError("logits are not finite")
        return times, hits / (hits + misses) if hits + misses else None

    def _lookups(self) -> tuple[int, int]:
        rows = [self.executor.state.statistics(slot) for slot in self.slots]
        return sum(r.hits for r in rows), sum(r.misses for r in rows)


def rows_that_fit(engine: EngineDirectory, config: ShadowKVConfig, context: int, device_memory: int) -> int:
    """The most rows of this context and GENERATED tokens for which an executor of as many rows has room.

    Raises:
        ConfigError: none.
    """
    total = context + GENERATED
    pages = RowPages.of(config, context, total, dense=False)

    def fits(rows: int) -> bool:
        def size_of(live_pages: int, sealed_pages: int, sealed_rows: int) -> int:
            with CudaState(
                engine.model,
                config,
                dtype=engine.build.dtype,
                max_tokens=total,
                slots=rows,
                sealed_rows=sealed_rows,
                max_batch=rows,
                live_pages=live_pages,
                sealed_pages=sealed_pages,
                device=DRY,
            ) as state:
                return state.device_bytes

        try:
            capacity = Capacity.within(device_memory, rows, total, config, size_of)
        except ConfigError:
            return False
        live = pages.live + (rows - 1) * (pages.kept if pages.chunks else pages.live)
        return capacity.live_pages >= live and capacity.sealed_pages >= rows * pages.sealed

    most = next((rows for rows in range(engine.build.max_batch_size, 0, -1) if fits(rows)), 0)
    if most == 0:
        raise ConfigError(f"device_memory is {device_memory:,} bytes", f"room for one row of {total:,} tokens")
    return most


@contextmanager
def opened(
    engine: EngineDirectory, config: ShadowKVConfig, rows: int, total: int, device_memory: int | None
) -> Iterator[TensorRtExecutor]:
    """An executor of at most ``rows`` rows of ``total`` tokens, with pinned memory for the values of one."""
    limited = replace(engine, build=replace(engine.build, max_batch_size=rows, max_seq_len=total))
    chunks = RowPages.of(config, total, total, dense=False).chunks
    region = GpuState.region_of(engine.model, config, STORED[config.value_dtype], chunks)
    host_memory = engine.model.num_layers * region
    executor = TensorRtExecutor(limited, config, device_memory=device_memory, host_memory=host_memory)
    try:
        yield executor
    finally:
        executor.close()


def fill(executor: TensorRtExecutor, rows: int, context: int) -> None:
    """``rows`` rows of ``context`` tokens of noise; where they are sealed they share the values of one row."""
    state = executor.state
    cuda, config, total = state.cuda, state.config, context + GENERATED
    memory = CudaMemory(cuda)
    fill_pools(memory)
    chunks = RowPages.of(config, context, total, dense=False).chunks
    values: dict[str, Any] = {}
    if state.values is not None:
        for slab in state.values._slabs:
            fill_values(slab.buffer(), memory.value_dtype)
        addresses = state.values.take(state.region_bytes(chunks), state.model.num_layers)
        values = {"value_addresses": addresses, "value_stride": chunks}
    for slot in range(rows):
        cuda.allocate(
            slot,
            prompt_tokens=context,
            total_tokens=total,
            top_k=config.top_k,
            dense=not chunks,
            stream=state.stream,
            **values,
        )
        cuda.load_row(slot, context, state.stream)
    torch.cuda.synchronize()
    if chunks:
        for slot in range(rows):
            choose_outliers(memory, slot)
    torch.cuda.synchronize()


def gpu_steps(kernels: list[tuple[str | None, Any]]) -> tuple[float, dict[str, float]]:
    """Of the kernels of some steps: microseconds of a step, the median; and of each kernel of a step, the mean.

    Args:
        kernels: what :func:`device_kernels` returns; a step begins with the prologue.
    """
    kernels = sorted(kernels, key=lambda pair: pair[1].start_ns())
    begins = [i for i, (name, _) in enumerate(kernels) if name == "prologue"]
    times = []
    breakdown: dict[str, float] = {}
    for first, end in pairwise((*begins, len(kernels))):
        step = kernels[first:end]
        last = max(event.start_ns() + event.duration_ns() for _, event in step)
        times.append((last - step[0][1].start_ns()) * 1e-3)
        for name, event in step:
            part = name or MATRICES
            breakdown[part] = breakdown.get(part, 0.0) + event.duration_ns() * 1e-3 / len(begins)
    return statistics.median(times), breakdown


def keep_probability(target: float, drawn: float, kept: float) -> float:
    """How often a token has to stay for a hit rate of ``target``: that of steps with new tokens is ``drawn``, that of
    steps with the same ones ``kept``."""
    return min(1.0, max(0.0, (target - drawn) / (kept - drawn))) if kept > drawn else 1.0


def measure(rows: Rows, keep: float) -> dict[str, Any]:
    """Times, speeds and hit rate of a step; ``gpu_hit_rate`` is that of the steps that the profiler saw."""
    batch = len(rows.slots)
    rows.steps(WARM_UP, keep)  # the graph is captured in the second one
    times, hit_rate = rows.steps(MEASURED, keep)
    wall = statistics.median(times) * 1e6
    gpu_hit_rate: float | None = None

    def work() -> None:
        nonlocal gpu_hit_rate
        _, gpu_hit_rate = rows.steps(PROFILED, keep)

    gpu, breakdown = gpu_steps(device_kernels(work))
    free, total = torch.cuda.mem_get_info()
    return {
        "batch": batch,
        "padded_batch": next(size for size in batch_sizes(rows.executor.engine.build.max_batch_size) if size >= batch),
        "graphs": rows.executor.graphs,
        "keep_probability": keep,
        "hit_rate": hit_rate,
        "gpu_hit_rate": gpu_hit_rate,
        "wall_microseconds": wall,
        "gpu_microseconds": gpu,
        "tokens_per_second": batch / wall * 1e6,
        "gpu_tokens_per_second": batch / gpu * 1e6,
        "device_bytes": total - free,
        "breakdown_microseconds": breakdown,
    }


def predicted(engine: EngineDirectory, config: ShadowKVConfig, context: int, row: dict[str, Any]) -> dict[str, float]:
    """What ``plan`` says of the same step."""
    value_bytes, landmark_bytes = (1 if t == "fp8" else 2 for t in (config.value_dtype, config.landmark_dtype))
    w = Workload(
        engine.model,
        gpu_by_name("h200"),
        config,
        context,
        value_bytes=value_bytes,
        landmark_bytes=landmark_bytes,
        hit_rate=row["hit_rate"],
    )
    step = dense_step(w, row["batch"], 2) if row["hit_rate"] is None else shadow_step(w, row["batch"])
    return {
        "plan_microseconds": step.seconds * 1e6,
        "plan_attention_microseconds": step.attention * 1e6,
        "plan_tokens_per_second": step.tokens_per_second,
    }


def dense_case(engine: EngineDirectory, context: int, device_memory: int) -> dict[str, Any]:
    """As many dense rows as fit."""
    total = context + GENERATED
    config = engine.build.shadowkv.overridden({"dense_limit": total})
    most = rows_that_fit(engine, config, context, device_memory)
    with opened(engine, config, most, total, device_memory) as executor:
        fill(executor, most, context)
        row = measure(Rows(executor, most), 0.0)
    return {"kernel": "step", "mode": "dense", "context": context, "fits": most, **row} | predicted(
        engine, config, context, row
    )


def shadow_cases(
    engine: EngineDirectory,
    stored: StoredDtype,
    context: int,
    device_memory: int,
    dense: dict[str, Any],
    batch: int,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """As many rows as fit, as many as ``dense`` has, and ``batch``, each at every one of HIT_RATES.

    Args:
        stored: how values and landmarks are kept.
        dense: the row of dense attention.
        add: called with each row.
    """
    total = context + GENERATED
    config = engine.build.shadowkv.overridden({"value_dtype": stored, "landmark_dtype": stored})
    most = rows_that_fit(engine, config, context, device_memory)
    with opened(engine, config, most, total, device_memory) as executor:
        fill(executor, most, context)
        rates = []
        for keep in (1.0, 0.0):
            rows = Rows(executor, most)
            rows.steps(CALIBRATION_WARM_UP, keep)
            rates.append(rows.steps(CALIBRATED, keep)[1] or 0.0)
        kept, drawn = rates
        for count in sorted({most, min(batch, most), min(dense["batch"], most)}, reverse=True):
            rows = Rows(executor, count)
            for target in HIT_RATES:
                row = measure(rows, keep_probability(target, drawn, kept))
                row = {"kernel": "step", "mode": "shadowkv", "stored": stored, "context": context, "fits": most, **row}
                row |= {"kept_hit_rate": kept, "drawn_hit_rate": drawn}
                for name in ("speedup", "gpu_speedup"):
                    speed = name.replace("speedup", "tokens_per_second")
                    row[name] = row[speed] / dense[speed]
                add(row | predicted(engine, config, context, row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="an engine directory; else one is written")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batch", type=int, default=24, help="rows of ShadowKV, besides as many as fit and as dense's")
    parser.add_argument("--stored", nargs="+", choices=get_args(StoredDtype), default=list(get_args(StoredDtype)))
    parser.add_argument("--output")
    o = parser.parse_args()
    data = gpu_report("python -m trtllm_shadowkv.bench.engine")
    found: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        found.append(row)
        print({name: value for name, value in row.items() if name != "breakdown_microseconds"}, flush=True)
        if o.output:
            Path(o.output).write_text(as_json(data, found), encoding="utf-8")

    with ExitStack() as held:
        if o.engine is None:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            build = BuildConfig(
                dtype="bfloat16",
                backend="tensorrt",
                max_batch_size=MAX_BATCH,
                max_seq_len=MAX_SEQ_LEN,
                max_num_tokens=8192,
                shadowkv=ShadowKVConfig(rank=160),
            )
            engine = write_synthetic_engine(folder / "engine", llama(32), build)
        else:
            engine = EngineDirectory.open(o.engine)
        weights, there = weight_bytes(engine.model), (engine.path / names.ENGINE_FILE).stat().st_size
        # Never read: it keeps the room of the weights that a synthetic engine lacks.
        missing = torch.empty(max(0, weights - there), dtype=torch.uint8, device="cuda")
        total = max(o.contexts) + GENERATED
        config = engine.build.shadowkv.overridden({"dense_limit": total})
        with opened(engine, config, engine.build.max_batch_size, total, None) as executor:
            device_memory = executor.state.capacity.device_bytes
        data |= {"engine_bytes": there, "weight_bytes": weights, "stand_in_bytes": missing.nbytes}
        data |= {"device_memory": device_memory, "max_batch_size": engine.build.max_batch_size, "notes": NOTES}
        for context in sorted(o.contexts, reverse=True):
            dense = dense_case(engine, context, device_memory)
            add(dense)
            for stored in o.stored:
                shadow_cases(engine, stored, context, device_memory, dense, o.batch, add)


if __name__ == "__main__":
    run_on_gpu(main)
