"""Landmarks and outlier chunks on small cases by hand, and on keys that are zero, huge or not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trtllm_shadowkv.reference.landmarks import landmarks, min_cosine, outlier_chunks


def chunks_with_cosines(cosines: list[float]) -> Tensor:
    """[1, n, 2, 2]: each chunk's two keys stand at the same angle, with that cosine, to their mean."""
    angles = [math.acos(c) for c in cosines]
    return torch.tensor([[[[math.cos(a), math.sin(a)], [math.cos(a), -math.sin(a)]] for a in angles]])


def test_a_landmark_is_the_mean() -> None:
    keys = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]], [[[0.0, -1.0], [0.0, 0.0]]]])
    assert landmarks(keys).tolist() == [[[2.0, 4.0]], [[0.0, -0.5]]]


def test_min_cosine_by_hand() -> None:
    # Mean (1, 1): cosines 1/√2 of (2, 0), 1/√2 of (0, 2). Mean (2, 1): (4, 1) has 9/√85, (0, 1) has 1/√5.
    keys = torch.tensor([[[[2.0, 0.0], [0.0, 2.0]], [[4.0, 1.0], [0.0, 1.0]]]])
    assert min_cosine(keys, landmarks(keys))[0].tolist() == pytest.approx([2**-0.5, 5**-0.5], abs=1e-7)


def test_min_cosine_ignores_lengths() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2, 5, 8, 16)
    means = landmarks(keys)
    for scale in (1e-30, 1e-3, 1e18, 1e30):
        assert torch.allclose(min_cosine(keys * scale, means * scale), min_cosine(keys, means), atol=1e-6)


def test_lowest_cosines_and_always_chunk_0() -> None:
    keys = chunks_with_cosines([1.0, 0.9, 0.2, 0.5, 0.8, 0.1])
    assert outlier_chunks(keys, 1).tolist() == [[0]]
    assert outlier_chunks(keys, 3).tolist() == [[0, 2, 5]]
    assert outlier_chunks(keys, 4).tolist() == [[0, 2, 3, 5]]


def test_heads_choose_for_themselves() -> None:
    keys = torch.cat((chunks_with_cosines([0.3, 0.9, 0.5, 0.4]), chunks_with_cosines([0.3, 0.1, 0.5, 0.9])))
    assert outlier_chunks(keys, 2).tolist() == [[0, 3], [0, 1]]


@pytest.mark.parametrize("count", [6, 7, 1000])
def test_more_outliers_than_chunks_are_all_chunks(count: int) -> None:
    assert outlier_chunks(chunks_with_cosines([0.5] * 6), count).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_ties_take_the_lower_id() -> None:
    keys = chunks_with_cosines([0.7] * 300)
    assert outlier_chunks(keys, 40).tolist() == [list(range(40))]
    keys = chunks_with_cosines([0.9, 0.7] * 150)
    assert outlier_chunks(keys, 5).tolist() == [[0, 1, 3, 5, 7]]


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf, 3e38])
def test_a_chunk_whose_landmark_says_nothing_is_an_outlier(bad: float) -> None:
    """One such key is enough; 3e38 overflows the mean, and its squares overflow even one by one."""
    keys = chunks_with_cosines([0.9, 0.4, 0.8, 0.6, 0.7])
    keys[0, 3, 0] = bad
    if bad == 3e38:
        keys[0, 3, 1] = bad
    if bad == 0:
        keys[0, 3] = 0
    assert outlier_chunks(keys, 2).tolist() == [[0, 3]]
    cosines = min_cosine(keys, landmarks(keys))
    assert torch.isfinite(cosines).all() and cosines[0, 3] == -1


def test_all_keys_zero() -> None:
    assert outlier_chunks(torch.zeros(2, 9, 8, 4), 3).tolist() == [[0, 1, 2]] * 2


def test_large_keys_are_judged_by_direction() -> None:
    keys = chunks_with_cosines([0.9, 0.4, 0.8]) * 1e25  # squares overflow float32, the mean does not
    assert outlier_chunks(keys, 2).tolist() == [[0, 1]]


def test_the_keys_are_left_alone() -> None:
    torch.manual_seed(3)
    keys = torch.randn(2, 6, 8, 4)
    before = keys.clone()
    outlier_chunks(keys, 3)
    assert torch.equal(keys, before)
