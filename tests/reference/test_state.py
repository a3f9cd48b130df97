"""Both states against a naive computation from a row's whole history, and what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.driver import (
    NO_ROTATION,
    Step,
    context,
    generation,
    make_model,
    make_qkv,
    margin,
    prompt,
    run_ops,
    split_qkv,
    whole_row,
)
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.value_pool import ValuePool

pytestmark = pytest.mark.usefixtures("one_thread")

AnyState = ReferenceState | CpuState
MakeState = Callable[[ModelConfig, ShadowKVConfig], AnyState]


@pytest.fixture(params=["reference", "cpu"])
def make_state(request: pytest.FixtureRequest) -> MakeState:
    def make(model: ModelConfig, config: ShadowKVConfig) -> AnyState:
        if request.param == "cpu":
            return CpuState(model, config, ValuePool(1 << 28))
        return ReferenceState(model, config, pages=64)

    return make


def settings(**changes: Any) -> ShadowKVConfig:
    return ShadowKVConfig(**{"rank": 16, "top_k": 3, "outliers": 2, "window": 16, "dense_limit": 40, **changes})


# --- the naive computation --------------------------------------------------------------------------------------------


def turn(x: Tensor, sign: int, model: ModelConfig) -> Tensor:
    """RoPE of [T, heads, D] at positions 0 … T−1 with complex numbers, in float64."""
    half = model.head_size // 2
    frequencies = torch.tensor(model.rope.inverse_frequencies(model.head_size), dtype=torch.float32).double()
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    z = z * torch.polar(torch.ones_like(angles), sign * angles)[:, None]
    return torch.cat((z.real, z.imag), dim=-1)


def naive(
    model: ModelConfig, config: ShadowKVConfig, qkv: Tensor, sealed_at: int, top_k: int
) -> tuple[list[list[int]], Tensor]:
    """Selection and attention of the newest of the tokens [T, width] of a layer, sealed when it held ``sealed_at``."""
    assert config.rank is not None
    total, c, group = len(qkv), config.chunk_size, model.group
    q, plain, v = split_qkv(model, qkv)
    keys = turn(plain, 1, model)
    query = turn(q, 1, model)[-1]
    prompt_tokens = (sealed_at + 1 - config.window) // c * c
    sealed = (total - config.window) // c
    wide = plain.double().flatten(1)
    basis = torch.linalg.svd(wide[:prompt_tokens], full_matrices=True).Vh[: config.rank]
    rebuilt = turn((wide @ basis.T @ basis).view(total, model.num_kv_heads, -1), 1, model)
    choices, out = [], []
    for h in range(model.num_kv_heads):
        chunks = keys[: sealed * c, h].view(sealed, c, -1)
        means = chunks.mean(dim=1)
        cosine = torch.cosine_similarity(chunks, means[:, None], dim=-1).amin(dim=1)[: prompt_tokens // c]
        outliers = [0, *(cosine[1:].argsort()[: config.outliers - 1] + 1).tolist()]
        rest = [i for i in range(sealed) if i not in outliers]
        queries = query[h * group : (h + 1) * group] / math.sqrt(model.head_size)
        probability = (queries @ means[rest].T).softmax(dim=1).amax(dim=0)
        chosen = sorted(rest[i] for i in probability.argsort(descending=True)[:top_k].tolist())

        def tokens(ids: list[int]) -> Tensor:
            return torch.tensor([i * c + t for i in ids for t in range(c)], dtype=torch.int64)

        exact = torch.cat((tokens(outliers), torch.arange(sealed * c, total)))
        seen = torch.cat((keys[exact, h], rebuilt[tokens(chosen), h]))
        values = torch.cat((v[exact, h], v[tokens(chosen), h])).double()
        choices.append(chosen)
        out.append((queries @ seen.T).softmax(dim=1) @ values)
    return choices, torch.cat(out).flatten()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "grouped heads": ({}, {}, 61, 40),
    "one head a group, chunks of 16": ({"heads": 2, "kv_heads": 2}, {"chunk_size": 16, "dense_limit": 60}, 100, 40),
    "multi-query, odd sizes": ({"heads": 3, "kv_heads": 1, "head_size": 22}, {"window": 8, "top_k": 1}, 77, 30),
    "rank at its maximum": ({}, {"rank": 32, "top_k": 5, "outliers": 4}, 90, 20),
    "every chunk fits": ({}, {"top_k": 50}, 60, 20),
    "more outliers than chunks": ({}, {"outliers": 30}, 50, 30),
    "a short prompt that outgrows its limit": ({}, {}, 5, 80),
}


@pytest.mark.parametrize("name", CASES)
def test_naive_computation(name: str, make_state: MakeState) -> None:
    shape, changes, prompt_tokens, generated = CASES[name]
    model, config = make_model(layers=1, **shape), settings(**changes)
    qkv = make_qkv(model, prompt_tokens + generated, seed=5)
    state = make_state(model, config)
    steps = whole_row(state, qkv, prompt_tokens)[1:]
    sealed_at = max(prompt_tokens, config.dense_limit)
    for i, step in enumerate(steps):
        total = prompt_tokens + i + 1
        if total <= sealed_at:
            assert (step.selection == -1).all()
            continue
        chosen, out = naive(model, config, qkv[0, :total], sealed_at, config.top_k)
        assert [step.chosen(0, 0, h) for h in range(model.num_kv_heads)] == chosen
        assert torch.allclose(step.out[0, 0].double(), out, atol=2e-5)
    assert state.is_sealed(0) and state.length(0) == prompt_tokens + generated


def test_context_and_dense_steps_are_plain_attention(make_state: MakeState) -> None:
    model, config = make_model(layers=1, heads=6, kv_heads=2), settings()
    qkv = make_qkv(model, 70, seed=6)
    q, k, v = split_qkv(model, qkv[0])
    wide_q, wide_k = (turn(x, 1, model).transpose(0, 1) for x in (q, k))
    wide_v = v.transpose(0, 1).double()
    want = torch.nn.functional.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True, enable_gqa=True)
    state = make_state(model, config)
    state.allocate(0, prompt_tokens=50, total_tokens=70, top_k=3, dense=True)
    steps = [context(state, 0, qkv[:, :33], 0, False), context(state, 0, qkv[:, 33:34], 33, False)]
    steps += [context(state, 0, qkv[:, 34:50], 34, True)]
    steps += [generation(state, [0], qkv[:, i : i + 1]) for i in range(50, 70)]
    got = torch.cat([s.out[0] for s in steps])
    assert torch.allclose(got.double(), want.transpose(0, 1).flatten(1), atol=1e-5)
    assert all((s.selection == -1).all() for s in steps) and not state.is_sealed(0)


# --- promises ---------------------------------------------------------------------------------------------------------


def parts(state: AnyState, slot: int, layer: int, head: int) -> tuple[set[int], int]:
    """Outlier ids and the first token of the window, read off the state's own tables."""
    if isinstance(state, ReferenceState):
        row = state.rows[slot]
        sealed = row.layers[layer]
        first = row.published * state.config.chunk_size
        assert not any(torch.isnan(t).any() for t in row.pages.read(layer, first, row.length))
        return set(sealed.outliers[head].tolist()), first
    held = state.rows[slot].sealed
    assert held is not None and held.published * state.config.chunk_size == state.rows[slot].live.start
    return set(torch.isneginf(held.bias[layer, head]).nonzero().flatten().tolist()), state.rows[slot].live.start


