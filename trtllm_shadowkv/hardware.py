"""GPUs and models by name, with the figures that planning computes with: bytes, bytes/s, FLOP/s; GB = 1e9 bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

from trtllm_shadowkv.errors import CheckpointError, ConfigError, nearest
from trtllm_shadowkv.models import ModelConfig

_UNITS = {"memory": "bytes", "bandwidth": "bytes/s", "link": "bytes/s", "tensor": "FLOP/s"}
Source = Literal["measured", "vendor", "given"]

BANDWIDTH_SHARE = 4.2 / 4.8
"""What a kernel reaches of the vendor's memory bandwidth: measured on one H200 (4.2 TB/s copy of 4.8)."""
LINK_SHARE = 50 / 63
"""What a gather of pinned host memory reaches of the link: measured on one H200 (50 GB/s of PCIe 5 x16's 63)."""
PCIE4, PCIE5, NVLINK_C2C = 31.5e9, 63e9, 450e9
"""Link rates by specification, bytes/s in one direction, x16."""

KERNEL_FLOOR = 1.5e-6
"""Seconds of a kernel that does nothing: 0.6-0.9 us measured in a captured graph, plus ramp (assumption)."""
LAYER_KERNELS = 6
"""Kernels of a layer outside attention (assumption: two norms, QKV, output, gate and up, down)."""
DENSE_PART = ((1, 4.73e-3), (16, 4.80e-3), (24, 4.90e-3), (32, 4.95e-3), (64, 6.50e-3))
"""Rows, and seconds of all matrices of Llama-3.1-8B in bfloat16 on the H200: measured as one TensorRT engine in a
captured graph (64 rows: one layer and the head, scaled). In proportion to rows beyond that (assumption)."""


