"""Scores and choice of chunks on small cases by hand, with ties, overflow and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trtllm_shadowkv.reference.selection import chunk_scores, top_chunks

NONE = torch.zeros(3, dtype=torch.bool)


def flags(*true: int, n: int) -> Tensor:
    out = torch.zeros(n, dtype=torch.bool)
    out[list(true)] = True
    return out


def test_by_hand() -> None:
    # √D = 2: logits 0, log 2, log 5 for the first head and log 3, 0, 0 for the second; their sums are 8 and 5.
    means = torch.eye(4)[:3]
    queries = 2 * torch.tensor([[0, math.log(2), math.log(5), 9], [math.log(3), 0, 0, 9]])
    got = chunk_scores(queries, means, NONE).exp().tolist()
    assert got == pytest.approx([3 / 5, 2 / 8, 5 / 8], rel=1e-6)


def test_excluded_chunks_leave_before_the_softmax() -> None:
    """Left in, chunk 0 would take nearly all of head 0's softmax, and chunk 2 would win by head 1."""
    means = torch.eye(4)[:3]
    queries = 2 * torch.tensor([[20.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert chunk_scores(queries, means, NONE)[1:].argmax() == 1
    scores = chunk_scores(queries, means, flags(0, n=3))
    assert scores[0] == -math.inf
    assert scores[1:].exp().tolist() == pytest.approx(
        [math.exp(3) / (math.exp(3) + 1), math.exp(1) / (math.exp(1) + 1)], rel=1e-6
    )


def test_the_order_is_that_of_the_largest_probability() -> None:
    torch.manual_seed(0)
    for group in (1, 2, 4, 7):
        queries, means, excluded = torch.randn(group, 16) * 3, torch.randn(50, 16), torch.rand(50) < 0.2
        wide = (queries.double() @ means.double().T / 4).masked_fill(excluded, -math.inf)
        probability = wide.softmax(dim=1).amax(dim=0)
        best = probability.argsort(descending=True)[:10].sort().values
        assert torch.equal(top_chunks(chunk_scores(queries, means, excluded), excluded, 10), best)


def test_probabilities_that_underflow_keep_their_order() -> None:
    means = torch.tensor([[1000.0], [-400.0], [-300.0], [-350.0]])
    scores = chunk_scores(torch.ones(1, 1), means, flags(n=4))
    assert top_chunks(scores, flags(n=4), 2).tolist() == [0, 2]


def test_nan_counts_as_minus_infinity() -> None:
    means = torch.tensor([[0.0, 1.0], [math.nan, 0.0], [0.0, 2.0]])
    scores = chunk_scores(torch.tensor([[1.0, 1.0], [1.0, 0.5]]), means, NONE)
    assert scores[1] == -math.inf and torch.isfinite(scores[[0, 2]]).all()
    assert top_chunks(scores, NONE, 2).tolist() == [0, 2]
    assert top_chunks(scores, NONE, 3).tolist() == [0, 1, 2]  # still a chunk: nothing is lost


def test_a_nan_query_head_leaves_the_choice_to_the_others() -> None:
    means = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
    scores = chunk_scores(torch.tensor([[math.nan, 1.0], [0.0, 1.0]]), means, NONE)
    assert top_chunks(scores, NONE, 1).tolist() == [1]
    scores = chunk_scores(torch.full((2, 2), math.nan), means, NONE)
    assert scores.tolist() == [-math.inf] * 3 and top_chunks(scores, NONE, 2).tolist() == [0, 1]


@pytest.mark.parametrize("size", [3e38, math.inf])
def test_overflow_is_no_score(size: float) -> None:
    """+∞ among a head's scores leaves it no softmax; −∞ is an ordinary last place."""
    means = torch.tensor([[size, size], [1.0, 0.0], [2.0, 0.0]])
    up = chunk_scores(torch.ones(1, 2), means, NONE)
    assert up.tolist() == [-math.inf] * 3
    down = chunk_scores(-torch.ones(1, 2), means, NONE)
    assert down[0] == -math.inf and top_chunks(down, NONE, 2).tolist() == [1, 2]


def test_ties_take_the_lower_id() -> None:
    scores = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    assert top_chunks(scores, flags(n=6), 2).tolist() == [1, 3]
    assert top_chunks(scores, flags(1, n=6), 3).tolist() == [0, 3, 5]
    assert top_chunks(torch.zeros(1000), flags(3, n=1000), 5).tolist() == [0, 1, 2, 4, 5]
    assert top_chunks(torch.full((9,), -math.inf), flags(0, n=9), 3).tolist() == [1, 2, 3]


def test_equal_landmarks_have_equal_scores() -> None:
    """Whatever place in the matrix product a chunk has."""
    torch.manual_seed(1)
    for n in (1, 3, 7, 17, 33, 100, 259):
        scores = chunk_scores(torch.randn(3, 64), torch.randn(1, 64).expand(n, 64), flags(n=n))
        assert top_chunks(scores, flags(n=n), n // 2).tolist() == list(range(n // 2))


def test_fewer_chunks_than_asked_for() -> None:
    assert top_chunks(torch.tensor([1.0, 3.0, 2.0]), flags(1, n=3), 10).tolist() == [0, 2]
    assert top_chunks(torch.tensor([1.0, 3.0]), flags(0, 1, n=2), 4).tolist() == []
    assert chunk_scores(torch.ones(2, 4), torch.ones(2, 4), flags(0, 1, n=2)).tolist() == [-math.inf] * 2