@pytest.mark.parametrize(
    ("changes", "prompt_tokens"),
    [
        ({}, 64),
        ({"window": 8, "dense_limit": 15}, 3),
        ({"chunk_size": 16, "window": 16, "dense_limit": 31}, 130),
        ({"outliers": 40, "dense_limit": 23}, 24),
        ({"top_k": 40, "window": 64, "dense_limit": 100}, 71),
    ],
)
def test_no_chunk_is_lost_and_none_seen_twice(
    changes: dict[str, Any], prompt_tokens: int, make_state: MakeState
) -> None:
    """Values are the token's index as a one-hot vector, so that the output shows the weight of every token."""
    total = prompt_tokens + 70
    model, config = make_model(layers=1, head_size=256, rope=NO_ROTATION), settings(**changes)
    qkv = make_qkv(model, total, seed=7)
    _, _, v = split_qkv(model, qkv)
    v[0] = torch.eye(256)[:total, None]
    state = make_state(model, config)
    outliers_at_seal: dict[int, set[int]] = {}
    state.allocate(0, prompt_tokens=prompt_tokens, total_tokens=total, top_k=config.top_k, dense=False)
    prompt(state, 0, qkv[:, :prompt_tokens])
    for length in range(prompt_tokens + 1, total + 1):
        step = generation(state, [0], qkv[:, length - 1 : length])
        weight = step.out.view(2, 2, 256)  # KV head, query head, token
        assert torch.allclose(weight.sum(dim=-1), torch.ones(2, 2), atol=1e-5)
        if not state.is_sealed(0):
            assert length <= config.dense_limit and (weight[..., :length] > 0).all()
            continue
        published = config.sealed_chunks(length)
        for head in range(2):
            chosen = step.chosen(0, 0, head)
            outliers, first = parts(state, 0, 0, head)
            assert first == published * config.chunk_size
            assert config.window <= length - first < config.window + config.chunk_size
            assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(published)) - outliers
            assert len(chosen) == min(config.top_k, published - len(outliers))
            assert outliers_at_seal.setdefault(head, outliers) == outliers and 0 in outliers
            seen = [i * config.chunk_size + t for i in (*chosen, *outliers) for t in range(config.chunk_size)]
            seen = sorted([*seen, *range(first, length)])
            # Softmax weights fall below float32's reach only far out; none is that far here.
            assert (weight[head].amin(dim=0) > 0).nonzero().flatten().tolist() == seen
    assert state.statistics(0).sealed_tokens == config.sealed_chunks(total) * config.chunk_size


