"""The fast state against the reference state on random traffic, its memory to the byte, and the value pool."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.driver import (
    Step,
    context,
    generation,
    make_model,
    make_qkv,
    margin,
    prompt,
    split_qkv,
    whole_row,
)
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.runtime.executors.cpu_rows import Row
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.state import Footprint, RowStatistics
from trtllm_shadowkv.runtime.value_pool import ValuePool

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**changes: Any) -> ShadowKVConfig:
    return ShadowKVConfig(**{"rank": 16, "top_k": 3, "outliers": 2, "window": 16, "dense_limit": 40, **changes})


def make_state(model: ModelConfig, config: ShadowKVConfig, capacity: int = 1 << 28) -> CpuState:
    return CpuState(model, config, ValuePool(capacity))


# --- against the reference --------------------------------------------------------------------------------------------


def random_setting(seed: int) -> tuple[ModelConfig, ShadowKVConfig]:
    rng = random.Random(seed)
    heads, kv_heads, head_size = rng.choice([(4, 4, 8), (3, 1, 16), (8, 2, 16), (6, 2, 10), (9, 3, 6), (2, 1, 64)])
    chunk = rng.choice([8, 8, 16])
    window = chunk * rng.choice([1, 1, 2, 3])
    rank = rng.choice([r for r in (16, 32, 64) if r <= kv_heads * head_size])
    config = ShadowKVConfig(
        chunk_size=chunk,
        rank=rank,
        top_k=rng.choice([1, 2, 3, 5, 9]),
        outliers=rng.choice([1, 2, 4, 50]),
        window=window,
        # A rank above the sealed prompt's tokens would leave B's last rows to the solver, and nothing to compare.
        dense_limit=window + rank - 1 + rng.choice([0, 1, 5, 30]),
        cache_factor=rng.choice([1, 2, 4]),
    )
    return make_model(layers=rng.choice([1, 2, 3]), heads=heads, kv_heads=kv_heads, head_size=head_size), config


@dataclass
class Life:
    """One row: its tokens, where it stands."""

    qkv: Tensor
    prompt_tokens: int
    stretch: int
    at: int = 0


@dataclass
class Trace:
    """Everything a state let out: the steps of all passes, each row's statistics, and the closest choice."""

    steps: list[Step] = field(default_factory=list)
    statistics: list[RowStatistics] = field(default_factory=list)
    closest: float = math.inf


def traffic(state: ReferenceState | CpuState, seed: int, passes: int = 60) -> Trace:
    """Rows come, are prefilled between the steps of others, pause, and go; what happens depends on ``seed`` alone."""
    rng, trace, rows = random.Random(seed), Trace(), dict[int, Life]()
    model, config = state.model, state.config
    lengths = [7, *(config.dense_limit + more for more in (-20, -1, 0, 1, 25, 60))]
    for number in range(passes):
        free = [s for s in range(4) if s not in rows]
        if free and rng.random() < 0.5:
            prompt_tokens, new = rng.choice(lengths), rng.choice([1, 5, 40, 60])
            slot, total = rng.choice(free), prompt_tokens + new
            rows[slot] = Life(make_qkv(model, total, seed * 1000 + number), prompt_tokens, rng.choice([1000, 64, 29]))
            state.allocate(
                slot,
                prompt_tokens=prompt_tokens,
                total_tokens=total,
                top_k=rng.randint(1, config.top_k),
                dense=rng.random() < 0.2,
            )
        for slot, row in rows.items():
            if row.at < row.prompt_tokens:
                end = min(row.at + row.stretch, row.prompt_tokens)
                trace.steps.append(context(state, slot, row.qkv[:, row.at : end], row.at, end == row.prompt_tokens))
                row.at = end
                break
        ready = [s for s, r in rows.items() if r.at >= r.prompt_tokens and rng.random() < 0.9]
        slots = rng.sample(ready, len(ready)) + [-1] * rng.choice([0, 0, 1, 2])
        rng.shuffle(slots)
        if slots:
            padding = torch.full((model.num_layers, split_width(model)), math.nan)  # read by nobody
            qkv = torch.stack([padding if s < 0 else rows[s].qkv[:, rows[s].at] for s in slots], dim=1)
            step = generation(state, slots, qkv)
            trace.steps.append(step)
            if isinstance(state, ReferenceState):
                trace.closest = min(trace.closest, margin(state, slots, step))
        for slot in slots:
            if slot < 0:
                continue
            rows[slot].at += 1
            if rows[slot].at == rows[slot].qkv.shape[1] or rng.random() < 0.01:
                trace.statistics.append(replace(state.statistics(slot)))
                state.release(slot)
                del rows[slot]
    for slot in rows:
        trace.statistics.append(replace(state.statistics(slot)))
        state.release(slot)
    return trace


