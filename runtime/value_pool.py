"""Host memory for the values of sealed chunks."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from trtllm_shadowkv.errors import StateError


class ValuePool:
    """Slabs of host memory within a budget; one slab holds one row's values, all layers.

    Args:
        capacity: bytes that may be out at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._lock = threading.Lock()

    def take(self, *shape: int) -> Tensor:
        """An uninitialised float32 slab.

        Raises:
            StateError: over the budget; nothing is taken then. Admission reserves, so this is a fault in the caller.
        """
        size = torch.Size(shape).numel() * 4
        with self._lock:
            if self.used + size > self.capacity:
                raise StateError(f"{size:,} bytes asked of the value pool, {self.capacity - self.used:,} are free")
            self.used += size
        try:
            return torch.empty(shape)
        except BaseException:
            self._give(size)
            raise

    def give(self, slab: Tensor) -> None:
        self._give(slab.numel() * slab.element_size())

    def _give(self, size: int) -> None:
        with self._lock:
            self.used -= size
