"""Conversions between float32, float16 and bfloat16 in numpy, where a bfloat16 is held as its 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.errors import CheckpointError

NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
"""How numpy holds each dtype."""
_BLOCK = 1 << 20


def to_dtype(array: NDArray[Any], source: str, target: str, name: str) -> NDArray[Any]:
    """Convert a weight, rounding to the nearest value and ties to even; NaN stays NaN, infinity infinity.

    Args:
        array: any shape, in ``NUMPY[source]``.
        source, target: ``float32``, ``float16`` or ``bfloat16``.
        name: the tensor's name, for the error.

    Returns:
        An array of the same shape in ``NUMPY[target]``; ``array`` itself where the dtypes are equal.

    Raises:
        CheckpointError: a finite value lies outside the target's range.
    """
    if array.dtype != NUMPY[source]:
        raise TypeError(f"a {source} array holds {array.dtype}")
    if source == target:
        return array
    result = np.empty(array.shape, NUMPY[target])
    flat, out = np.ascontiguousarray(array).reshape(-1), result.reshape(-1)
    for i in range(0, flat.size, _BLOCK):  # so that temporaries stay small beside an embedding of gigabytes
        block = flat[i : i + _BLOCK]
        wide = _widen(block) if source == "bfloat16" else block.astype(np.float32)
        if target == "float32":
            out[i : i + _BLOCK] = wide
            continue
        with np.errstate(over="ignore"):
            out[i : i + _BLOCK] = _narrow(wide) if target == "bfloat16" else wide.astype(np.float16)
        done = out[i : i + _BLOCK]
        overflow = ((done & 0x7FFF) == 0x7F80 if target == "bfloat16" else np.isinf(done)) & np.isfinite(wide)
        if overflow.any():
            raise CheckpointError(
                f"{name} holds {wide[overflow][0]:g}",
                f"values within the range of {target}",
                "build with another dtype",
            )
    return result


def _widen(bits: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 bits to float32: they are its upper half."""
    wide: NDArray[Any] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """float32 to bfloat16 bits: adding just under half a unit, or half for an odd one, carries where it must."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could carry a NaN into infinity, or into a negative zero
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
