"""Cosines and sines of rotary positions, kept in a table that grows with the longest sequence seen."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_shadowkv.reference.rope import cos_sin

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each [N, D/2] float32 (or [chunks, C, D/2])."""


class RotaryTable:
    """Args: inverse_frequencies: D/2 values, radians a position."""

    def __init__(self, inverse_frequencies: list[float]) -> None:
        self._frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
        self._cos, self._sin = cos_sin(torch.arange(0), self._frequencies)

    def _grow(self, length: int) -> None:
        held = len(self._cos)
        if length > held:
            cos, sin = cos_sin(torch.arange(held, max(length, held + 4096)), self._frequencies)
            self._cos, self._sin = torch.cat((self._cos, cos)), torch.cat((self._sin, sin))

    def at(self, positions: Tensor) -> Angles:
        """Angles of positions [N]."""
        if len(positions):
            self._grow(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def chunks(self, chunks: Tensor, size: int) -> Angles:
        """Angles of every token of chunks [n]: each [n, size, D/2]."""
        self._grow((int(chunks.max()) + 1) * size)
        whole = len(self._cos) // size * size
        cos, sin = (t[:whole].view(whole // size, size, -1) for t in (self._cos, self._sin))
        return cos.index_select(0, chunks), sin.index_select(0, chunks)


def rotate(x: Tensor, angles: Angles, *, backwards: bool = False, per_token: bool = False) -> Tensor:
    """``reference.rope.rotate`` with given angles.

    Args:
        x: [N, heads, D] with angles [N, D/2]; or, ``per_token``, [n, C, D] with angles [n, C, D/2].
        backwards: rotate by the negative angles.
    """
    cos, sin = angles if per_token else (angles[0][:, None], angles[1][:, None])
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape)
    sign = -1.0 if backwards else 1.0
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out
