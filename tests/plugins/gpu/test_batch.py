"""Rows do not know of each other; one captured graph serves rows that grow, enter and leave; slots serve again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.plugins.gpu.device import DEVICE, EMULATED, synchronize, working_on
from tests.plugins.gpu.oracle import check_step
from tests.plugins.gpu.rig import Rig, Shape
from tests.plugins.gpu.test_decode_step import qkv_for

SHAPE = Shape(heads=8, kv_heads=2, head_size=128, layers=2, rank=96, top_k=64, outliers=8, window=64, limit=512)
FP8 = replace(SHAPE, landmarks="e4m3", values="e4m3")


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["16-bit", "e4m3"])
def test_a_row_alone_equals_the_row_in_a_batch(shape: Shape) -> None:
    lengths = [4_000, 131_000, 1, 700, 9_001, 300]
    # Other groups, other places, padding, other slots: the same bits.
    with Rig(replace(shape, groups=3), rows=6, tokens=131_072) as many:
        for slot, length in enumerate(lengths):
            many.fill(slot, length, length + 40, generator_of(slot))
        order = [3, -1, 1, 0, 5, 2, 4]
        batch_results = []
        qkv = [qkv_for(many, 6, generator_of(100 + i)) for i in range(10)]
        for x in qkv:
            at = torch.tensor([max(s, 0) for s in order], device=DEVICE)
            batch_results.append(many.step(order, x[:, at]))
        check_step(many, order, *batch_results[-1])
        statistics = [many.state.statistics(s, many.stream.cuda_stream) for s in range(6)]
    for slot, length in enumerate(lengths):
        with Rig(shape, rows=1, tokens=131_072) as one:
            one.fill(0, length, length + 40, generator_of(slot))
            for i, x in enumerate(qkv):
                alone = one.step([0], x[:, slot : slot + 1])
                for found, right in zip(alone, batch_results[i], strict=True):
                    assert same(found[:, 0], right[:, order.index(slot)]), f"slot {slot} step {i}"
            assert one.state.statistics(0, one.stream.cuda_stream) == statistics[slot]


@pytest.mark.skipif(EMULATED, reason="the emulated GPU captures no graphs")
@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["16-bit", "e4m3"])
def test_one_graph_replayed_a_thousand_times_equals_eager_steps(shape: Shape) -> None:
    lengths, batch, steps = [3_000, 513, 1_900, 100], 6, 1_000
    totals = [n + steps + 1 for n in lengths]
    totals[3] = 511  # stays dense, leaves when it is full
    with (
        Rig(shape, rows=5, tokens=4_096, batch=batch) as eager,
        Rig(shape, rows=5, tokens=4_096, batch=batch) as graphed,
    ):
        for rig in (eager, graphed):
            for slot in range(4):
                rig.fill(slot, lengths[slot], totals[slot], generator_of(slot))
        # One set of inputs and outputs for all replays.
        on = torch.full((batch,), -1, dtype=torch.int32, device=DEVICE)
        at = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        x = torch.zeros_like(qkv_for(graphed, batch, generator_of(0)).to(graphed.dtype))
        outputs = graphed.outputs(batch)
        graph = torch.cuda.CUDAGraph()
        synchronize()
        with torch.cuda.graph(graph, stream=graphed.stream):
            graphed.run(on, at, x, *outputs)
        source, previous = generator_of(7), None
        slots = [0, 1, -1, 2, 3, -1]
        for step in range(steps):
            if step == 300:  # a row leaves, another takes its slot, and a slot never used before enters
                for rig in (eager, graphed):
                    rig.state.release(1)
                    rig.fill(1, 800, 800 + steps, generator_of(50))
                    rig.fill(4, 2_222, 2_222 + steps, generator_of(51))
                slots = [0, 4, 1, 2, 3, -1]
            if slots[4] == 3 and eager.state.length(3) + 1 > totals[3]:
                for rig in (eager, graphed):
                    rig.state.release(3)
                slots = [-1, 2, 1, 4, -1, 0]
            previous = qkv_for(eager, batch, source, previous)
            expected = eager.step(slots, previous)
            graphed.state.begin_pass("generation", slots, 0, 1, False)
            with working_on(graphed.stream):
                x.copy_(previous.to(graphed.dtype))
                on.copy_(torch.tensor(slots, dtype=torch.int32))
                at.copy_(torch.tensor([0 if s < 0 else graphed.state.length(s) - 1 for s in slots], dtype=torch.int32))
                for o in outputs:
                    o.view(torch.uint8).fill_(0xFF)
                graph.replay()
            graphed.stream.synchronize()
            for found, right in zip(outputs, expected, strict=True):
                assert same(found, right), f"step {step}"
            if step % 250 == 249:
                check_step(graphed, slots, *outputs)
        for slot in (0, 1, 2, 4):
            a, b = (rig.state.statistics(slot, rig.stream.cuda_stream) for rig in (eager, graphed))
            assert a == b
        assert eager.state.statistics(0, eager.stream.cuda_stream).generated_sealed > 900
        assert graphed.state.fault(graphed.stream.cuda_stream) == 0


def test_released_slots_pages_and_sealed_rows_serve_again() -> None:
    with Rig(SHAPE, rows=2, tokens=4_096) as rig:
        for turn in range(6):
            for slot, length in ((0, 3_000 - 400 * turn), (1, 200 + 500 * turn)):
                rig.fill(slot, length, length + 20, generator_of(turn))
            for step in range(10):
                results = rig.step([1, 0], qkv_for(rig, 2, generator_of(turn)))
                if step in (0, 9):
                    check_step(rig, [1, 0], *results)
            rig.state.release(0)
            rig.state.release(1)
            rig.state.release(1)  # nothing to do
            rig.state.poison()


def test_values_on_the_gpu_give_the_bits_of_values_on_the_host() -> None:
    results = []
    for on_gpu in (False, True):
        with Rig(FP8, rows=1, tokens=4_096, values_on_gpu=on_gpu) as rig:
            rig.fill(0, 3_000, 3_100, generator_of(0))
            results.append([rig.step([0], qkv_for(rig, 1, generator_of(i))) for i in range(30)])
    for a, b in zip(*results, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))
