"""Live pages: what was written is read, nothing else is, and every page comes back."""

from __future__ import annotations

import pytest
import torch

from trtllm_shadowkv.config import PAGE_TOKENS
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.reference.pages import LivePages, PagePool


def test_reads_cross_pages_and_skip_released_ones() -> None:
    pool = PagePool(6, layers=2, kv_heads=2, head_size=4)
    row, other = LivePages(pool), LivePages(pool)
    keys, values = torch.randn(300, 2, 4), torch.randn(300, 2, 4)
    for start, end in ((0, 100), (100, 129), (129, 300)):  # pages of the two rows alternate
        other.reserve(start, end)
        row.reserve(start, end)
        row.write(1, start, keys[start:end], values[start:end])
    for start, end in ((0, 300), (127, 129), (128, 256), (255, 300), (299, 300)):
        k, v = row.read(1, start, end)
        assert torch.equal(k, keys[start:end].transpose(0, 1)) and torch.equal(v, values[start:end].transpose(0, 1))
    assert torch.isnan(row.read(0, 0, 300)[0]).all() and torch.isnan(other.read(1, 0, 300)[0]).all()
    row.release_before(PAGE_TOKENS - 1)
    assert len(pool.free) == 0
    row.release_before(2 * PAGE_TOKENS + 5)
    assert len(pool.free) == 2
    k, _ = row.read(1, 256, 300)
    assert torch.equal(k, keys[256:].transpose(0, 1))
    with pytest.raises(KeyError):
        row.read(1, 255, 300)


def test_a_released_page_holds_nothing_readable() -> None:
    pool = PagePool(1, 1, 1, 2)
    row = LivePages(pool)
    row.reserve(0, 5)
    row.write(0, 0, torch.ones(5, 1, 2), torch.ones(5, 1, 2))
    with pytest.raises(StateError, match="exhausted"):
        LivePages(pool).reserve(0, 1)
    row.release()
    row.release()
    assert pool.free == [0] and torch.isnan(pool.data).all()
    again = LivePages(pool)
    again.reserve(0, 1)
    assert torch.isnan(again.read(0, 0, 1)[0]).all()


def test_an_empty_range() -> None:
    k, v = LivePages(PagePool(1, 1, 3, 4)).read(0, 0, 0)
    assert k.shape == v.shape == (3, 0, 4)
