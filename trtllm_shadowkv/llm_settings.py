"""Settings of a loaded engine: keywords, :class:`RuntimeConfig` and what was built, brought together and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtllm_shadowkv.config import RuntimeConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError, EngineError, nearest
from trtllm_shadowkv.machine import memory


def merged_settings(
    engine: EngineDirectory, runtime: RuntimeConfig, settings: dict[str, Any]
) -> tuple[EngineDirectory, RuntimeConfig, ShadowKVConfig]:
    """Merge keyword settings into the runtime's, and both into what the engine was built with.

    Returns:
        the engine with the rows and row length that it is to serve, and the settings.

    Raises:
        ConfigError: an unknown setting, a bad value, or one that is fixed when an engine is built.
    """
    if not isinstance(runtime, RuntimeConfig):
        raise ConfigError(f"runtime is {type(runtime).__name__}", "a RuntimeConfig")
    known = [*RuntimeConfig.names(), *ShadowKVConfig.names()]
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}", f"one of {', '.join(known)}")
    overrides = {k: v for k, v in settings.items() if k in ShadowKVConfig.names()}
    runtime = replace(runtime, **{k: v for k, v in settings.items() if k not in overrides})
    build = engine.build
    for name, built in (
        ("max_batch_size", "max_batch_size"),
        ("max_seq_len", "max_seq_len"),
        ("max_stretch", "max_num_tokens"),
    ):
        value, most = getattr(runtime, name), getattr(build, built)
        if value is not None and value > most:
            raise ConfigError(f"{name} is {value}", f"at most the engine's {built}, {most}")
    served = replace(
        build,
        max_batch_size=runtime.max_batch_size or build.max_batch_size,
        max_seq_len=runtime.max_seq_len or build.max_seq_len,
    )
    return replace(engine, build=served), runtime, build.shadowkv.overridden({**runtime.shadowkv, **overrides})


def memory_budgets(runtime: RuntimeConfig, host_share: float) -> tuple[int, int]:
    """Bytes for device and host memory; on a CPU both are the machine's.

    Args:
        host_share: of what is free, for host memory where it is not set.

    Raises:
        EngineError: they are not set, and the system does not say what is free.
    """
    free = memory().pinnable
    if free is None and (runtime.device_memory is None or runtime.host_memory is None):
        raise EngineError("this system does not say how much memory is free", todo="set device_memory and host_memory")
    return runtime.device_memory or (free or 0) // 2, runtime.host_memory or int((free or 0) * host_share)
