"""The three ops as docs/structure.md describes them, for tests of their plugins."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tests.plugins.tensorrt.kinds import Field, FieldType, Tensor, Type
from trtllm_shadowkv import names

ATTRIBUTES = {
    "layer": 3,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": 64,
    "chunk_size": 8,
    "rank": 32,
    "top_k": 16,
    "outliers": 4,
}
Changed = Mapping[str, Tensor]

QKV, Q, SELECTION = 768, 512, (2, 16)
"""Widths of ``qkv`` and ``q``, and sizes of ``selection`` after the rows, with these attributes."""

assert tuple(ATTRIBUTES) == names.ATTRIBUTES


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: of its plugin.
        inputs: names of its inputs; ``outputs`` those of its outputs.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.inputs + self.outputs

    def shapes(self, **changed: str) -> str:
        """Shapes of the inputs, N tokens and B rows being symbols; ``changed`` by name."""
        return ";".join(changed.get(name, SHAPES[name]) for name in self.inputs)

    def build(self, element: Type = Type.HALF, changed: Changed | None = None) -> list[Tensor]:
        """Inputs and outputs while an engine is built: tokens and rows are not known."""
        return self.run(-1, -1, element, changed)

    def run(self, tokens: int, rows: int, element: Type = Type.HALF, changed: Changed | None = None) -> list[Tensor]:
        """Inputs and outputs of one pass; ``changed`` by name."""
        return [(changed or {}).get(name) or tensor(name, element, tokens, rows) for name in self.tensors]


SHAPES = {
    "qkv": f"N,{QKV}",
    "position_ids": "N",
    "sequence_slots": "B",
    "q": f"N,{Q}",
    "selection": "B,2,16",
    "ticket": "1",
    "out": f"N,{Q}",
}

LANDMARK_TOPK = Op(names.LANDMARK_TOPK, ("qkv", "position_ids", "sequence_slots"), ("q", "selection"))
KEY_RECONSTRUCT = Op(names.KEY_RECONSTRUCT, ("selection", "sequence_slots"), ("ticket",))
SPARSE_ATTENTION = Op(names.SPARSE_ATTENTION, ("q", "selection", "ticket", "sequence_slots"), ("out",))
OPS = (LANDMARK_TOPK, KEY_RECONSTRUCT, SPARSE_ATTENTION)
ELEMENTS = (Type.HALF, Type.BF16)


def is_element(name: str) -> bool:
    """Whether a tensor is of the engine's type; all others are int32."""
    return name in ("qkv", "q", "out")


def tensor(name: str, element: Type, tokens: int, rows: int) -> Tensor:
    """An input or output of a pass of ``tokens`` tokens and ``rows`` rows, -1: not known."""
    sizes = {
        "qkv": (tokens, QKV),
        "position_ids": (tokens,),
        "sequence_slots": (rows,),
        "q": (tokens, Q),
        "selection": (rows, *SELECTION),
        "ticket": (1,),
        "out": (tokens, Q),
    }
    return Tensor(element if is_element(name) else Type.INT32, sizes[name])


def int32(name: str, value: int) -> Field:
    return Field(name, struct.pack("<i", value))


def int64(name: str, value: int) -> Field:
    return Field(name, struct.pack("<q", value), FieldType.INT64)


def attributes(**changed: int | Field | None) -> list[Field]:
    """All attributes as int32; ``changed`` by name, None: left out."""
    fields = []
    for name, value in {**ATTRIBUTES, **changed}.items():
        if value is not None:
            fields.append(value if isinstance(value, Field) else int32(name, value))
    return fields