def test_weights_add_up_once(make_state: MakeState) -> None:
    """Equal scores give every attended token the same weight: a token seen twice would have twice as much."""
    model, config = make_model(layers=1, head_size=256, rope=NO_ROTATION), settings(dense_limit=50)
    qkv = make_qkv(model, 120, seed=8)
    q, _, v = split_qkv(model, qkv)
    q[:], v[0] = 0, torch.eye(256)[:120, None]
    state = make_state(model, config)
    for i, step in enumerate(whole_row(state, qkv, 60)[1:]):
        length = 61 + i
        # 2 outlier and 3 selected chunks, and the window
        seen = 5 * 8 + length - config.sealed_chunks(length) * 8
        weight = step.out.view(4, 256)
        assert torch.allclose(weight, (weight > 0).float() / seen, atol=1e-6)
        # Equal scores for all: the lowest ids that are no outliers.
        for head in range(2):
            outliers, _ = parts(state, 0, 0, head)
            assert step.chosen(0, 0, head) == [i for i in range(9) if i not in outliers][:3] and len(outliers) == 2


@pytest.mark.parametrize("head_size", [16, 64])
@pytest.mark.parametrize("heads", [2, 6])
def test_equal_keys_tie_and_ties_take_the_lower_id(heads: int, head_size: int, make_state: MakeState) -> None:
    model = make_model(layers=1, heads=heads, head_size=head_size, rope=NO_ROTATION)
    config = settings(top_k=9, outliers=4)
    qkv = make_qkv(model, 500, seed=9)
    q, k, _ = split_qkv(model, qkv)
    k[:] = k[:, :1].clone()
    # Few binary digits: a product is exact whatever its order, so that equal keys have equal scores.
    q[:], k[:] = (q * 16).round() / 16, (k * 16).round() / 16
    for prompt_tokens in (41, 470):
        state = make_state(model, config)
        for i, step in enumerate(whole_row(state, qkv[:, : prompt_tokens + 30], prompt_tokens)[1:]):
            sealed = config.sealed_chunks(prompt_tokens + i + 1)
            for head in range(2):
                # All cosines are 1 but for rounding, which the outliers may follow; the selection may not.
                outliers, _ = parts(state, 0, 0, head)
                assert step.chosen(0, 0, head) == [i for i in range(sealed) if i not in outliers][:9]


