from __future__ import annotations

import pytest
import torch

from trtllm_shadowkv.bench.drift import hit_rates, landmarks, queries
from trtllm_shadowkv.reference.selection import chunk_scores, top_chunks


# An eighth of the chunks and of top_k that the profiles are calibrated at: the share is what matters.
@pytest.mark.parametrize(
    ("profile", "chunks", "expected"),
    [
        ("text", 1948, (0.56, 0.75, 0.86)),
        ("text_61k", 956, (0.56, 0.75, 0.86)),
        ("hit60", 1948, (0.60, 0.80, 0.90)),
        ("hit80", 1948, (0.80, 0.96, 0.99)),
    ],
)
def test_hit_rates(profile: str, chunks: int, expected: tuple[float, ...]) -> None:
    q = queries(80, 24, 4, 128, profile=profile, seed=0, device="cpu")
    rates = hit_rates(q, landmarks(24, chunks, 128, 0), top_k=32, warm_up=48, factors=(1, 2, 4))
    assert rates.shape == (32, 3, 24)
    assert rates.mean(dim=(0, 2)).tolist() == pytest.approx(expected, abs=0.02)


def test_rates_are_those_of_a_list() -> None:
    q, keys = queries(12, 2, 4, 64, profile="text", seed=3, device="cpu"), landmarks(2, 300, 64, 3)
    rates = hit_rates(q, keys, top_k=9, warm_up=0)
    for head in range(2):
        order: list[int] = []  # most recently used last
        for t in range(12):
            chosen = top_chunks(chunk_scores(q[t, head], keys[head], none := torch.zeros(300) > 0), none, 9).tolist()
            for i, factor in enumerate((1, 2, 4, 8)):
                assert rates[t, i, head] == pytest.approx(len(set(chosen) & set(order[-9 * factor :])) / 9)
            order = [c for c in order if c not in chosen] + chosen


def test_a_row_depends_on_neither_rows_nor_steps() -> None:
    q = queries(9, 3, 4, 64, profile="hit60", seed=5, device="cpu")
    assert torch.equal(queries(5, 2, 4, 64, profile="hit60", seed=5, device="cpu"), q[:5, :2])
    assert not torch.equal(q[:, 0], q[:, 1])
    assert not torch.equal(queries(9, 3, 4, 64, profile="hit60", seed=6, device="cpu"), q)
    assert torch.allclose(q.norm(dim=-1), torch.tensor(16.0))


def test_no_such_profile() -> None:
    with pytest.raises(KeyError):
        queries(1, 1, 1, 64, profile="prose", seed=0, device="cpu")
