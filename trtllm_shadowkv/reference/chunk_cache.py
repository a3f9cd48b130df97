"""Chunk cache of one KV head: least recently used chunks leave first (the paper's cache of section 3.2, as an LRU)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Slot:
    """One slot: a chunk's rebuilt post-RoPE keys and its values, both [C, D]."""

    chunk: int
    used: int
    keys: Tensor
    values: Tensor


@dataclass
class ChunkCache:
    """Rebuilt keys and fetched values of up to ``capacity`` chunks. It changes cost, never a result."""

    capacity: int
    slots: list[Slot] = field(default_factory=list)
    step: int = 0

    def look_up(self, chunks: list[int]) -> tuple[list[int], list[int]]:
        """Split ascending chunk ids into hits and misses, both ascending; hits become the most recently used."""
        self.step += 1
        held = {slot.chunk: slot for slot in self.slots}
        for chunk in chunks:
            if chunk in held:
                held[chunk].used = self.step
        return [c for c in chunks if c in held], [c for c in chunks if c not in held]

    def insert(self, chunk: int, keys: Tensor, values: Tensor) -> None:
        """Put a missed chunk into a free slot, else into that of the chunk that leaves.

        The least recently used chunk leaves; of those last used in the same step, the one with the lowest id.
        """
        new = Slot(chunk, self.step, keys, values)
        if len(self.slots) < self.capacity:
            self.slots.append(new)
            return
        victim = min(range(len(self.slots)), key=lambda i: (self.slots[i].used, self.slots[i].chunk))
        assert self.slots[victim].used < self.step, "a cache smaller than the selection"
        self.slots[victim] = new

    def get(self, chunk: int) -> Slot:
        return next(slot for slot in self.slots if slot.chunk == chunk)
