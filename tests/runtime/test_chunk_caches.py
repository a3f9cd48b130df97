"""The array-based chunk caches against the reference cache, chunk by chunk and slot by slot, on long random traces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_shadowkv.reference.chunk_cache import ChunkCache
from trtllm_shadowkv.runtime.executors.chunk_caches import ChunkCaches

NOTHING = torch.empty(0)


class Both:
    """Both kinds side by side: look-ups must agree, and what a slot holds must stay until its chunk leaves."""

    def __init__(self, layers: int, heads: int, slots: int, chunks: int) -> None:
        self.arrays = ChunkCaches(layers, heads, slots, chunks, width=2)
        self.reference = [[ChunkCache(slots) for _ in range(heads)] for _ in range(layers)]
        self.slots = slots

    def look_up(self, layer: int, chunks: np.ndarray) -> int:
        """Misses."""
        slots, head, index = self.arrays.look_up(layer, chunks.copy())
        want = []
        for h, ids in enumerate(chunks.tolist()):
            cache = self.reference[layer][h]
            _, misses = cache.look_up(ids)
            want += [(h, ids.index(i)) for i in misses]
            for i in misses:
                cache.insert(i, NOTHING, NOTHING)
            order = [s.chunk for s in cache.slots]
            assert slots[h].tolist() == [order.index(i) for i in ids]
        assert list(zip(head.tolist(), index.tolist(), strict=True)) == want
        # As the state does: a missing chunk is written where the look-up says, and read back later.
        rows = slots + np.arange(len(chunks))[:, None] * self.slots
        self.arrays.keys[layer, rows[head, index], 0] = torch.from_numpy(chunks[head, index]).float()
        self.arrays.values[layer, rows[head, index], 1] = -torch.from_numpy(head).float()
        assert np.array_equal(self.arrays.keys[layer, rows, 0].numpy(), chunks)
        assert np.array_equal(-self.arrays.values[layer, rows, 1].numpy(), np.arange(len(chunks))[:, None] + 0 * chunks)
        return len(want)


@pytest.mark.parametrize(
    ("top_k", "slots", "chunks"), [(1, 1, 4), (4, 4, 9), (4, 8, 13), (6, 24, 40), (5, 30, 30), (3, 8, 200)]
)
def test_random_traces(top_k: int, slots: int, chunks: int) -> None:
    rng = np.random.default_rng(slots)
    both, misses = Both(2, 3, slots, chunks), 0
    for step in range(400):
        m = top_k if step % 7 else int(rng.integers(0, top_k + 1))  # heads choose equally many, not always top_k
        near = rng.integers(0, chunks) + np.arange(2 * top_k)  # mostly from a few neighbours, so that there are hits
        pool = np.unique(near % chunks) if step % 5 and len(np.unique(near % chunks)) >= m else np.arange(chunks)
        ids = np.stack([np.sort(rng.choice(pool, m, replace=False)) for _ in range(3)])
        misses += both.look_up(int(rng.integers(2)), ids)
    assert misses > 0


def test_chunk_ids_up_to_the_last() -> None:
    both = Both(1, 2, 2, 50)
    assert both.look_up(0, np.array([[0, 49], [48, 49]])) == 4
    assert both.look_up(0, np.array([[0, 49], [0, 48]])) == 1
    assert both.look_up(0, np.array([[], []], np.int64)) == 0


def test_of_equally_old_chunks_the_lowest_id_goes() -> None:
    caches = ChunkCaches(1, 1, 3, 10, width=2)
    slots = [caches.look_up(0, np.array([ids]))[0].tolist() for ids in ([8], [6, 8], [4, 6, 8], [9], [1, 2])]
    assert slots == [[[0]], [[1, 0]], [[2, 1, 0]], [[2]], [[1, 0]]]  # 4 left for 9, 6 for 1, 8 for 2


def test_bytes() -> None:
    caches = ChunkCaches(3, 2, 5, 40, 16)
    assert caches.nbytes(3, 2, 5, 16) == caches.keys.nbytes + caches.values.nbytes == 2 * 3 * 2 * 5 * 16 * 4
