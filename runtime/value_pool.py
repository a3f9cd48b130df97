"""Host memory for the values of sealed chunks."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trtllm_shadowkv.errors import NoRoomError, StateError
from trtllm_shadowkv.runtime.pinned_slab import PinnedSlab

_SLAB_BYTES = 1 << 30
_ALIGNMENT = 4096


def aligned(nbytes: int) -> int:
    """Bytes that a region of the pinned pool takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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


class PinnedValuePool:
    """Pinned host memory for the values that a GPU fetches, taken once, in slabs.

    A row has a region for each layer, in one slab each; regions of one row follow each other where there is room.

    Args:
        capacity: bytes at most.
        largest: bytes of the largest region that will be asked for.
        make: takes pinned memory of a number of bytes.
        progress: called with bytes done and bytes in all after each slab.

    Raises:
        ShadowKVError: memory that cannot be had; what was taken is given back.
    """

    def __init__(
        self,
        capacity: int,
        largest: int,
        make: Callable[[int], PinnedSlab] = PinnedSlab,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        size = -(-_SLAB_BYTES // aligned(largest)) * aligned(largest)  # the largest regions leave nothing over
        whole, rest = divmod(capacity // _ALIGNMENT * _ALIGNMENT, size)
        self._sizes = [size] * whole + [rest] * (rest > 0)
        self.capacity, self.used = sum(self._sizes), 0
        self._slabs: list[PinnedSlab] = []
        self._free: list[list[tuple[int, int]]] = []  # of each slab: begin and end, ascending, never touching
        self._taken: dict[int, tuple[int, int, int]] = {}  # by address: slab, begin, end
        done = 0
        try:
            for size in self._sizes:
                self._slabs.append(make(size))
                self._free.append([(0, size)])
                done += size
                if progress is not None:
                    progress(done, self.capacity)
        except BaseException:
            self.close()
            raise

    def share(self, nbytes: int) -> int:
        """Bytes of the capacity that a region of ``nbytes`` stands for: an empty pool has room where shares have."""
        regions = sum(size // aligned(nbytes) for size in self._sizes)
        return self.capacity // regions if regions else self.capacity + 1

    def take(self, nbytes: int, count: int) -> list[int]:
        """Device addresses of ``count`` regions of ``nbytes``, multiples of 4,096.

        Raises:
            NoRoomError: there is no room for all of them; nothing is taken.
        """
        size, taken = aligned(nbytes), list[int]()
        for _ in range(count):
            place = self._place(size)
            if place is None:
                self.give(taken)
                raise NoRoomError(
                    f"{count} regions of {size:,} bytes asked of the value pool; "
                    f"{self.capacity - self.used:,} are free, in pieces"
                )
            slab, begin = place
            address = self._slabs[slab].device_address + begin
            self._taken[address] = (slab, begin, begin + size)
            self.used += size
            taken.append(address)
        return taken

    def _place(self, size: int) -> tuple[int, int] | None:
        for slab, free in enumerate(self._free):
            for i, (begin, end) in enumerate(free):
                if end - begin >= size:
                    free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return slab, begin
        return None

    def give(self, addresses: Sequence[int]) -> None:
        """Take regions back; nothing on any stream may still use them."""
        for address in addresses:
            slab, begin, end = self._taken.pop(address)
            self.used -= end - begin
            free = self._free[slab]
            at = bisect.bisect(free, (begin, end))
            if at < len(free) and free[at][0] == end:
                end = free.pop(at)[1]
            if at > 0 and free[at - 1][1] == begin:
                at, begin = at - 1, free.pop(at - 1)[0]
            free.insert(at, (begin, end))

    def close(self) -> None:
        """Give all memory back; nothing on any stream may still use it."""
        while self._slabs:
            self._slabs.pop().close()
