"""All settings, as frozen dataclasses whose fields are the configuration.

A field's metadata says when it is fixed: ``build`` (it is compiled into the graph and the plugins' attributes) or
``run`` (recorded at build time as the default, and may be changed when an engine is loaded).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from trtllm_shadowkv.errors import ConfigError, nearest

Dtype = Literal["float32", "float16", "bfloat16"]
Attention = Literal["shadowkv", "dense"]
Backend = Literal["onnx", "tensorrt", "tensorrt-rtx"]
StoredDtype = Literal["auto", "fp8"]
PAGE_TOKENS = 128
"""Tokens in one page of the live key/value pool."""


def _built(default: Any) -> Any:
    return field(default=default, metadata={"fixed": "build"})


def _run(default: Any) -> Any:
    return field(default=default, metadata={"fixed": "run"})


def _check_int(owner: str, name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{owner}.{name} is {value!r}", f"a whole number from {low} to {high}")


@dataclass(frozen=True)
class _Config:
    """Construction from mappings with errors that name the nearest known key."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Self:
        """Build from a mapping.

        Raises:
            ConfigError: not a mapping, an unknown key (the nearest known one is named) or a bad value.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"{where} holds {type(data).__name__}", "a mapping of settings")
        for key in data:
            if key not in cls.names():
                near = nearest(str(key), cls.names())
                raise ConfigError(f"{where}: unknown setting {key!r}{near}", f"one of {', '.join(cls.names())}")
        try:
            return cls(**data)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ShadowKVConfig(_Config):
    """How a sequence's keys and values are kept (arXiv 2410.21465, Algorithms 1 and 2).

    Attributes:
        attention: ``shadowkv``, or ``dense``: the same graph with an infinite dense limit.
        chunk_size: tokens a chunk (C); 8 or 16.
        rank: rank of the kept pre-RoPE keys, heads concatenated (r); multiple of 16, up to 512 and up to
            num_kv_heads · head_size. None: 160, or what the model allows where that is less.
        top_k: chunks selected for each KV head in a step (k); a request may ask for fewer.
        outliers: chunks of each KV head kept exactly, chunk 0 included (o).
        window: newest tokens kept exactly (W); a multiple of chunk_size.
        dense_limit: rows up to this many tokens, prompt and generated, use exact attention over all of them.
        cache_factor: LRU slots of the chunk cache for each KV head, in units of top_k. It changes speed and
            memory, never a result.
        value_dtype, landmark_dtype: how values of sealed chunks, and landmarks, are kept: ``auto``: as the engine
            computes; ``fp8``: e4m3 with a float32 scale for each chunk and KV head, half the bytes over the link and
            in memory (the TensorRT executor alone).
    """

    attention: Attention = _built("shadowkv")
    chunk_size: int = _built(8)
    rank: int | None = _built(None)
    top_k: int = _built(256)
    outliers: int = _built(48)
    window: int = _run(256)
    dense_limit: int = _run(4096)
    cache_factor: int = _run(2)
    value_dtype: StoredDtype = _run("auto")
    landmark_dtype: StoredDtype = _run("auto")

    def __post_init__(self) -> None:
        if self.attention not in get_args(Attention):
            raise ConfigError(f"shadowkv.attention is {self.attention!r}", "'shadowkv' or 'dense'")
        _check_int("shadowkv", "chunk_size", self.chunk_size, 8, 16)
        if self.chunk_size not in (8, 16):
            raise ConfigError(f"shadowkv.chunk_size is {self.chunk_size!r}", "8 or 16")
        if self.rank is not None:
            _check_int("shadowkv", "rank", self.rank, 16, 512)
            if self.rank % 16:
                raise ConfigError(f"shadowkv.rank is {self.rank}", "a multiple of 16")
        _check_int("shadowkv", "top_k", self.top_k, 1, 1 << 20)
        _check_int("shadowkv", "outliers", self.outliers, 1, 1 << 20)
        _check_int("shadowkv", "window", self.window, self.chunk_size)
        _check_int("shadowkv", "cache_factor", self.cache_factor, 1, 64)
        _check_int("shadowkv", "dense_limit", self.dense_limit, 1)
        for name in ("value_dtype", "landmark_dtype"):
            if getattr(self, name) not in get_args(StoredDtype):
                raise ConfigError(f"shadowkv.{name} is {getattr(self, name)!r}", "'auto' or 'fp8'")
        if self.window % self.chunk_size:
            raise ConfigError(f"shadowkv.window is {self.window}", f"a multiple of chunk_size ({self.chunk_size})")
        if self.dense_limit + 1 < self.window + self.chunk_size:
            least = self.window + self.chunk_size - 1
            raise ConfigError(
                f"shadowkv.dense_limit is {self.dense_limit} with a window of {self.window}",
                f"at least window + chunk_size - 1 = {least}, so that a sealed row has a chunk to seal",
            )

    @property
    def dense(self) -> bool:
        return self.attention == "dense"

    @property
    def limit(self) -> float:
        """Dense limit in tokens; infinite for dense attention."""
        return math.inf if self.dense else self.dense_limit

    def sealed_chunks(self, length: int) -> int:
        """Chunks outside the window of a sealed row of ``length`` tokens: floor((S − W)/C), never negative."""
        return max(0, length - self.window) // self.chunk_size

    def resolved(self, key_width: int) -> ShadowKVConfig:
        """With the rank filled in, for keys of ``key_width`` = num_kv_heads · head_size elements a token.

        Raises:
            ConfigError: the rank is larger than the keys are wide, or they are narrower than the smallest rank.
        """
        if key_width < 16:
            raise ConfigError(f"the model's keys are {key_width} elements wide", "16 or more, the smallest rank")
        if self.rank is None:
            return replace(self, rank=min(160, key_width // 16 * 16))
        if self.rank > key_width:
            raise ConfigError(
                f"shadowkv.rank is {self.rank}", f"at most num_kv_heads · head_size = {key_width} for this model"
            )
        return self

    def overridden(self, changes: dict[str, Any]) -> ShadowKVConfig:
        """A copy with run-time fields changed.

        Raises:
            ConfigError: an unknown field, or one that is fixed when the engine is built.
        """
        for key in changes:
            if key not in self.names():
                raise ConfigError(f"unknown ShadowKV setting {key!r}{nearest(key, self.names())}")
        for f in fields(self):
            if f.name in changes and f.metadata["fixed"] == "build" and changes[f.name] != getattr(self, f.name):
                raise ConfigError(
                    f"{f.name} = {changes[f.name]!r}, but the engine was built with {getattr(self, f.name)!r}",
                    todo="this setting is fixed when an engine is built: build another engine",
                )
        return replace(self, **changes)


@dataclass(frozen=True)
class BuildConfig(_Config):
    """What ``trtllm-shadowkv build`` takes (TensorRT-LLM's names where it has one).

    Attributes:
        dtype: type of the graph's weights, products of matrices and attention; of 16-bit graphs what lies between is
            float32 and the output head float16. The CPU executor computes in float32 whatever it is.
        max_batch_size: sequences in one generation pass.
        max_seq_len: tokens of one sequence, prompt and generated; None: the model's max_position_embeddings.
        max_num_tokens: tokens in one context pass (the longest stretch of a prompt).
        backend: what compiles the graph for a GPU: ``tensorrt`` or ``tensorrt-rtx``; ``onnx``: nothing, it is for the
            CPU executor.
        compute_capabilities: of the GPUs that TensorRT-RTX compiles for (80: compute capability 8.0); empty: the
            machine's own.
        shadowkv: see :class:`ShadowKVConfig`.
    """

    dtype: Dtype = "float32"
    max_batch_size: int = 32
    max_seq_len: int | None = None
    max_num_tokens: int = 8192
    backend: Backend = "onnx"
    compute_capabilities: tuple[int, ...] = ()
    shadowkv: ShadowKVConfig = field(default_factory=ShadowKVConfig)

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype is {self.dtype!r}", "float32, float16 or bfloat16")
        _check_int("build", "max_batch_size", self.max_batch_size, 1, 4096)
        if self.max_seq_len is not None:
            _check_int("build", "max_seq_len", self.max_seq_len, 2, 1 << 24)
        _check_int("build", "max_num_tokens", self.max_num_tokens, 1, 1 << 20)
        if self.backend not in get_args(Backend):
            raise ConfigError(f"backend is {self.backend!r}", "onnx, tensorrt or tensorrt-rtx")
        if not isinstance(self.compute_capabilities, list | tuple):
            raise ConfigError(
                f"build.compute_capabilities is {self.compute_capabilities!r}", "a list such as [80, 120]"
            )
        for number in self.compute_capabilities:
            _check_int("build", "compute_capabilities", number, 80, 999)  # the plugins have no code for older ones
        object.__setattr__(self, "compute_capabilities", tuple(dict.fromkeys(self.compute_capabilities)))
        if not isinstance(self.shadowkv, ShadowKVConfig):
            raise ConfigError(f"build.shadowkv is {type(self.shadowkv).__name__}", "a ShadowKVConfig")

    @classmethod
    def from_dict(cls, data: Any, where: str) -> BuildConfig:
        if isinstance(data, dict) and "shadowkv" in data and not isinstance(data["shadowkv"], ShadowKVConfig):
            data = {**data, "shadowkv": ShadowKVConfig.from_dict(data["shadowkv"], f"{where}: shadowkv")}
        return super().from_dict(data, where)


@dataclass(frozen=True)
class RuntimeConfig(_Config):
    """Settings of a loaded engine that have nothing to do with its graph.

    Attributes:
        device_memory: bytes for live pages and sealed state; None: what is free on the GPU less 2 GiB, or on the CPU
            half of what the machine has free.
        host_memory: bytes of the value pool; None: three quarters of what the machine has free, or on the CPU a
            quarter. On a GPU it is pinned when the engine is opened, no more than all rows can use.
        max_batch_size, max_seq_len: rows, and tokens of a row, at most what the engine was built for; None: as built.
            On a GPU memory is laid out for them.
        max_stretch: tokens of a prompt in one context pass, at most the engine's max_num_tokens; None: 1,024 on
            the CPU.
        threads: threads of the CPU executor; None: one a core this process may use.
        max_queue: requests that may wait; one more is refused.
        shadowkv: run-time overrides of :class:`ShadowKVConfig` fields.
    """

    device_memory: int | None = None
    host_memory: int | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_stretch: int | None = None
    threads: int | None = None
    max_queue: int = 100_000
    shadowkv: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                _check_int("runtime", name, getattr(self, name), 1, 1 << 60)
        for name, least in (("max_batch_size", 1), ("max_seq_len", 2), ("max_stretch", 1)):
            if getattr(self, name) is not None:
                _check_int("runtime", name, getattr(self, name), least)
        if self.threads is not None:
            _check_int("runtime", "threads", self.threads, 1, 1024)
        _check_int("runtime", "max_queue", self.max_queue, 1)
        if not isinstance(self.shadowkv, dict):
            raise ConfigError(f"runtime.shadowkv is {type(self.shadowkv).__name__}", "a mapping of settings")


def load_build_config(path: str | Path | None, **overrides: Any) -> BuildConfig:
    """Read a YAML file of :class:`BuildConfig` settings; keyword arguments that are not None win over it.

    ``attention`` is accepted as a keyword for ``shadowkv.attention``.

    Raises:
        ConfigError: unreadable file, no YAML, an unknown or repeated key, or a bad value.
    """
    data = {} if path is None else read_yaml(path)
    config = BuildConfig.from_dict(data, str(path) if path else "build settings")
    attention = overrides.pop("attention", None)
    if attention is not None:
        config = replace(config, shadowkv=replace(config.shadowkv, attention=attention))
    return replace(config, **{k: v for k, v in overrides.items() if v is not None})


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file; an empty one is an empty mapping.

    Raises:
        ConfigError: it cannot be read, is no YAML, or sets a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a repeated key, of which the plain loader keeps the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"{path}: {key!r} is set more than once", "each setting once")
            return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the configuration {path}: {e}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # a date of month 13 is a ValueError, not a YAMLError
        raise ConfigError(f"{path} is no YAML: {' '.join(str(e).split())}") from e
    return {} if data is None else data
