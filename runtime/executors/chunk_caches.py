"""Chunk caches of one row as arrays: an LRU table for each layer and KV head, and the chunks they hold."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class ChunkCaches:
    """``slots`` slots for each of layers × heads caches, with the replacement order of ``reference.chunk_cache``.

    Args:
        layers, heads: caches are independent of each other.
        slots: at least the chunks selected in one step.
        chunks: chunk ids are below this.
        width: elements of one chunk's keys (and values), C·D.

    Attributes:
        keys, values: [layers, heads · slots, width] float32.
    """

    def __init__(self, layers: int, heads: int, slots: int, chunks: int, width: int) -> None:
        self.slots = slots
        self.keys = torch.empty(layers, heads * slots, width)
        self.values = torch.empty(layers, heads * slots, width)
        self._slot_of = np.full((layers, heads, chunks), -1, np.int64)
        self._chunk_of = np.full((layers, heads, slots), -1, np.int64)
        self._used = np.zeros((layers, heads, slots), np.int64)  # step of the last use; 0: free
        self._step = np.zeros(layers, np.int64)

    @property
    def stores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.keys, self.values

    @staticmethod
    def nbytes(layers: int, heads: int, slots: int, width: int) -> int:
        """Bytes of keys and values; the tables are small beside them."""
        return layers * heads * slots * width * 4 * 2

    def look_up(self, layer: int, chunks: Ints) -> tuple[Ints, Ints, Ints]:
        """Find the selected chunks, and give each missing one a slot.

        Args:
            chunks: [heads, m], each row ascending.

        Returns:
            slots [heads, m], and the positions (head, index) of the missing ones, each [missing], head by head.
        """
        slot_of, chunk_of, used = self._slot_of[layer], self._chunk_of[layer], self._used[layer]
        self._step[layer] += 1
        step = self._step[layer]
        slots = np.take_along_axis(slot_of, chunks, 1)
        missing = slots < 0
        head, index = np.nonzero(~missing)
        used[head, slots[head, index]] = step
        head, index = np.nonzero(missing)
        if len(head):
            # Free slots first, in order; then by step, and within a step by chunk id. The sort is stable.
            oldest_first = np.lexsort((chunk_of, used), axis=1)
            nth = np.cumsum(missing, axis=1)[head, index] - 1
            victims = oldest_first[head, nth]
            leaving = chunk_of[head, victims]
            gone = leaving >= 0
            slot_of[head[gone], leaving[gone]] = -1
            arriving = chunks[head, index]
            slot_of[head, arriving] = victims
            chunk_of[head, victims] = arriving
            used[head, victims] = step
            slots[head, index] = victims
        return slots, head, index
