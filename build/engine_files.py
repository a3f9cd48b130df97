"""The files of an engine directory other than the compiled engine: graph, weights and configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trtllm_shadowkv import names
from trtllm_shadowkv.build.llama_graph import ONNX_TYPES, Weight, build_graph, weights
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.engine_directory import engine_config
from trtllm_shadowkv.errors import EngineError
from trtllm_shadowkv.models import ModelConfig

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT = 4096  # of a weight in its file: a page, so that it can be mapped


@dataclass(frozen=True)
class Place:
    """Where a weight's bytes lie in the weights file."""

    offset: int
    size: int

    @property
    def external_data(self) -> dict[str, str]:
        """In the words of ONNX's external data."""
        return {"location": names.WEIGHTS_FILE, "offset": str(self.offset), "length": str(self.size)}

    @property
    def next_offset(self) -> int:
        """Where the next weight may begin."""
        return -(-(self.offset + self.size) // _ALIGNMENT) * _ALIGNMENT


def layout(model: ModelConfig, dtype: str) -> list[tuple[Weight, Place]]:
    """Each weight and its place, in file order."""
    places, offset = [], 0
    for weight in weights(model, dtype):
        place = Place(offset, prod(weight.shape) * ITEM_BYTES[weight.dtype])
        places.append((weight, place))
        offset = place.next_offset
    return places


def write_config(directory: Path, model: ModelConfig, build: BuildConfig) -> None:
    # It may be a link to the file of the engine that is refreshed.
    (directory / names.CONFIG_FILE).unlink(missing_ok=True)
    text = json.dumps(engine_config(model, build), indent=2)
    (directory / names.CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def write_graph(directory: Path, model: ModelConfig, build: BuildConfig, places: Mapping[str, Place]) -> None:
    """Write the ONNX file, whose initializers lie at ``places`` in the weights file."""
    from onnx import TensorProto

    graph = build_graph(model, build.shadowkv, build.dtype)
    for tensor in graph.graph.initializer:
        if tensor.name in places:
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in places[tensor.name].external_data.items():
                tensor.external_data.add(key=key, value=value)
    (directory / names.ONNX_FILE).unlink(missing_ok=True)
    (directory / names.ONNX_FILE).write_bytes(graph.SerializeToString())


def check_graph(directory: Path, model: ModelConfig, dtype: str) -> None:
    """Compare where the graph finds its weights with where they lie, and have ``onnx.checker`` look at the rest.

    The checker would refuse the directory for its weights where they have a second name, as in a refresh or a backup
    of hard links: it is given the graph alone.
    """
    import onnx

    path = directory / names.ONNX_FILE
    try:
        proto = onnx.load(str(path), load_external_data=False)
        weights_here = [t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        found = [(t.name, t.data_type, tuple(t.dims), {e.key: e.value for e in t.external_data}) for t in weights_here]
        for tensor in weights_here:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            proto.graph.initializer.remove(tensor)
        onnx.checker.check_model(proto, full_check=True)
    except Exception as e:  # neither protobuf nor the checker has an error class to name
        reason = " ".join(str(e).split())[:400]
        raise EngineError(f"onnx.checker refuses {path}: {reason}", todo="build the engine again") from e
    places = layout(model, dtype)
    if found != [(w.name, ONNX_TYPES[w.dtype], w.shape, place.external_data) for w, place in places]:
        raise EngineError(
            f"{path} does not hold the weights of this model as this version lays them out",
            todo="build the engine again",
        )
