"""The reference chunk cache against what "least recently used" means."""

from __future__ import annotations

import random

import pytest
import torch

from trtllm_shadowkv.reference.chunk_cache import ChunkCache


def fill(cache: ChunkCache, chunks: list[int]) -> tuple[list[int], list[int]]:
    hits, misses = cache.look_up(chunks)
    for chunk in misses:
        cache.insert(chunk, torch.full((2, 2), float(chunk)), torch.full((2, 2), -float(chunk)))
    return hits, misses


def held(cache: ChunkCache) -> list[int]:
    return [slot.chunk for slot in cache.slots]


def test_by_hand() -> None:
    cache = ChunkCache(4)
    assert fill(cache, [2, 5]) == ([], [2, 5])
    assert fill(cache, [5, 7]) == ([5], [7])
    assert fill(cache, [1, 7]) == ([7], [1])
    assert held(cache) == [2, 5, 7, 1]
    assert fill(cache, [1, 3]) == ([1], [3])  # 2 is the oldest
    assert held(cache) == [3, 5, 7, 1]
    assert fill(cache, [2, 9]) == ([], [2, 9])  # then 5, then 7
    assert held(cache) == [3, 2, 9, 1]
    assert fill(cache, []) == ([], [])


def test_of_equally_old_chunks_the_lowest_id_goes() -> None:
    cache = ChunkCache(3)
    fill(cache, [8])
    fill(cache, [6, 8])
    fill(cache, [4, 6, 8])
    assert held(cache) == [8, 6, 4]
    fill(cache, [9])
    assert held(cache) == [8, 6, 9]
    fill(cache, [1, 2])
    assert held(cache) == [2, 1, 9]  # 6 left for 1, then 8 for 2


def test_a_capacity_of_one_selection_holds_the_newest_selection() -> None:
    cache = ChunkCache(3)
    for chunks in ([1, 2, 3], [2, 3, 4], [7, 8, 9], [1, 8, 20]):
        fill(cache, chunks)
        assert sorted(held(cache)) == chunks


@pytest.mark.parametrize(("top_k", "capacity", "chunks"), [(1, 1, 5), (3, 3, 9), (4, 8, 12), (5, 20, 60), (2, 16, 10)])
def test_least_recently_used(top_k: int, capacity: int, chunks: int) -> None:
    rng = random.Random(capacity)
    cache, last_use = ChunkCache(capacity), dict.fromkeys(range(chunks), -1)
    for step in range(300):
        before = set(held(cache))
        wanted = sorted(rng.sample(range(chunks), rng.randint(0, top_k)))
        hits, misses = fill(cache, wanted)
        assert hits == [c for c in wanted if c in before] and misses == [c for c in wanted if c not in before]
        now = held(cache)
        assert len(set(now)) == len(now) == min(capacity, len(before) + len(misses))
        gone, stayed = before - set(now), before & set(now) - set(wanted)
        assert not gone & set(wanted)
        assert all((last_use[g], g) < (last_use[s], s) for g in gone for s in stayed)
        last_use |= dict.fromkeys(wanted, step)
        for chunk in wanted:
            slot = cache.get(chunk)
            assert slot.chunk == chunk and (slot.keys == chunk).all() and (slot.values == -chunk).all()
