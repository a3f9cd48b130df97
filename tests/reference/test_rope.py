"""Rotary embedding, against complex numbers in double precision."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from trtllm_shadowkv.reference.rope import cos_sin, rotate, unrotate
from trtllm_shadowkv.rope import RopeConfig

FREQUENCIES = torch.tensor(RopeConfig(10_000.0).inverse_frequencies(16), dtype=torch.float32)


def by_complex_numbers(x: list[float], position: int, frequencies: list[float]) -> list[float]:
    half = len(x) // 2
    turned = [complex(x[i], x[i + half]) * cmath.exp(1j * position * frequencies[i]) for i in range(half)]
    return [z.real for z in turned] + [z.imag for z in turned]


def test_by_hand() -> None:
    quarter = torch.tensor([math.pi / 2, math.pi])  # a quarter and half a turn a position
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.allclose(rotate(x, torch.tensor([0]), quarter), x)
    assert torch.allclose(rotate(x, torch.tensor([1]), quarter), torch.tensor([[-3.0, -2.0, 1.0, -4.0]]), atol=1e-6)
    assert torch.allclose(rotate(x, torch.tensor([2]), quarter), torch.tensor([[-1.0, 2.0, -3.0, 4.0]]), atol=1e-6)


def test_every_head_turns_by_its_tokens_position() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(5, 3, 16), torch.tensor([0, 1, 77, 4095, 131_071], dtype=torch.int32)
    got = rotate(x, positions, FREQUENCIES)
    for n, position in enumerate(positions.tolist()):
        for head in range(3):
            want = by_complex_numbers(x[n, head].tolist(), position, FREQUENCIES.tolist())
            assert got[n, head].tolist() == pytest.approx(want, abs=2e-6)
    assert torch.equal(rotate(x[:, 1], positions, FREQUENCIES), got[:, 1])


def test_a_million_tokens_cost_no_accuracy() -> None:
    positions = torch.tensor([999_999, 1_048_575, 2**24 + 1])
    cos, sin = cos_sin(positions, FREQUENCIES)
    for n, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(FREQUENCIES.tolist()):
            assert cos[n, i].item() == pytest.approx(math.cos(position * frequency), abs=1e-7)
            assert sin[n, i].item() == pytest.approx(math.sin(position * frequency), abs=1e-7)


def test_unrotate_is_the_inverse_and_lengths_stay() -> None:
    torch.manual_seed(1)
    x, positions = torch.randn(200, 2, 16), torch.arange(200) * 5000
    turned = rotate(x, positions, FREQUENCIES)
    assert torch.allclose(unrotate(turned, positions, FREQUENCIES), x, atol=1e-6)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(1, 16), torch.randn(1, 16)

    def score(at_q: int, at_k: int) -> float:
        turned = rotate(q, torch.tensor([at_q]), FREQUENCIES), rotate(k, torch.tensor([at_k]), FREQUENCIES)
        return float((turned[0] * turned[1]).sum())

    assert score(1000, 900) == pytest.approx(score(100, 0), abs=1e-5)
    assert score(1000, 900) != pytest.approx(score(900, 1000), abs=1e-2)
