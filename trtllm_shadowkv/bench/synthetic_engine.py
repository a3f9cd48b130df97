"""An engine of Llama-3.1-8B's shape with random weights, all of whose layers share one layer's.

TensorRT stores equal weights once, so engine and GPU memory hold one layer and the embeddings (2.5 GB); a pass reads
each layer's weights as it would read its own.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import torch

from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest, tensorrt_engine
from trtllm_shadowkv.build.engine_files import Place, write_config, write_graph
from trtllm_shadowkv.build.llama_graph import Weight, weights
from trtllm_shadowkv.build.whole_directory import whole_directory
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.models import ModelConfig

_LAYER = re.compile(r"layers\.\d+\.")


def write_synthetic_engine(directory: Path, model: ModelConfig, build: BuildConfig) -> EngineDirectory:
    """Write an engine directory, compiled where ``build.backend`` says so.

    Weights are normal with the variance that keeps that of their inputs; norms are one.

    Args:
        build: rank and max_seq_len given; dtype bfloat16 or float16.
    """
    target = tensorrt_engine.prepare(build)
    with whole_directory(directory.absolute(), sum(2 * prod(w.shape) for w in weights(model, build.dtype))) as partial:
        places = _write_weights(partial / names.WEIGHTS_FILE, model, build.dtype)
        write_graph(partial, model, build, places)
        write_config(partial, model, build)
        if target is not None:
            target.compile(partial, build)
        manifest.write(partial, **({} if target is None else target.record))
    return EngineDirectory.open(directory)


def _write_weights(path: Path, model: ModelConfig, dtype: str) -> dict[str, Place]:
    """Each weight's place; those of all layers are the first one's."""
    generator = torch.Generator().manual_seed(20260711)
    written: dict[str, Place] = {}
    places = {}
    offset = 0
    with path.open("wb") as file:
        for weight in weights(model, dtype):
            shared = _LAYER.sub("layers.", weight.name)
            if shared not in written:
                data = _random(weight, generator).to(getattr(torch, weight.dtype)).view(torch.int16).numpy()
                file.seek(offset)
                data.tofile(file)
                written[shared] = Place(offset, data.nbytes)
                offset = written[shared].next_offset
            places[weight.name] = written[shared]
    return places


def _random(weight: Weight, generator: torch.Generator) -> torch.Tensor:
    if len(weight.shape) == 1:
        return torch.ones(weight.shape)
    scale = 1.0 if weight.name == "embedding" else weight.shape[1] ** -0.5
    return torch.randn(weight.shape, generator=generator) * scale
