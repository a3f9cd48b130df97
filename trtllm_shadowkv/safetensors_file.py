"""One memory-mapped safetensors file (format: 8-byte little-endian header length, JSON header, tensor bytes).

Read here and not through the safetensors package because numpy has no bfloat16: its numpy reader cannot return one.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.errors import CheckpointError

_LONGEST_HEADER = 100_000_000
_ITEM_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
STORAGE: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""The dtypes that can be read, as numpy holds them (bfloat16 as its bits)."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype as the header spells it, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """The tensors of one file.

    Raises:
        CheckpointError: no such file, a header that is damaged or contradicts the file's size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f:
                size = f.seek(0, 2)
                if size < 8:
                    raise self._damaged(f"it has {size} bytes", "at least 8, the length of its header")
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
        try:
            self.entries = self._parse(size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an array that read() returned keeps the mapping as long as it lives
            self._map.close()

    def read(self, name: str) -> NDArray[Any]:
        """A read-only view of one tensor, in :data:`STORAGE`'s dtype; a copy only where its bytes are not aligned."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        flat = (
            np.frombuffer(self._map, STORAGE[entry.dtype], count, entry.offset)
            if count
            else np.empty(0, STORAGE[entry.dtype])
        )
        if not flat.flags.aligned:
            flat = flat.copy()
        flat.flags.writeable = False
        return flat.reshape(entry.shape)

    def _damaged(self, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {found}", expected, "download or convert the model again")

    def _parse(self, size: int) -> dict[str, Entry]:
        length = int.from_bytes(self._map[:8], "little")
        start = 8 + length
        if length > _LONGEST_HEADER or start > size:
            raise self._damaged(f"its header claims {length} bytes", f"at most {min(size - 8, _LONGEST_HEADER)}")
        try:
            header = json.loads(self._map[8:start].decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise self._damaged(f"its header is no JSON ({e})", "a JSON object") from e
        if not isinstance(header, dict):
            raise self._damaged(f"its header is a JSON {type(header).__name__}", "a JSON object")
        header.pop("__metadata__", None)
        spans = {name: self._span(name, info) for name, info in header.items()}
        end = 0
        for name, (begin, stop, _) in sorted(spans.items(), key=lambda item: item[1][:2]):
            if begin != end:
                raise self._damaged(
                    f"tensor {name!r} begins at byte {begin} of the data", f"{end}, where the last one ends"
                )
            end = stop
        if start + end != size:
            raise self._damaged(f"it has {size} bytes", f"{start + end}, as its header says")
        return {
            name: Entry(dtype, tuple(header[name]["shape"]), start + begin) for name, (begin, _, dtype) in spans.items()
        }

    def _span(self, name: str, info: Any) -> tuple[int, int, str]:
        """(begin, end, dtype) of a tensor's bytes in the data, checked against its shape."""
        info = info if isinstance(info, dict) else {}
        dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
        if (
            not isinstance(dtype, str)
            or dtype not in _ITEM_BITS
            or not _naturals(shape)
            or not _naturals(offsets)
            or len(offsets) != 2
        ):
            raise self._damaged(
                f"tensor {name!r} is described as {short(info)}", "a dtype, a shape and two data_offsets"
            )
        if (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
            raise self._damaged(
                f"tensor {name!r} takes {offsets[1] - offsets[0]} bytes",
                f"what a {dtype} of shape {short(shape)} takes",
            )
        return offsets[0], offsets[1], dtype


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 48 for v in value
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result
