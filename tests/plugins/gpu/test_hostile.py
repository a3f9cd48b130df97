"""Values and shapes that break careless kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.plugins.gpu.device import DEVICE, synchronize
from tests.plugins.gpu.oracle import check_cache, check_selection, check_step, expected_attention
from tests.plugins.gpu.rig import Rig, Shape
from tests.plugins.gpu.test_batch import FP8, SHAPE, generator_of, same
from tests.plugins.gpu.test_decode_step import qkv_for

WHOLE = replace(SHAPE, rotation=False)


def test_rows_of_every_length_in_one_batch(generator: torch.Generator) -> None:
    lengths = [1, 7, 8, 300, 512, 513, 519, 520, 577, 1_023, 4_095, 5_000, 20_001, 65_537, 131_071]
    with Rig(FP8, rows=len(lengths), tokens=131_080) as rig:
        for slot, length in enumerate(lengths):
            rig.fill(slot, length, length + 9, generator)
        slots = list(range(len(lengths)))
        for step in range(9):
            results = rig.step(slots, qkv_for(rig, len(slots), generator))
            if step in (0, 8):
                check_step(rig, slots, *results)


@pytest.mark.parametrize("shape", [WHOLE, replace(WHOLE, top_k=300, chunk=16)], ids=["8", "16"])
def test_equal_keys_take_the_lowest_ids(shape: Shape, generator: torch.Generator) -> None:
    def ones(*size: int) -> Tensor:
        return torch.ones(size, device=DEVICE)

    with Rig(shape, rows=2, tokens=8_192) as rig:
        rig.fill(0, 8_000, 8_020, generator, keys=ones)
        q, selection, out = rig.step([0], qkv_for(rig, 1, generator))
        for layer in range(shape.layers):
            check_selection(rig, layer, 0, q[layer, 0], selection[layer, 0], exact=True)
        check_step(rig, [0], q, selection, out)


def test_ties_between_blocks_of_chunks_take_the_lowest_ids(generator: torch.Generator) -> None:
    def few(*size: int) -> Tensor:
        return torch.randint(0, 2, (*size[:-1], 1), generator=generator, device=DEVICE).float().expand(size).clone()

    with Rig(WHOLE, rows=1, tokens=32_768) as rig:
        rig.fill(0, 32_000, 32_100, generator, keys=few)
        for _ in range(5):
            x = torch.randint(-3, 4, (2, 1, 12 * 128), generator=generator, device=DEVICE).float()
            q, selection, out = rig.step([0], x)
            for layer in range(2):
                check_selection(rig, layer, 0, q[layer, 0], selection[layer, 0], exact=True)
            check_step(rig, [0], q, selection, out)


@pytest.mark.parametrize("scale", [1e-20, 1e-4, 30.0, 1e4])
@pytest.mark.parametrize("values", ["element", "e4m3"])
def test_magnitudes(scale: float, values: str, generator: torch.Generator) -> None:
    shape = replace(SHAPE, values=values, landmarks=values)
    with Rig(shape, rows=1, tokens=4_096) as rig:
        rig.fill(0, 4_000, 4_040, generator, key_scale=min(scale, 30.0), value_scale=scale)
        for step in range(20):
            results = rig.step([0], qkv_for(rig, 1, generator))
            if step in (0, 1, 19):
                check_step(rig, [0], *results)


def test_values_of_very_different_scales_in_one_head(generator: torch.Generator) -> None:
    with Rig(FP8, rows=1, tokens=4_096) as rig:
        rig.fill(0, 4_000, 4_040, generator)
        assert rig.memory.value_scales is not None
        exponents = torch.randint(-100, 100, rig.memory.value_scales.shape, generator=generator, device=DEVICE).float()
        rig.memory.value_scales.copy_(torch.exp2(exponents))
        for _ in range(5):
            q, selection, out = rig.step([0], qkv_for(rig, 1, generator))
            for layer in range(2):
                right = expected_attention(rig, layer, 0, q[layer, 0], selection[layer, 0])
                found = out[layer, 0].unflatten(0, (8, -1)).double()
                assert ((found - right).norm(dim=1) <= 1e-2 * right.norm(dim=1)).all()


@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["16-bit", "e4m3"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_in_one_row_stay_there(shape: Shape, bad: float) -> None:
    slots, steps = [0, 1, 2], 12
    results = []
    for spoil in (False, True):
        with Rig(shape, rows=3, tokens=4_096) as rig:
            for slot, length in ((0, 3_000), (1, 2_500), (2, 300)):
                rig.fill(slot, length, length + 40, generator_of(slot))
            outputs = []
            for i in range(steps):
                x = qkv_for(rig, 3, generator_of(10 + i))
                if spoil:
                    width = shape.heads * shape.head_size
                    x[:, 1, 5] = bad  # a query
                    if i == 3:
                        x[:, 1, width + 7] = bad  # a key
                    if i == 4:
                        x[:, 1, -3] = bad  # a value
                outputs.append(rig.step(slots, x))
            if spoil:
                for layer in range(2):
                    check_cache(rig, layer, 1, outputs[-1][1][layer, 1])
                    chosen = outputs[-1][1][layer, 1]
                    assert ((chosen >= 0).sum(1) == 64).all(), "a bad query head hides the others"
            results.append(outputs)
    for clean, spoiled in zip(*results, strict=True):
        for a, b in zip(clean, spoiled, strict=True):
            assert same(a[:, 0], b[:, 0]) and same(a[:, 2], b[:, 2])
        # Query head 0 holds the bad number; the others of its group still give numbers before a key or value is bad.
    last = results[1][2][2][:, 1].unflatten(1, (8, 128))
    assert torch.isfinite(last[:, 1:]).all()


def test_nan_landmarks_come_last_and_are_still_chosen_when_all_are_wanted(generator: torch.Generator) -> None:
    shape = replace(SHAPE, top_k=200, rotation=False)
    with Rig(shape, rows=1, tokens=2_048) as rig:
        rig.fill(0, 1_500, 1_540, generator)
        n = rig.state.row(0).published  # 179 chunks, 8 outliers: fewer than k
        page, place = rig.sealed_at(0, torch.tensor([50, 51, 52], device=DEVICE))
        rig.memory.landmarks[:, page, :, place] = torch.nan
        q, selection, _ = rig.step([0], qkv_for(rig, 1, generator))
        assert int((selection[0, 0, 0] >= 0).sum()) == n - 8
        check_selection(rig, 0, 0, q[0, 0], selection[0, 0])


def test_a_smaller_budget_and_fewer_chunks_than_it(generator: torch.Generator) -> None:
    with Rig(FP8, rows=3, tokens=4_096) as rig:
        rig.fill(0, 4_000, 4_030, generator, top_k=1)
        rig.fill(1, 513, 1_000, generator)
        rig.fill(2, 4_000, 4_030, generator, top_k=17)
        for step in range(20):
            results = rig.step([0, 1, 2], qkv_for(rig, 3, generator))
            if step in (0, 1, 9, 19):
                check_step(rig, [0, 1, 2], *results)


@pytest.mark.parametrize("values", ["element", "e4m3"])
def test_every_token_is_attended_once(values: str, generator: torch.Generator) -> None:
    """Keys are zero, so all weights are equal; token p's value is 1 in dimension p % D: the output counts tokens."""
    shape = replace(WHOLE, top_k=300, values=values, landmarks=values, outliers=20)
    length, d, h, c = 2_403, shape.head_size, shape.kv_heads, shape.chunk

    def counting(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens % d, d).float().expand(h, -1, -1)

    with Rig(shape, rows=1, tokens=4_096) as rig:
        rig.allocate(0, length, length + 100)
        n = rig.config.sealed_chunks(length + 1)
        ids = torch.stack([torch.arange(0, 40, 2), torch.arange(0, 60, 3)]).to(DEVICE)
        every = counting(torch.arange(n * c, device=DEVICE)).unflatten(1, (n, c))
        picked = every.gather(1, ids[:, :, None, None].expand(-1, -1, c, d))
        for layer in range(shape.layers):
            a = torch.zeros(n * c, shape.rank, device=DEVICE)
            b = torch.eye(shape.rank, h * d, device=DEVICE)
            means = torch.zeros(h, n, d, device=DEVICE)
            rig.write_sealed(0, layer, a, b, means, every, ids, torch.zeros_like(picked), picked)
            live = torch.arange(n * c, length, device=DEVICE)
            rig.write_live(0, layer, n * c, torch.zeros(h, len(live), d), counting(live))
        rig.load(0, length)
        for step in range(40):
            x = torch.zeros(shape.layers, 1, (shape.heads + 2 * h) * d, device=DEVICE)
            x[:, :, -h * d :] = counting(torch.tensor([length + step], device=DEVICE)).flatten()
            _, selection, out = rig.step([0], x)
            row = rig.state.row(0)
            for layer in range(shape.layers):
                for head in range(h):
                    chosen = selection[layer, 0, head]
                    chosen = chosen[chosen >= 0].tolist()
                    times = Counter([*chosen, *ids[head].tolist()])
                    assert max(times.values()) == 1 and len(times) == min(n + step // c + 1, row.published)
                # All chunks fit the budget: every token counts once.
                tokens = torch.arange(row.length, device=DEVICE)
                counts = torch.bincount(tokens % d, minlength=d).float()
                found = out[layer, 0].float().unflatten(0, (-1, d)) * row.length
                assert (found - counts).abs().max() < 0.3, f"step {step}"


def test_wrong_positions_and_slots_are_faults(generator: torch.Generator) -> None:
    with Rig(SHAPE, rows=2, tokens=2_048) as rig:
        rig.fill(0, 1_000, 1_040, generator)
        stream = rig.stream.cuda_stream
        for slots, positions in (([0], [5]), ([7], [0]), ([-2], [0])):
            on = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
            at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
            synchronize()
            x = qkv_for(rig, 1, generator).to(rig.dtype)
            synchronize()
            rig.run(on, at, x, *rig.outputs(1))
            rig.stream.synchronize()
            assert rig.state.fault(stream) != 0
            assert rig.state.fault(stream) == 0, "reading it clears it"


def test_a_long_dense_row_beside_sealed_ones(generator: torch.Generator) -> None:
    with Rig(SHAPE, rows=3, tokens=70_000) as rig:
        rig.fill(0, 65_000, 65_020, generator, dense=True)
        rig.fill(1, 65_000, 65_020, generator)
        rig.fill(2, 3, 20, generator)
        for _ in range(10):
            check_step(rig, [2, 0, 1], *rig.step([2, 0, 1], qkv_for(rig, 3, generator)))
