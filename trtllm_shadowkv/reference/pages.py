"""Live pages: one pool of post-RoPE keys and values for prompts in flight, windows and dense rows."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_shadowkv.config import PAGE_TOKENS
from trtllm_shadowkv.errors import StateError


class PagePool:
    """Pages of PAGE_TOKENS tokens, all layers of a page together.

    Args:
        pages: number of pages.
        layers, kv_heads, head_size: shape of one token's keys (and values).
    """

    def __init__(self, pages: int, layers: int, kv_heads: int, head_size: int) -> None:
        # NaN, so that a read of a token that was never written shows.
        self.data = torch.full((pages, layers, 2, kv_heads, PAGE_TOKENS, head_size), torch.nan)
        self.free = list(range(pages))[::-1]

    def take(self) -> int:
        if not self.free:
            raise StateError("the pool of live pages is exhausted", todo="reserve pages before a row is admitted")
        return self.free.pop()

    def give(self, page: int) -> None:
        self.data[page] = torch.nan
        self.free.append(page)


class LivePages:
    """The page table of one row: tokens [first kept, length) of it are live."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: dict[int, int] = {}

    def reserve(self, start: int, end: int) -> None:
        """Have pages for tokens [start, end)."""
        for index in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            if index not in self.pages:
                self.pages[index] = self.pool.take()

    def release_before(self, token: int) -> None:
        """Give back the pages that lie wholly before ``token``."""
        for index in [i for i in self.pages if (i + 1) * PAGE_TOKENS <= token]:
            self.pool.give(self.pages.pop(index))

    def release(self) -> None:
        for page in self.pages.values():
            self.pool.give(page)
        self.pages = {}

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store tokens from position ``start``; keys and values are [N, Hkv, D]."""
        for i in range(len(keys)):
            page, offset = divmod(start + i, PAGE_TOKENS)
            self.pool.data[self.pages[page], layer, 0, :, offset] = keys[i]
            self.pool.data[self.pages[page], layer, 1, :, offset] = values[i]

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens [start, end), each [Hkv, end − start, D]."""
        first = start // PAGE_TOKENS
        ids = [self.pages[i] for i in range(first, -(-end // PAGE_TOKENS))]
        if start >= end:
            shape = self.pool.data.shape
            empty = torch.empty(shape[3], 0, shape[5])
            return empty, empty
        both = torch.cat([self.pool.data[p, layer] for p in ids], dim=2)
        both = both[:, :, start - first * PAGE_TOKENS : end - first * PAGE_TOKENS]
        return both[0], both[1]
