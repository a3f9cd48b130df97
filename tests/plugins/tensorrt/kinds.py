"""TensorRT's kinds, and tensors and attributes as harness.cpp takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

MAX_DIMS = 8
LINEAR = 0
FORMATS = range(13)
"""``TensorFormat``: LINEAR and twelve others."""


class Type(IntEnum):
    """``DataType``."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class FieldType(IntEnum):
    """``PluginFieldType``."""

    FLOAT16 = 0
    FLOAT32 = 1
    FLOAT64 = 2
    INT8 = 3
    INT16 = 4
    INT32 = 5
    CHAR = 6
    DIMS = 7
    UNKNOWN = 8
    BF16 = 9
    INT64 = 10


class Phase(IntEnum):
    """``TensorRTPhase``."""

    BUILD = 0
    RUNTIME = 1


class Logger(IntEnum):
    """What the library is given to log with."""

    COLLECTS = 0
    FINDS_NONE = 1
    NO_FINDER = 2


class CTensor(ctypes.Structure):
    """``Tensor`` of harness.cpp."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int64 * MAX_DIMS),
        ("low", ctypes.c_int64 * MAX_DIMS),
        ("high", ctypes.c_int64 * MAX_DIMS),
    )


class CField(ctypes.Structure):
    """``Field`` of harness.cpp."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Field:
    """One attribute.

    Attributes:
        name: None for a null pointer.
        data: its bytes, None for a null pointer.
        length: entries in it.
    """

    name: str | None
    data: bytes | None
    type: FieldType = FieldType.INT32
    length: int = 1


@dataclass(frozen=True)
class Tensor:
    """One input or output.

    Attributes:
        sizes: -1 where a size is not known while the engine is built; it is then 1 to 4096 in the profile.
    """

    type: Type
    sizes: tuple[int, ...] = ()
    format: int = LINEAR


@dataclass(frozen=True)
class Creator:
    """What a creator says of itself, ``interface`` being its kind and major version."""

    interface: tuple[str, int]
    name: str
    version: str
    namespace: str
    fields: list[Field]


def c_field(field: Field, data: ctypes.Array[ctypes.c_char] | None) -> CField:
    """For harness.cpp; ``data`` must live as long."""
    name = None if field.name is None else field.name.encode()
    return CField(name, None if data is None else ctypes.addressof(data), int(field.type), field.length)


def fields_of(lines: Iterable[str]) -> list[Field]:
    """From harness.cpp's ``name|type|length|bytes``."""
    parts = [line.split("|") for line in lines]
    return [Field(name, bytes.fromhex(data), FieldType(int(kind)), int(length)) for name, kind, length, data in parts]


def c_tensor(tensor: Tensor) -> CTensor:
    """For harness.cpp."""
    made = CTensor(int(tensor.type), tensor.format, len(tensor.sizes))
    for i, size in enumerate(tensor.sizes):
        made.size[i] = size
        made.low[i], made.high[i] = (1, 4096) if size < 0 else (size, size)
    return made