def test_zero_keys(make_state: MakeState) -> None:
    model, config = make_model(layers=1), settings()
    qkv = make_qkv(model, 90, seed=10)
    _, k, v = split_qkv(model, qkv)
    k[:] = 0
    state = make_state(model, config)
    for i, step in enumerate(whole_row(state, qkv, 70)[1:]):
        first = config.sealed_chunks(71 + i) * 8
        seen = torch.cat((v[0, :40], v[0, first : 71 + i]))  # outliers 0, 1, selected 2, 3, 4, and the window
        assert [step.chosen(0, 0, h) for h in range(2)] == [[2, 3, 4]] * 2
        assert torch.allclose(step.out.view(2, 2, 16), seen.mean(dim=0)[:, None].expand(2, 2, 16), atol=1e-6)
    assert state.statistics(0).residual is None or state.statistics(0).residual_lost == 0


def poisoned(model: ModelConfig, tokens: int, at: int, what: str) -> Tensor:
    qkv = make_qkv(model, tokens, seed=11)
    q, k, v = split_qkv(model, qkv)
    {"query": q, "key": k, "value": v}[what][:, at] = math.nan
    return qkv


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("at", [55, 62])  # in the window at first, then sealed; in a dense row and in a sealed one
def test_a_nan_stays_in_its_row(what: str, at: int, make_state: MakeState) -> None:
    model, config = make_model(), settings()
    bad, good = poisoned(model, 120, at, what), make_qkv(model, 120, seed=12)
    alone = whole_row(make_state(model, config), good, 50)[1:]
    state = make_state(model, config)
    for slot, dense in ((0, False), (1, False), (2, True), (3, True)):
        state.allocate(slot, prompt_tokens=50, total_tokens=120, top_k=3, dense=dense)
        prompt(state, slot, (good if slot == 1 else bad)[:, :50])
    for i in range(50, 120):
        both = torch.cat((bad[:, i : i + 1], good[:, i : i + 1], bad[:, i : i + 1]), dim=1)
        step = generation(state, [0, 1, 2], both)
        assert torch.equal(step.out[:, 1], alone[i - 50].out[:, 0])
        assert torch.equal(step.selection[:, 1], alone[i - 50].selection[:, 0])
        assert torch.isnan(step.out[:, 0]).any() or i < at or (what == "query" and i > at) or i >= at + 8
    assert state.statistics(1) == whole_statistics(make_state(model, config), good)


def whole_statistics(state: AnyState, qkv: Tensor) -> Any:
    whole_row(state, qkv, 50)
    return state.statistics(0)


def test_a_nan_chunk_comes_last_but_is_not_lost(make_state: MakeState) -> None:
    """It is sealed from the window with a landmark of NaN: never chosen while there are others, chosen when not."""
    model, config = make_model(layers=1), settings(top_k=5, outliers=1)
    qkv = poisoned(model, 90, 56, "key")
    state = make_state(model, config)
    for i, step in enumerate(whole_row(state, qkv, 50)[1:]):
        published = config.sealed_chunks(51 + i)
        for head in range(2):
            chosen = step.chosen(0, 0, head)
            assert len(chosen) == min(5, published - 1)
            assert 7 not in chosen
    state = make_state(model, settings(top_k=7, outliers=1))
    steps = whole_row(state, qkv, 50)[1:]
    sealed = [s for i, s in enumerate(steps) if config.sealed_chunks(51 + i) == 8]
    assert sealed and all(s.chosen(0, 0, 0) == [1, 2, 3, 4, 5, 6, 7] for s in sealed)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_overflow(sign: float, make_state: MakeState) -> None:
    """A landmark of 3e38: its score is ±∞. Where it is −∞ the chunk comes last; a head with +∞ has no scores."""
    model, config = make_model(layers=1, heads=2, rope=NO_ROTATION), settings(top_k=2, outliers=1)
    qkv = make_qkv(model, 100, seed=13)
    q, k, _ = split_qkv(model, qkv)
    q[:] = 50 * sign
    k[:, 56:64] = 3e37  # chunk 7, sealed when it leaves the window
    state = make_state(model, config)
    reference = ReferenceState(model, config)
    got, want = whole_row(state, qkv, 50)[1:], whole_row(reference, qkv, 50)[1:]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a.selection, b.selection)
        if config.sealed_chunks(51 + i) > 7:
            assert a.chosen(0, 0, 0) == [1, 2] if sign > 0 else 7 not in a.chosen(0, 0, 0)