class Shape(Protocol):
    """What the arithmetic needs to know of a model; :class:`ModelShape` and ``models.ModelConfig`` both have it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model with a gated MLP (Llama's shape), sizes in elements.

    Attributes:
        max_position_embeddings: tokens it was made for; 0: unknown.
        tied: the output head is the token embedding.

    Raises:
        ConfigError: a size below one, or heads that are no multiple of the key/value heads.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        for f in fields(self)[:7]:
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 30:
                raise ConfigError(f"{f.name} is {value!r}", f"a whole number from 1 to {1 << 30}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads over {self.num_kv_heads} key/value heads",
                "a multiple of the number of key/value heads",
            )


@dataclass(frozen=True)
class Gpu:
    """One GPU as the time model sees it.

    Attributes:
        memory: bytes, as sold; drivers report a little more (an H200: 143,771 MiB = 150.8e9).
        bandwidth: bytes/s that a streaming kernel reaches in device memory.
        link: bytes/s that a gather reaches from pinned host memory.
        tensor: dense bfloat16 FLOP/s with float32 accumulation, the vendor's figure.
        source: ``measured``: bandwidth and link were measured by this project; ``vendor``: the vendor's figures
            times the shares measured on the H200; ``given``: by the caller.

    Raises:
        ConfigError: a figure below 1e6 or above 1e18.
    """

    name: str
    memory: float
    bandwidth: float
    link: float
    tensor: float
    source: Source

    def __post_init__(self) -> None:
        for key in _UNITS:
            value = getattr(self, key)
            if not 1e6 <= value <= 1e18:
                raise ConfigError(f"the GPU's {key} is {value:g} {_UNITS[key]}", "a number from 1e6 to 1e18")


def check_positive(name: str, value: float) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r}", "a positive, finite number")


def _vendor(name: str, gigabytes: float, terabytes_per_s: float, link: float, teraflops: float) -> Gpu:
    bandwidth = terabytes_per_s * 1e12 * BANDWIDTH_SHARE
    return Gpu(name, gigabytes * 1e9, bandwidth, link * LINK_SHARE, teraflops * 1e12, "vendor")


_GPUS = (
    # Copy 4.0-4.2 TB/s, gather 50-51 GB/s: facts measured on the machine. Memory and tensor rate: data sheet.
    Gpu("h200", 141e9, 4.2e12, 50e9, 989e12, "measured"),
    # The vendor's data sheets: GB, TB/s, link, dense bf16 TFLOP/s (half of the figure printed "with sparsity").
    _vendor("h100", 80, 3.35, PCIE5, 989),
    _vendor("h100-pcie", 80, 2.0, PCIE5, 756),
    _vendor("a100-80gb", 80, 2.039, PCIE4, 312),
    _vendor("a100-40gb", 40, 1.555, PCIE4, 312),
    _vendor("l40s", 48, 0.864, PCIE4, 362),
    _vendor("rtx-4090", 24, 1.008, PCIE4, 165),
    _vendor("rtx-5090", 32, 1.792, PCIE5, 209),
    _vendor("b200", 180, 7.7, PCIE5, 2250),
    _vendor("gh200", 96, 4.0, NVLINK_C2C, 989),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}

# From the models' published config.json files.
MODELS: Mapping[str, ModelShape] = {
    "llama-3.1-8b": ModelShape(32, 32, 8, 128, 4096, 14336, 128256, 131072),
    "llama-3-8b-1m": ModelShape(32, 32, 8, 128, 4096, 14336, 128256, 1048576),
    "llama-3.1-70b": ModelShape(80, 64, 8, 128, 8192, 28672, 128256, 131072),
    "mistral-7b": ModelShape(32, 32, 8, 128, 4096, 14336, 32768, 32768),
    "yi-9b-200k": ModelShape(48, 32, 4, 128, 4096, 11008, 64000, 262144),
    "qwen2.5-7b": ModelShape(28, 28, 4, 128, 3584, 18944, 152064, 32768),
    "qwen3-8b": ModelShape(36, 32, 8, 128, 4096, 12288, 151936, 40960),
    "smollm2-135m": ModelShape(30, 9, 3, 64, 576, 1536, 49152, 8192, tied=True),
}


def gpu_by_name(name: str) -> Gpu:
    """A row of the table.

    Raises:
        ConfigError: unknown name; the nearest known one is suggested.
    """
    if name.lower() not in GPUS:
        raise ConfigError(f"unknown GPU {name!r}{nearest(name.lower(), tuple(GPUS))}", f"one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


def custom_gpu(base: str | None, **figures: float | None) -> Gpu:
    """A GPU from numbers (``memory``, ``bandwidth``, ``link``, ``tensor``), over a row of the table where one is named.

    Raises:
        ConfigError: neither a name nor all four numbers, or a number out of range.
    """
    given = {key: value for key, value in figures.items() if value is not None}
    if base is not None:
        known = gpu_by_name(base)
        if not given:
            return known
        return Gpu(**{**_figures(known), **given}, name=f"{known.name}, altered", source="given")
    if missing := [key for key in _UNITS if key not in given]:
        raise ConfigError(
            f"the GPU's {', '.join(missing)} is not given",
            "all four figures of a GPU",
            f"or name one of {', '.join(GPUS)}",
        )
    return Gpu(**given, name="custom", source="given")


def _figures(gpu: Gpu) -> dict[str, float]:
    return {key: getattr(gpu, key) for key in _UNITS}


def model_by_name(name: str) -> ModelShape:
    """A row of the table.

    Raises:
        ConfigError: unknown name; the nearest known one is suggested.
    """
    if name.lower() not in MODELS:
        raise ConfigError(
            f"unknown model {name!r}{nearest(name.lower(), tuple(MODELS))}",
            f"one of {', '.join(MODELS)}",
            "or give a model directory or the shape's numbers",
        )
    return MODELS[name.lower()]


def model_from_directory(directory: str | Path) -> ModelConfig:
    """Shape of a Hugging Face model directory; only its config.json is read.

    Raises:
        CheckpointError: no readable config.json there.
        ConfigError: a model that this package does not serve.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}", "a Hugging Face model directory") from e
    except ValueError as e:
        raise CheckpointError(f"{path} is no JSON: {e}", "a Hugging Face model directory") from e
    return ModelConfig.from_hf(config, str(path))


def matrix_parameters(shape: Shape) -> int:
    """Weights that every decode step reads: the layers' matrices and the output head (no embedding, norms, biases)."""
    query, key = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    layer = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


def weight_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Bytes of all weights but biases and query/key norms (together below 0.01 %)."""
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return (matrix_parameters(shape) + embedding + norms) * element_bytes


def matrices_time(shape: Shape, gpu: Gpu, rows: int) -> float:
    """Seconds of everything but attention in one step.

    The measured times of Llama-3.1-8B on the H200, less a floor for each kernel, scale with the weights' bytes over the
    memory bandwidth. Rows count by the GPU's ratio of tensor rate to bandwidth: a low ratio is compute-bound sooner.
    """
    model, h200 = MODELS["llama-3.1-8b"], GPUS["h200"]
    rows_there = rows * (h200.tensor / h200.bandwidth) / (gpu.tensor / gpu.bandwidth)
    last_rows, last = DENSE_PART[-1]
    if rows_there > last_rows:
        there = last * rows_there / last_rows
    else:
        (r0, t0), (r1, t1) = next(p for p in pairwise(DENSE_PART) if rows_there <= p[1][0])
        there = t0 + (t1 - t0) * max(rows_there - r0, 0) / (r1 - r0)
    floor = LAYER_KERNELS * KERNEL_FLOOR  # seconds a layer
    stretch = (there - model.num_layers * floor) / (matrix_parameters(model) / h200.bandwidth)
    return shape.num_layers * floor + stretch * matrix_parameters(shape) / gpu.bandwidth
