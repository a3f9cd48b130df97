"""The arithmetic of trtllm_shadowkv.runtime.cuda_memory that needs no GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_shadowkv.runtime.cuda_memory import outlier_words, plain_values, quantise, transposed_units


@pytest.mark.parametrize("chunks", [1, 31, 32, 33, 500])
def test_bit_maps_hold_the_outliers_and_nothing_else(chunks: int) -> None:
    generator = torch.Generator().manual_seed(chunks)
    ids = torch.stack([torch.randperm(chunks, generator=generator)[: min(48, chunks)] for _ in range(3)])
    words = outlier_words(ids, chunks)
    assert words.dtype == torch.int32
    assert words.shape == (3, -(-chunks // 32))
    for head, row in zip(ids, words.tolist(), strict=True):
        found = [c for c in range(32 * len(row)) if row[c // 32] >> c % 32 & 1]
        assert found == sorted(head.tolist())


def test_units_hold_eight_tokens_transposed() -> None:
    values = torch.arange(2 * 24 * 5).view(2, 24, 5)
    units = transposed_units(values)
    assert units.shape == (2, 3, 5, 8)
    assert units[1, 2, 3, 4] == values[1, 2 * 8 + 4, 3]
    assert torch.equal(plain_values(units), values)


def test_e4m3_has_a_scale_a_group_and_one_where_all_is_zero() -> None:
    x = torch.tensor([[0.0, 0.0], [-3.0, 1.5], [1e30, 1e-30]])
    small, scale = quantise(x, (1,))
    assert scale.flatten().tolist() == pytest.approx([1.0, 3 / 448, 1e30 / 448])
    assert torch.allclose(small.float() * scale, x, rtol=0.07)
