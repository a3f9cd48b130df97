"""Which executor runs an engine, and the memory it has for sequences."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from trtllm_shadowkv import names
from trtllm_shadowkv.config import PAGE_TOKENS, RuntimeConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError, EngineError, MissingDependencyError, require
from trtllm_shadowkv.footprint import SEALED_PAGE_TOKENS
from trtllm_shadowkv.llm_settings import memory_budgets
from trtllm_shadowkv.runtime.scheduler import Executor, Limits, Pool, Reserve
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool, ValuePool

_CPU_STRETCH = 1024
_CPU_HOST_SHARE, _GPU_HOST_SHARE = 0.25, 0.75
_REPORTED = 5.0
"""Seconds between lines on the progress of pinning."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An executor that is ready to run, and what the scheduler needs to know of it."""

    executor: Executor
    limits: Limits
    reserve: Reserve
    values: ValuePool | PinnedValuePool | None


def chosen(executor: str | None, engine: EngineDirectory) -> str:
    """``tensorrt`` or ``onnx_cpu``. No quiet fallback: an engine that cannot be used is no reason to take the CPU.

    Raises:
        ConfigError: an unknown executor.
        EngineError: there is no engine file for it.
    """
    if executor not in (None, "onnx_cpu", "tensorrt"):
        raise ConfigError(f"executor is {executor!r}", "'onnx_cpu' or 'tensorrt'")
    if executor == "tensorrt" and not engine.has_engine:
        raise EngineError(
            f"{engine.path} has no {names.ENGINE_FILE}",
            "an engine for the TensorRT executor",
            f"trtllm-shadowkv build --refresh {engine.path} --backend tensorrt",
        )
    return executor or ("tensorrt" if engine.has_engine else "onnx_cpu")


def open_executor(engine: EngineDirectory, runtime: RuntimeConfig, config: ShadowKVConfig, which: str) -> Opened:
    """Load an engine on the executor that :func:`chosen` named.

    Raises:
        ConfigError, EngineError, MissingDependencyError: it cannot run here; the message says why.
    """
    _log.info("%s runs on the executor %s", engine.path, which)
    return _tensorrt(engine, runtime, config) if which == "tensorrt" else _onnx_cpu(engine, runtime, config)


def _onnx_cpu(engine: EngineDirectory, runtime: RuntimeConfig, config: ShadowKVConfig) -> Opened:
    for module in ("onnx", "onnxruntime", "onnxruntime_extensions"):
        require(module, "cpu")
    for name in ("value_dtype", "landmark_dtype"):
        if getattr(config, name) != "auto":
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} on the executor onnx_cpu",
                "'auto'",
                "only the TensorRT executor keeps them in fp8",
            )
    from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
    from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor

    device, host = memory_budgets(runtime, _CPU_HOST_SHARE)
    values = ValuePool(host)
    state = CpuState(engine.model, config, values)
    runner = OnnxCpuExecutor(engine, state, runtime.threads)
    stretch = runtime.max_stretch or min(engine.build.max_num_tokens, _CPU_STRETCH)
    pools = Pool("device", ("live", "sealed"), device), Pool("host", ("host",), host)
    return Opened(runner, Limits(engine.build.max_batch_size, stretch, pools), state.footprint, values)


def _tensorrt(engine: EngineDirectory, runtime: RuntimeConfig, config: ShadowKVConfig) -> Opened:
    from trtllm_shadowkv.runtime.executors.tensorrt import TensorRtExecutor

    _, host = memory_budgets(runtime, _GPU_HOST_SHARE)
    reported = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORTED:
            reported = time.monotonic()
            _log.info("%.1f of %.1f GB of host memory are pinned", done / 1e9, total / 1e9)

    try:
        runner = TensorRtExecutor(
            engine, config, device_memory=runtime.device_memory, host_memory=host, progress=progress
        )
    except MissingDependencyError as e:
        if not engine.has_onnx:
            raise
        raise MissingDependencyError(str(e), todo="the executor onnx_cpu runs this engine's ONNX graph instead") from e
    state, values = runner.state, runner.state.values
    capacity = state.capacity
    pools = (
        Pool("device", ("live",), capacity.live_pages * capacity.live_bytes),
        Pool("device", ("sealed",), capacity.sealed_pages * capacity.sealed_bytes),
        Pool("host", ("host",), values.capacity if values else 0),
    )
    _log.info(
        "%d rows of up to %d tokens: %.1f GB of the GPU for %d live and %d sealed tokens, %.1f GB of host memory",
        engine.build.max_batch_size,
        engine.max_seq_len,
        state.cuda.device_bytes / 1e9,
        capacity.live_pages * PAGE_TOKENS,
        capacity.sealed_pages * SEALED_PAGE_TOKENS,
        pools[-1].capacity / 1e9,
    )
    stretch = runtime.max_stretch or engine.build.max_num_tokens
    return Opened(runner, Limits(engine.build.max_batch_size, stretch, pools), state.footprint, values)