def split_width(model: ModelConfig) -> int:
    return (model.num_heads + 2 * model.num_kv_heads) * model.head_size


@pytest.mark.parametrize("seed", range(24))
def test_random_traffic(seed: int) -> None:
    model, config = random_setting(seed)
    while True:
        want = traffic(ReferenceState(model, config, pages=64), seed)
        if want.closest > 1e-4 and any(s.generated_sealed for s in want.statistics):
            break
        seed += 1000  # two scores too close to tell which is better, or too little to see: other numbers
    state = make_state(model, config)
    got = traffic(state, seed)
    assert len(got.steps) == len(want.steps)
    for a, b in zip(got.steps, want.steps, strict=True):
        assert torch.equal(a.selection, b.selection)
        assert torch.allclose(a.query, b.query, atol=1e-5)
        assert torch.allclose(a.out, b.out, atol=5e-5)
    for one, other in zip(got.statistics, want.statistics, strict=True):
        for f in fields(RowStatistics):
            assert getattr(one, f.name) == pytest.approx(getattr(other, f.name), rel=1e-4, abs=1e-6), f.name
        assert isinstance(one.hits, int) and one.hits == other.hits and one.misses == other.misses
    assert state.values.used == 0


def test_a_long_row_whose_window_moves_many_times() -> None:
    """Longer than the window's buffer, with a rotary table that grows on the way."""
    model, config = make_model(layers=1, heads=2, kv_heads=1), settings(chunk_size=16, window=16, cache_factor=2)
    qkv = make_qkv(model, 1500, seed=50)
    reference = ReferenceState(model, config)
    got, want = whole_row(make_state(model, config), qkv, 45), whole_row(reference, qkv, 45)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.selection, b.selection) and torch.allclose(a.out, b.out, atol=2e-5)


def test_positions_beyond_the_first_rotary_table() -> None:
    """A prompt of 5,000 tokens; chunks of 16 at every place of a table of no round length."""
    model, config = make_model(layers=1, heads=2, kv_heads=1), settings(chunk_size=16, top_k=40, window=16)
    qkv = make_qkv(model, 5003, seed=51)
    got = whole_row(make_state(model, config), qkv, 5000, top_k=40)
    want = whole_row(ReferenceState(model, config), qkv, 5000, top_k=40)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.selection, b.selection) and torch.allclose(a.out, b.out, atol=2e-5)


# --- memory -----------------------------------------------------------------------------------------------------------


def tensors_of(thing: Any) -> list[Tensor]:
    """Every tensor a row holds, each once."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, (list, tuple)):
        return [t for item in thing for t in tensors_of(item)]
    return [t for item in vars(thing).values() for t in tensors_of(item)] if hasattr(thing, "__dict__") else []


def held(row: Row) -> Footprint:
    """What a row really holds; the indices of one step's chunks are scratch."""
    live = sum(t.untyped_storage().nbytes() for t in tensors_of(row.live))
    if row.sealed is None:
        return Footprint(live, 0, 0)
    host = row.sealed.values.untyped_storage().nbytes()
    parts = tensors_of([v for k, v in vars(row.sealed).items() if k not in ("values", "cache_rows")])
    return Footprint(0, live + sum(t.untyped_storage().nbytes() for t in parts), host)


FOOTPRINTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "long prompt": ({}, 300, 340),
    "outgrows its limit": ({}, 10, 200),
    "one token over": ({}, 40, 41),
    "no new token": ({}, 80, 80),
    "chunks of 16, rank 32": ({"chunk_size": 16, "rank": 32, "window": 32, "dense_limit": 70}, 150, 250),
    "cache larger than the row": ({"top_k": 50, "cache_factor": 4}, 200, 210),
    "wide window": ({"window": 512, "dense_limit": 600}, 100, 1000),
}


@pytest.mark.parametrize("name", FOOTPRINTS)
def test_the_footprint_is_what_is_held(name: str) -> None:
    changes, prompt_tokens, total = FOOTPRINTS[name]
    model, config = make_model(heads=6, kv_heads=2), settings(**changes)
    state, qkv = make_state(model, config), make_qkv(model, total, seed=52)
    need = state.footprint(prompt_tokens, total, dense=False)
    state.allocate(0, prompt_tokens=prompt_tokens, total_tokens=total, top_k=config.top_k, dense=False)
    assert held(state.rows[0]) == Footprint(need.live, 0, 0)
    prompt(state, 0, qkv[:, :prompt_tokens])
    assert held(state.rows[0]) == Footprint(need.live, 0, 0)
    for i in range(prompt_tokens, total):
        generation(state, [0], qkv[:, i : i + 1])
        assert held(state.rows[0]) == (
            Footprint(0, need.sealed, need.host) if state.is_sealed(0) else Footprint(need.live, 0, 0)
        )
    if total > config.dense_limit:
        if not state.is_sealed(0):
            state.seal_prompt(0)
        assert held(state.rows[0]) == Footprint(0, need.sealed, need.host) and state.values.used == need.host > 0
    state.release(0)
    assert state.values.used == 0


def test_the_footprint_of_a_dense_row() -> None:
    model = make_model()
    for config, dense in ((settings(), True), (settings(attention="dense"), False), (settings(dense_limit=300), False)):
        state = make_state(model, config)
        assert state.footprint(20, 300, dense) == Footprint(2 * 300 * 2 * 32 * 4, 0, 0)
        state.allocate(0, prompt_tokens=20, total_tokens=300, top_k=3, dense=dense)
        assert held(state.rows[0]) == state.footprint(20, 300, dense)


def test_fewer_outliers_than_configured_never_take_more_than_reserved() -> None:
    """A row that is sealed while it has fewer chunks than outliers, and grows far beyond that."""
    model, config = make_model(), settings(outliers=20)
    state, qkv = make_state(model, config), make_qkv(model, 400, seed=53)
    whole_row(state, qkv, 5)
    need, have = state.footprint(5, 400, dense=False), held(state.rows[0])
    assert have.sealed <= need.sealed and have.host == need.host


def test_the_pool_gives_back_everything() -> None:
    model, config = make_model(), settings()
    state, qkv = make_state(model, config), make_qkv(model, 70, seed=54)
    size = state.footprint(60, 70, dense=False).host
    for slot in range(3):
        whole_row(state, qkv, 60, slot=slot)
        assert state.values.used == (slot + 1) * size
    for slot in (1, 0, 2, 2):
        state.release(slot)
    assert state.values.used == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_prompt_that_cannot_be_sealed_takes_nothing(bad: float) -> None:
    model, config = make_model(), settings()
    state, qkv, good = make_state(model, config), make_qkv(model, 70, seed=55), make_qkv(model, 70, seed=56)
    _, k, _ = split_qkv(model, qkv)
    k[1, 17, 1, 3] = bad  # of the second layer, after the first was factorised
    for slot, tokens in ((0, qkv), (1, good)):
        state.allocate(slot, prompt_tokens=60, total_tokens=70, top_k=3, dense=False)
        prompt(state, slot, tokens[:, :60])
    for _ in range(2):
        with pytest.raises(StateError, match="NaN or infinity"):
            state.seal_prompt(0)
        assert state.values.used == 0 and state.must_seal(0) and not state.is_sealed(0)
        assert state.statistics(0) == RowStatistics()
    want = whole_row(make_state(model, config), good, 60)
    got = [generation(state, [1], good[:, i : i + 1]) for i in range(60, 70)]
    assert all(torch.equal(a.out, b.out) for a, b in zip(got, want[1:], strict=True))
    state.release(0)
    state.release(1)
    assert state.values.used == 0


