"""Attention in parts against torch's own, with parts that are empty or masked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trtllm_shadowkv.reference.attention import causal_attention, merge, partial_attention


def test_by_hand() -> None:
    # √D = 2: scores 0 and log 3, so weights 1/4 and 3/4 and a log-sum-exp of log 4.
    keys = torch.tensor([[0.0, 0, 0, 7], [2 * math.log(3), 0, 0, 7]])
    values = torch.tensor([[4.0, 0, 0, 0], [8.0, 4, 0, 0]])
    out, lse = partial_attention(torch.tensor([[1.0, 0, 0, 0]]), keys, values)
    assert out[0].tolist() == pytest.approx([7.0, 3.0, 0, 0]) and float(lse) == pytest.approx(math.log(4))


def test_an_empty_part_and_a_row_that_may_look_nowhere() -> None:
    queries = torch.randn(3, 4)
    out, lse = partial_attention(queries, torch.empty(0, 4), torch.empty(0, 4))
    assert torch.equal(out, torch.zeros(3, 4)) and lse.tolist() == [-math.inf] * 3
    mask = torch.tensor([[True, True], [False, False], [False, True]])
    values = torch.randn(2, 4)
    out, lse = partial_attention(queries, torch.randn(2, 4), values, mask)
    assert torch.equal(out[1], torch.zeros(4)) and lse[1] == -math.inf
    assert torch.allclose(out[2], values[1])


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("cuts", [[0, 50], [0, 1, 50], [0, 0, 7, 7, 30, 50, 50], [0, 49, 50]])
def test_parts_merge_to_the_whole(cuts: list[int], scale: float) -> None:
    """Empty parts among them, and scores whose exponentials overflow."""
    torch.manual_seed(len(cuts))
    queries, keys, values = torch.randn(4, 16) * scale, torch.randn(50, 16), torch.randn(50, 16)
    parts = [partial_attention(queries, keys[a:b], values[a:b]) for a, b in pairwise(cuts)]
    whole = scaled_dot_product_attention(queries.double(), keys.double(), values.double())
    assert torch.allclose(merge(parts).double(), whole, atol=1e-5)
    assert torch.allclose(merge(parts[::-1]), merge(parts), atol=1e-6)


def test_a_part_of_little_weight_adds_little() -> None:
    one, other = (torch.ones(1, 2), torch.tensor([0.0])), (torch.full((1, 2), 5.0), torch.tensor([-math.log(3)]))
    assert merge([one, other])[0].tolist() == pytest.approx([0.75 * 1 + 0.25 * 5] * 2)


@pytest.mark.parametrize(("n", "total", "heads", "kv_heads"), [(1, 1, 2, 2), (1, 9, 4, 1), (7, 7, 6, 2), (5, 20, 9, 3)])
def test_causal_attention(n: int, total: int, heads: int, kv_heads: int) -> None:
    torch.manual_seed(n)
    q, k, v = torch.randn(n, heads, 8), torch.randn(total, kv_heads, 8), torch.randn(total, kv_heads, 8)
    mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)
    wide_q, wide_k, wide_v = (t.transpose(0, 1).double() for t in (q, k, v))
    want = scaled_dot_product_attention(wide_q, wide_k, wide_v, mask, enable_gqa=True).transpose(0, 1)
    assert torch.allclose(causal_attention(q, k, v).double(), want, atol=1e-5)
