"""The low-rank factors are the best of their rank: measured against scipy's SVD, on ordinary and on degenerate keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.reference.factors import factorise, project, rebuild


def best_error(keys: Tensor, rank: int) -> float:
    """Frobenius norm of what the best approximation of that rank leaves out (Eckart–Young)."""
    singular = scipy.linalg.svdvals(keys.double().numpy())
    return float(np.sqrt((singular[rank:] ** 2).sum()))


def error(keys: Tensor, a: Tensor, b: Tensor) -> float:
    return float((keys.double() - a.double() @ b.double()).norm())


def assert_orthonormal(b: Tensor) -> None:
    assert (b.double() @ b.double().T - torch.eye(len(b), dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize("tokens", [8, 40, 64, 1000])
@pytest.mark.parametrize("rank", [1, 16, 48, 64])
def test_best_of_its_rank(tokens: int, rank: int) -> None:
    torch.manual_seed(tokens + rank)
    keys = torch.randn(tokens, 64) * torch.logspace(0, -3, 64)[torch.randperm(64)]
    a, b = factorise(keys, rank)
    assert a.shape == (tokens, rank) and b.shape == (rank, 64) and a.dtype == b.dtype == torch.float32
    assert_orthonormal(b)
    assert error(keys, a, b) <= best_error(keys, rank) * (1 + 1e-4) + 1e-6 * float(keys.norm())
    assert torch.allclose(a, keys @ b.T, atol=1e-5)


def test_it_follows_a_spectrum_of_eight_decades() -> None:
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(400, 32)).Q, torch.linalg.qr(torch.randn(32, 32)).Q
    keys = (u.double() * torch.logspace(2, -6, 32, dtype=torch.float64) @ v.double()).float()
    for rank in (4, 8, 16):  # float32 keys are themselves only good to 1e-7 of the largest
        a, b = factorise(keys, rank)
        assert error(keys, a, b) <= best_error(keys, rank) * 1.001 + 1e-6 * float(keys.norm())


DEGENERATE = {
    "zero": torch.zeros(50, 32),
    "all tokens equal": torch.linspace(-1, 1, 32).repeat(50, 1),
    "rank 1": torch.outer(torch.linspace(-3, 5, 50), torch.linspace(1, 2, 32)),
    "rank 5": torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    @ torch.randn(5, 32, generator=torch.Generator().manual_seed(1)),
    "one token": torch.nn.functional.one_hot(torch.tensor([3]), 32).float(),
    "one column": torch.eye(32)[:, :1] @ torch.ones(1, 32),
    "equal singular values": torch.eye(32).repeat(3, 1),
    "tiny": 1e-30 * torch.randn(50, 32, generator=torch.Generator().manual_seed(2)),
    "huge": 1e30 * torch.randn(50, 32, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("rank", [1, 16, 32])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_keys(name: str, rank: int) -> None:
    keys = DEGENERATE[name]
    a, b = factorise(keys, rank)
    assert a.shape == (len(keys), rank)
    assert_orthonormal(b)
    assert error(keys, a, b) <= best_error(keys, rank) * (1 + 1e-5) + 2e-6 * float(keys.double().norm())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_keys_that_are_not_finite_are_refused(bad: float) -> None:
    keys = torch.randn(20, 16)
    keys[7, 3] = bad
    with pytest.raises(StateError, match="NaN or infinity"):
        factorise(keys, 16)


def test_project_by_hand() -> None:
    basis = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
    a, lost, total = project(torch.tensor([[2.0, 3.0, 4.0], [0.0, 4.0, -3.0]]), basis)
    assert torch.allclose(a, torch.tensor([[2.0, 5.0], [0.0, 0.0]]), atol=1e-6)
    assert lost == pytest.approx(25.0) and total == pytest.approx(54.0)


def test_a_projection_of_the_factorised_keys_is_a() -> None:
    torch.manual_seed(4)
    keys = torch.randn(100, 32)
    a, b = factorise(keys, 16)
    again, lost, total = project(keys, b)
    assert torch.allclose(again, a, atol=1e-5)
    assert math.sqrt(lost) == pytest.approx(best_error(keys, 16), rel=1e-4)
    assert total == pytest.approx(float(keys.square().sum()))


def test_rebuild_takes_the_heads_columns() -> None:
    torch.manual_seed(5)
    a, b = torch.randn(8, 16), torch.randn(16, 48)
    whole = a @ b
    for head in range(3):
        assert torch.allclose(rebuild(a, b, head, 16), whole[:, 16 * head : 16 * head + 16], atol=1e-5)