def test_a_pool_that_is_too_small_refuses_and_stays_whole() -> None:
    model, config = make_model(), settings()
    qkv = make_qkv(model, 70, seed=57)
    size = make_state(model, config).footprint(60, 70, dense=False).host
    state = make_state(model, config, capacity=2 * size - 1)
    whole_row(state, qkv, 60)
    state.allocate(1, prompt_tokens=60, total_tokens=70, top_k=3, dense=False)
    prompt(state, 1, qkv[:, :60])
    with pytest.raises(StateError, match="value pool"):
        state.seal_prompt(1)
    assert state.values.used == size and not state.is_sealed(1)
    state.release(0)
    generation(state, [1], qkv[:, 60:61])
    assert state.is_sealed(1) and state.values.used == size


def test_the_pool_by_itself() -> None:
    pool = ValuePool(1000)
    one = pool.take(5, 10)
    assert one.shape == (5, 10) and one.dtype == torch.float32 and pool.used == 200
    with pytest.raises(StateError, match="800 are free"):
        pool.take(201)
    other = pool.take(200)
    assert pool.used == 1000
    pool.give(one)
    pool.give(other)
    assert pool.used == 0
    assert pool.take(0).numel() == 0 and pool.used == 0


# --- the contract, where it is more than the reference asks -----------------------------------------------------------


def test_a_row_takes_no_more_tokens_than_it_was_given() -> None:
    model, config = make_model(), settings()
    qkv = make_qkv(model, 80, seed=58)
    for prompt_tokens, total, dense in ((50, 60, False), (20, 30, False), (50, 60, True)):
        state = make_state(model, config)
        state.allocate(0, prompt_tokens=prompt_tokens, total_tokens=total, top_k=3, dense=dense)
        with pytest.raises(StateError, match=f"at most {prompt_tokens}"):
            state.begin_pass("context", [0], 0, prompt_tokens + 1, True)
        assert state.length(0) == 0
        prompt(state, 0, qkv[:, :prompt_tokens])
        steps = [generation(state, [0], qkv[:, i : i + 1]) for i in range(prompt_tokens, total)]
        with pytest.raises(StateError, match="full"):
            state.begin_pass("generation", [0], 0, 1, False)
        assert state.length(0) == total
        want = whole_row(make_state(model, config), qkv[:, :total], prompt_tokens, dense=dense)[1:]
        assert all(torch.equal(a.out, b.out) for a, b in zip(steps, want, strict=True))


def test_a_full_row_does_not_stop_the_others() -> None:
    model, config = make_model(), settings()
    state, qkv = make_state(model, config), make_qkv(model, 80, seed=59)
    for slot, total in ((0, 51), (1, 80)):
        state.allocate(slot, prompt_tokens=50, total_tokens=total, top_k=3, dense=False)
        prompt(state, slot, qkv[:, :50])
    generation(state, [0, 1], qkv[:, [50, 50]])
    with pytest.raises(StateError, match="full"):
        generation(state, [0, 1], qkv[:, [51, 51]])
    assert state.length(1) == 51
    state.release(0)
    want = whole_row(make_state(model, config), qkv, 50)[2:]
    got = [generation(state, [-1, 1], qkv[:, [i, i]]) for i in range(51, 80)]
    assert all(torch.equal(a.out[:, 1], b.out[:, 0]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_memory_that_was_never_written_is_never_read(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """New buffers hold whatever lay there before: here the worst that can."""
    model, config = make_model(), settings(outliers=30, cache_factor=4)
    qkv = make_qkv(model, 150, seed=60)
    want = whole_row(make_state(model, config), qkv, 60)
    real: Callable[..., Tensor] = torch.empty

    def hostile(*size: Any, **options: Any) -> Tensor:
        out = real(*size, **options)
        return out.fill_(fill) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", hostile)
    got = whole_row(make_state(model, config), qkv, 60)
    assert all(torch.equal(a.out, b.out) for a, b in zip(got, want, strict=True))
