"""Where regions of pinned memory lie; the memory itself is not needed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from trtllm_shadowkv.errors import NoRoomError
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool, aligned

GIB = 1 << 30


@dataclass
class Slab:
    nbytes: int
    device_address: int
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Maker:
    """Slabs that only have addresses, far from each other."""

    slabs: list[Slab] = field(default_factory=list)
    most: int = 1000

    def __call__(self, nbytes: int) -> Any:
        if len(self.slabs) == self.most:
            raise MemoryError
        self.slabs.append(Slab(nbytes, (len(self.slabs) + 1) << 40))
        return self.slabs[-1]


def test_regions_lie_apart_and_come_together_again() -> None:
    make, rng = Maker(), random.Random(7)
    pool = PinnedValuePool(3 * GIB, 1 << 20, make)
    rows: list[tuple[int, list[int]]] = []
    refused = 0
    for _ in range(2000):
        if rows and rng.random() < 0.5:
            _, addresses = rows.pop(rng.randrange(len(rows)))
            pool.give(addresses)
        else:
            size, count = rng.choice([1, 4096, 5000, 1 << 20, 30 << 20]), rng.randint(1, 32)
            try:
                rows.append((size, pool.take(size, count)))
            except NoRoomError:
                refused += 1
        spans = sorted((a, a + aligned(size)) for size, addresses in rows for a in addresses)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        slabs = [(s.device_address, s.device_address + s.nbytes) for s in make.slabs]
        assert all(any(low <= begin and end <= high for low, high in slabs) for begin, end in spans)
        assert all(begin % 4096 == 0 for begin, _ in spans)
        assert pool.used == sum(end - begin for begin, end in spans)
    assert refused > 5
    for _, addresses in rows:
        pool.give(addresses)
    assert pool.used == 0
    assert pool._free == [[(0, s.nbytes)] for s in make.slabs], "pieces did not come together"


def test_regions_of_a_row_follow_each_other() -> None:
    pool = PinnedValuePool(GIB, 1, Maker())
    taken = pool.take(10_000, 5)
    assert [b - a for a, b in pairwise(taken)] == [aligned(10_000)] * 4


def test_all_or_none() -> None:
    pool = PinnedValuePool(GIB, GIB // 4, Maker())
    first = pool.take(GIB // 4, 3)
    with pytest.raises(NoRoomError, match="2 regions of 268,435,456 bytes asked of the value pool; 268,435,456 are"):
        pool.take(GIB // 4, 2)
    last = pool.take(GIB // 4, 1)
    assert pool.used == GIB
    pool.give(first)
    pool.give(last)
    assert len(pool.take(GIB // 4, 4)) == 4


def test_a_slab_is_as_large_as_the_largest_region() -> None:
    make = Maker()
    pool = PinnedValuePool(5 * GIB, 2 * GIB + 1, make)
    assert [s.nbytes for s in make.slabs] == [2 * GIB + 4096] * 2 + [GIB - 8192]
    small = Maker()
    PinnedValuePool(5 * GIB, 600 << 20, small)
    assert [s.nbytes for s in small.slabs] == [1200 << 20] * 4 + [320 << 20]
    assert pool.capacity == sum(s.nbytes for s in make.slabs) == 5 * GIB
    pool.close()
    pool.close()
    assert all(s.closed for s in make.slabs)


@pytest.mark.parametrize("capacity", [0, 1, 4095])
def test_next_to_nothing_is_nothing(capacity: int) -> None:
    pool = PinnedValuePool(capacity, GIB, Maker())
    assert pool.capacity == 0
    assert pool.share(1) > 0
    with pytest.raises(NoRoomError):
        pool.take(1, 1)


def test_an_empty_pool_has_room_for_what_its_shares_allow() -> None:
    """Whatever a slab of regions of one size leaves over."""
    rng = random.Random(3)
    for _ in range(300):
        largest = rng.randint(1, 400 << 20)
        pool = PinnedValuePool(rng.randint(0, 9 * GIB), largest, Maker())
        for size in (largest, rng.randint(1, largest), 1):
            most = pool.capacity // pool.share(size)
            if size > 1 << 20:
                pool.give(pool.take(size, most))
                with pytest.raises(NoRoomError):
                    pool.take(size, most + 1)
            assert most <= pool.capacity // aligned(size)


def test_progress_and_a_failure_half_way() -> None:
    heard: list[tuple[int, int]] = []
    PinnedValuePool(3 * GIB, 1, Maker(), lambda done, total: heard.append((done // GIB, total // GIB)))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    make = Maker(most=2)
    with pytest.raises(MemoryError):
        PinnedValuePool(3 * GIB, 1, make)
    assert [s.closed for s in make.slabs] == [True, True]