def test_heads_without_scores_do_not_outrank_those_with(make_state: MakeState) -> None:
    """Of the group's two query heads one has only −∞ and NaN to show: the other decides."""
    model, config = make_model(layers=1, rope=NO_ROTATION), settings(top_k=2, outliers=1)
    qkv = make_qkv(model, 100, seed=14)
    q, k, _ = split_qkv(model, qkv)
    q[:, 50:, ::2] = torch.nn.functional.one_hot(torch.tensor(0), 16) * -3e38  # −∞ with any landmark
    k[:, :, :, 0] = 100.0
    k[:, 56, 0, 1] = math.nan
    state, reference = make_state(model, config), ReferenceState(model, config)
    got, want = whole_row(state, qkv, 50)[1:], whole_row(reference, qkv, 50)[1:]
    assert all(torch.equal(a.selection, b.selection) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rotation", [None, NO_ROTATION])
def test_the_size_of_the_cache_changes_no_bit(rotation: Any, make_state: MakeState) -> None:
    for shape in ({}, {"heads": 3, "kv_heads": 3, "head_size": 64}, {"heads": 6, "kv_heads": 1, "head_size": 34}):
        model = make_model(rope=rotation, **shape)
        qkv, results = make_qkv(model, 180, seed=15), []
        for factor in (1, 2, 8):
            state = make_state(model, settings(top_k=6, cache_factor=factor))
            steps = whole_row(state, qkv, 150)
            results.append((steps, state.statistics(0)))
        for steps, statistics in results[1:]:
            for one, other in zip(steps, results[0][0], strict=True):
                assert torch.equal(one.out, other.out) and torch.equal(one.selection, other.selection)
            assert statistics.misses < results[0][1].misses
            assert statistics.hits + statistics.misses == results[0][1].hits + results[0][1].misses


def test_neighbours_change_no_bit(make_state: MakeState) -> None:
    model, config = make_model(), settings()
    rows = {slot: make_qkv(model, 100, seed=20 + slot) for slot in range(3)}
    alone = {s: whole_row(make_state(model, config), qkv, 30 + 20 * s)[1:] for s, qkv in rows.items()}
    state = make_state(model, config)
    for slot, qkv in rows.items():
        state.allocate(slot, prompt_tokens=30 + 20 * slot, total_tokens=100, top_k=3, dense=False)
        prompt(state, slot, qkv[:, : 30 + 20 * slot])
    for i in range(30):
        slots = [[2, 0, -1, 1], [1, 2, 0, -1], [-1, -1, 0, 1, 2]][i % 3]
        at = {s: 30 + 20 * s + i for s in range(3)}
        qkv = torch.stack([torch.full_like(rows[0][:, 0], 7.0) if s < 0 else rows[s][:, at[s]] for s in slots], dim=1)
        step = generation(state, slots, qkv)
        for b, slot in enumerate(slots):
            if slot < 0:
                assert not step.out[:, b].any() and not step.query[:, b].any() and (step.selection[:, b] == -1).all()
            else:
                assert torch.equal(step.out[:, b], alone[slot][i].out[:, 0])
                assert torch.equal(step.selection[:, b], alone[slot][i].selection[:, 0])


def sealed_parts(state: AnyState, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Landmarks [L, Hkv, n, D], outlier flags [L, Hkv, n] and A·B [L, n·C, Hkv·D] of a sealed prompt."""
    if isinstance(state, ReferenceState):
        row = state.rows[slot]
        means = torch.stack([s.means for s in row.layers])
        flags = torch.zeros(means.shape[:3], dtype=torch.bool)
        for layer, sealed in enumerate(row.layers):
            flags[layer].scatter_(1, sealed.outliers, True)
        return means, flags, torch.stack([s.coordinates @ s.basis for s in row.layers])
    held = state.rows[slot].sealed
    assert held is not None
    n = held.published
    basis = held.basis.transpose(1, 2).flatten(2)
    return held.means[:, :, :n], torch.isneginf(held.bias[:, :, :n]), held.coordinates[:, :n].flatten(1, 2) @ basis


@pytest.mark.parametrize("tokens", [1024, 1025, 1001])
def test_stretches_change_nothing(tokens: int, make_state: MakeState) -> None:
    model = make_model(layers=1)
    config = settings(dense_limit=64, outliers=12)
    qkv = make_qkv(model, tokens + 1, seed=16)
    results = []
    for stretch in (None, 1000, 64):
        state = make_state(model, config)
        state.allocate(0, prompt_tokens=tokens, total_tokens=tokens + 1, top_k=3, dense=False)
        last = prompt(state, 0, qkv[:, :tokens], stretch)
        state.seal_prompt(0)
        results.append((last.out[:, -1], sealed_parts(state, 0), generation(state, [0], qkv[:, tokens:])))
    for out, (means, outliers, keys), step in results[1:]:
        assert torch.allclose(out, results[0][0], atol=1e-5)
        assert torch.allclose(means, results[0][1][0], atol=1e-6)
        assert torch.equal(outliers, results[0][1][1])
        assert torch.allclose(keys, results[0][1][2], atol=1e-4)
        assert torch.equal(step.selection, results[0][2].selection)
        assert torch.allclose(step.out, results[0][2].out, atol=1e-4)


def test_full_rank_and_budget_are_dense_attention(make_state: MakeState) -> None:
    """A row that outgrows its limit, far beyond it, beside a dense row of the same tokens."""
    model, config = make_model(heads=6), settings(rank=32, top_k=100)
    qkv = make_qkv(model, 240, seed=17)
    state = make_state(model, config)
    for slot, dense in ((0, False), (1, True)):
        state.allocate(slot, prompt_tokens=9, total_tokens=240, top_k=100, dense=dense)
        prompt(state, slot, qkv[:, :9])
    for i in range(9, 240):
        step = generation(state, [0, 1], qkv[:, [i, i]])
        assert torch.allclose(step.out[:, 0], step.out[:, 1], atol=1e-4)
    assert state.is_sealed(0) and not state.is_sealed(1)
    statistics = state.statistics(0)
    assert statistics.sealed_tokens == 224 and statistics.generated_sealed == 224 - 24
    assert statistics.residual is not None and statistics.residual < 1e-6


def test_the_residual_is_what_the_prompts_subspace_lacks(make_state: MakeState) -> None:
    """Prompt keys in a plane of 16 dimensions, generated keys with 3/5 of their length in it."""
    model, config = make_model(layers=1, heads=2), settings()
    qkv = make_qkv(model, 120, seed=18)
    _, k, _ = split_qkv(model, qkv)
    k[:, :60, 1] = 0
    k[:, 60:] = 4 * torch.nn.functional.normalize(k[:, 60:], dim=-1)
    k[:, 60:, 0] *= 0.75  # 3 in the plane, 4 outside
    state = make_state(model, config)
    whole_row(state, qkv, 60)
    statistics = state.statistics(0)
    tokens = statistics.generated_sealed
    assert tokens == (120 - 16) // 8 * 8 - (61 - 16) // 8 * 8
    # Tokens 40 to 59 were in the window when the prompt was sealed and lie in the plane.
    outside, inside = tokens - 20, float(k[0, 40:60, 0].square().sum())
    assert statistics.residual_lost == pytest.approx(16 * outside, rel=1e-4)
    assert statistics.residual_total == pytest.approx(25 * outside + inside, rel=1e-4)


# --- the contract -----------------------------------------------------------------------------------------------------


def assert_works(state: AnyState, model: ModelConfig, slot: int) -> None:
    """After whatever was refused, a new row gives what it gives in a new state."""
    qkv = make_qkv(model, 70, seed=30)
    fresh = ReferenceState(model, state.config)
    got, want = whole_row(state, qkv, 55, slot=slot), whole_row(fresh, qkv, 55)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.out, b.out, atol=1e-5) and torch.equal(a.selection, b.selection)
    state.release(slot)


def test_slots_are_given_once(make_state: MakeState) -> None:
    model = make_model()
    state = make_state(model, settings())
    state.allocate(3, prompt_tokens=5, total_tokens=9, top_k=3, dense=False)
    for slot in (3, -1, -2):
        with pytest.raises(StateError, match=f"slot {slot}"):
            state.allocate(slot, prompt_tokens=5, total_tokens=9, top_k=3, dense=False)
    state.release(3)
    state.release(3)
    state.release(99)
    assert_works(state, model, 3)


def test_passes_that_are_refused(make_state: MakeState) -> None:
    model = make_model()
    state, qkv = make_state(model, settings()), make_qkv(model, 60, seed=31)
    state.allocate(0, prompt_tokens=30, total_tokens=60, top_k=3, dense=False)
    state.allocate(1, prompt_tokens=30, total_tokens=60, top_k=3, dense=False)
    prompt(state, 1, qkv[:, :30])
    context(state, 0, qkv[:, :10], 0, False)
    refused: list[tuple[Any, ...]] = [
        ("context", [0], 0, 10, False),  # again
        ("context", [0], 11, 5, False),  # a gap
        ("context", [0], 9, 5, False),  # an overlap
        ("context", [0], 10, 0, False),
        ("context", [0], 10, -1, False),
        ("context", [0, 1], 10, 5, False),
        ("context", [1], 30, 5, False),  # its prompt is done
        ("context", [7], 0, 5, False),  # nobody's slot
        ("context", [-1], 0, 5, False),
        ("context", [], 0, 5, False),
        ("generation", [0], 0, 1, False),  # its prompt is not done
        ("generation", [1, 0], 0, 1, False),
        ("generation", [1, 1], 0, 1, False),
        ("generation", [1, 7], 0, 1, False),
        ("generation", [-2], 0, 1, False),
    ]
    for call in refused:
        with pytest.raises(StateError):
            state.begin_pass(*call)
    assert state.length(0) == 10 and state.length(1) == 30
    context(state, 0, qkv[:, 10:30], 10, True)
    a = generation(state, [1, 0], qkv[:, [30, 30]])
    assert torch.allclose(a.out[:, 0], a.out[:, 1], atol=1e-5)
    state.release(1)
    with pytest.raises(StateError):
        state.begin_pass("generation", [1, 0], 0, 1, False)
    assert_works(state, model, 1)


def test_a_row_over_its_limit_waits_for_its_seal(make_state: MakeState) -> None:
    model, config = make_model(), settings()
    state, qkv = make_state(model, config), make_qkv(model, 60, seed=32)
    state.allocate(0, prompt_tokens=39, total_tokens=60, top_k=3, dense=False)
    context(state, 0, qkv[:, :20], 0, False)
    with pytest.raises(StateError):
        state.seal_prompt(0)  # its prompt is not done
    context(state, 0, qkv[:, 20:39], 20, True)
    assert not state.must_seal(0)
    with pytest.raises(StateError):
        state.seal_prompt(0)  # token 40 is within its limit
    generation(state, [0], qkv[:, 39:40])
    assert state.must_seal(0) and not state.is_sealed(0)
    with pytest.raises(StateError):
        state.begin_pass("generation", [0], 0, 1, False)
    assert state.length(0) == 40
    state.seal_prompt(0)
    assert state.is_sealed(0) and not state.must_seal(0)
    with pytest.raises(StateError):
        state.seal_prompt(0)
    generation(state, [0], qkv[:, 40:41])
    assert_works(state, model, 1)


def test_a_dense_row_is_never_sealed(make_state: MakeState) -> None:
    model = make_model()
    for config, dense in ((settings(), True), (settings(attention="dense"), False)):
        state, qkv = make_state(model, config), make_qkv(model, 60, seed=33)
        whole_row(state, qkv, 50, dense=dense)
        assert not state.must_seal(0) and not state.is_sealed(0)
        with pytest.raises(StateError):
            state.seal_prompt(0)


def test_unknown_slots(make_state: MakeState) -> None:
    state = make_state(make_model(), settings())
    for call in (state.length, state.is_sealed, state.must_seal, state.seal_prompt, state.statistics):
        with pytest.raises((StateError, KeyError)):
            call(5)


@pytest.mark.parametrize("kind", ["context", "generation"])
def test_ops_that_do_not_match_their_pass(kind: str, make_state: MakeState) -> None:
    model = make_model()
    state, qkv = make_state(model, settings()), make_qkv(model, 60, seed=34)
    for slot in (0, 1):
        state.allocate(slot, prompt_tokens=50, total_tokens=60, top_k=3, dense=False)
    want = prompt(state, 1, qkv[:, :50])
    state.seal_prompt(1)
    if kind == "context":
        state.begin_pass("context", [0], 0, 50, True)
        tokens, positions, slots = qkv[:, :50], list(range(50)), [0]
        wrong_positions = [list(range(1, 51)), [*range(49), 0], [0] * 50]
        wrong_slots = [[1], [-1], [0, 1], []]
    else:
        prompt(state, 0, qkv[:, :50])
        state.seal_prompt(0)
        state.begin_pass("generation", [1, -1, 0], 0, 1, False)
        state.step_prologue()
        tokens, positions, slots = qkv[:, [50, 50, 50]], [50, 0, 50], [1, -1, 0]
        wrong_positions = [[51, 0, 51], [50, 0, 49], [0, 0, 0]]
        wrong_slots = [[0, -1, 1], [1, 0, -1], [1, -1], [1, -1, -1]]
    for bad in wrong_positions:
        with pytest.raises(StateError):
            run_ops(state, tokens, bad, slots)
    for rows in wrong_slots:
        with pytest.raises(StateError):
            run_ops(state, tokens, positions, rows)
    step = run_ops(state, tokens, positions, slots)  # nothing was spoilt
    if kind == "context":
        assert torch.equal(step.out, want.out)
    else:
        assert torch.equal(step.out[:, 0], step.out[:, 2])


def test_a_slot_that_was_released_forgets(make_state: MakeState) -> None:
    model, config = make_model(), settings()
    state = make_state(model, config)
    for seed, tokens in ((35, 80), (36, 45), (37, 120)):
        qkv = make_qkv(model, tokens, seed)
        got = whole_row(state, qkv, tokens - 15)
        want = whole_row(make_state(model, config), qkv, tokens - 15)
        assert all(torch.equal(a.out, b.out) for a, b in zip(got, want, strict=True))
        state.release(0)


def test_rows_may_ask_for_fewer_chunks(make_state: MakeState) -> None:
    model, config = make_model(), settings(top_k=6)
    qkv = make_qkv(model, 150, seed=38)
    steps = whole_row(make_state(model, config), qkv, 120, top_k=2)[1:]
    want = whole_row(ReferenceState(model, settings(top_k=2)), qkv, 120)[1:]
    for a, b in zip(steps, want, strict=True):
        assert torch.equal(a.selection[..., :2], b.selection) and (a.selection[..., 2:] == -1).all()
        assert torch.allclose(a.out, b.out, atol=1e-5)
    for top_k in (0, -1, 7):
        with pytest.raises(StateError, match="top_k"):
            make_state(model, config).allocate(0, prompt_tokens=9, total_tokens=9, top_k=top_k, dense=False)


def test_the_margin_of_a_choice() -> None:
    """The driver's own measure: it must see a tie, and no tie where there is none."""
    model, config = make_model(layers=1, rope=NO_ROTATION), settings()
    for tied in (False, True):
        qkv = make_qkv(model, 101, seed=39)
        q, _, _ = split_qkv(model, qkv)
        if tied:
            q[:, 100] = 0
        state = ReferenceState(model, config)
        steps: list[Step] = whole_row(state, qkv, 100)
        assert (margin(state, [0], steps[-1]) < 1e-7) == tied
