"""Whole generation steps on the GPU against the reference's functions, and against its state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.plugins.gpu.device import DEVICE
from tests.plugins.gpu.oracle import check_step, close, excluded_of, landmarks_of
from tests.plugins.gpu.rig import Rig, Shape
from tests.reference.driver import prompt
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.runtime.cuda_memory import plain_values, quantise, transposed_units

SHAPES = {
    "smollm2": Shape(heads=9, kv_heads=3, head_size=64, rank=160, top_k=64, outliers=8, window=32, limit=128),
    "llama": Shape(heads=32, kv_heads=8, head_size=128, rank=160, top_k=256, outliers=48, window=256, limit=1024),
    "head 96": Shape(heads=8, kv_heads=2, head_size=96, rank=48, top_k=20, outliers=3),
    "one query a KV head": Shape(heads=4, kv_heads=4, head_size=64, rank=16, top_k=8, outliers=1),
    "group of 16": Shape(heads=32, kv_heads=2, head_size=128, rank=80, top_k=33, outliers=5),
    "group of 9": Shape(heads=9, kv_heads=1, head_size=64, rank=64, top_k=40, outliers=5, chunk=16, window=48),
    "32 KV heads": Shape(heads=64, kv_heads=32, head_size=64, rank=512, top_k=16, outliers=2),
    "chunk 16": Shape(heads=8, kv_heads=2, head_size=128, rank=96, top_k=50, outliers=6, chunk=16, window=64, limit=96),
    "one chunk": Shape(top_k=1, outliers=1, cache=1),
    "largest budget": Shape(heads=4, kv_heads=1, head_size=64, top_k=2048, outliers=100, cache=4),
    "window of a chunk": Shape(window=8, limit=63, top_k=5, cache=1),
}
FORMATS = [("element", "element"), ("e4m3", "element"), ("element", "e4m3"), ("e4m3", "e4m3")]
# float16 where nothing, and where all, is e4m3: the other two add nothing to it.
CASES = [(formats, "bfloat16") for formats in FORMATS] + [(formats, "float16") for formats in (FORMATS[0], FORMATS[3])]


def qkv_for(rig: Rig, batch: int, generator: torch.Generator, previous: Tensor | None = None) -> Tensor:
    """Inputs of a step; queries stay near the previous step's."""
    s = rig.shape
    new = torch.randn(s.layers, batch, (s.heads + 2 * s.kv_heads) * s.head_size, generator=generator, device=DEVICE)
    if previous is not None:
        width = s.heads * s.head_size
        new[..., :width] = 0.8 * previous[..., :width] + 0.6 * new[..., :width]
    return new


@pytest.mark.parametrize(("formats", "dtype"), CASES, ids=["-".join((*formats, dtype)) for formats, dtype in CASES])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_follow_the_reference(
    name: str, formats: tuple[str, str], dtype: str, generator: torch.Generator
) -> None:
    shape = replace(SHAPES[name], landmarks=formats[0], values=formats[1], dtype=dtype)
    with Rig(shape, rows=4, tokens=20_480) as rig:
        limit = shape.limit
        lengths = [limit + 5 * shape.chunk + 3, 20_000 if name == "largest budget" else 5_003, limit // 2 + 1, limit]
        for slot, length in enumerate(lengths):
            rig.fill(slot, length, length + 40, generator)
        slots = [2, -1, 0, 1, 3, -1]
        previous = None
        for step in range(20):
            previous = qkv_for(rig, len(slots), generator, previous)
            results = rig.step(slots, previous)
            if step in ((0, 19) if shape.kv_heads > 8 else (0, 1, 9, 19)):
                check_step(rig, slots, *results)


def exact_qkv(shape: Shape, tokens: int, seed: int) -> Tensor:
    """Small whole numbers: every landmark and score is exact in bfloat16 and float32 where nothing is rotated."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.layers, tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_size)
    return torch.randint(-2, 3, size, generator=generator).float()


@pytest.mark.parametrize("chunk", [8, 16])
@pytest.mark.parametrize("cache", [1, 2, 4])
def test_every_choice_is_the_reference_states(chunk: int, cache: int) -> None:
    """Selections, hits and misses, sealing and publishing over many steps, bit for bit where arithmetic is exact."""
    shape = Shape(layers=2, rank=128, top_k=7, cache=cache, chunk=chunk, outliers=3, window=2 * chunk, rotation=False)
    total, steps = 200, 60
    lengths = [total - steps - 1, 97, 64, 70]  # slot 2 starts dense and must stop before its limit
    with Rig(shape, rows=4, tokens=256) as rig:
        reference = ReferenceState(rig.model, rig.config.resolved(rig.model.key_width))
        qkv = [exact_qkv(shape, n + steps, slot) for slot, n in enumerate(lengths)]
        slots = [0, 1, 3]
        for slot in slots:
            reference.allocate(slot, prompt_tokens=lengths[slot], total_tokens=total, top_k=7, dense=False)
            prompt(reference, slot, qkv[slot][:, : lengths[slot]])
            reference.seal_prompt(slot)
            rig.fill_from(reference, slot, total)
        order = [0, 1, -1, 3]
        for step in range(steps):
            x = torch.stack([qkv[max(s, 0)][:, lengths[max(s, 0)] + step] for s in order], dim=1)
            reference.begin_pass("generation", order, 0, 1, False)
            reference.step_prologue()
            q, selection, out = rig.step(order, x)
            on = torch.tensor(order)
            positions = torch.tensor([0 if s < 0 else reference.length(s) - 1 for s in order])
            for layer in range(shape.layers):
                rq, rs = reference.landmark_topk(layer, x[layer], positions, on)
                ticket = reference.key_reconstruct(layer, rs, on)
                expected = reference.sparse_attention(layer, rq, rs, ticket, on)
                close(q[layer].float().cpu(), rq, 1e-20)  # rotations are by some 1e-30
                assert torch.equal(selection[layer].cpu(), rs), f"step {step} layer {layer}"
                close(out[layer].float().cpu(), expected, 2e-2)
        for slot in slots:
            ours, theirs = rig.state.statistics(slot, rig.stream.cuda_stream), reference.statistics(slot)
            assert (ours.hits, ours.misses, ours.bytes_fetched) == (
                theirs.hits,
                theirs.misses,
                theirs.bytes_fetched // 2,
            )
            assert (ours.sealed_tokens, ours.generated_sealed) == (theirs.sealed_tokens, theirs.generated_sealed)
            assert ours.generated_sealed > 0
            assert ours.residual_total == pytest.approx(theirs.residual_total, rel=1e-3)
            assert ours.residual_lost == pytest.approx(theirs.residual_lost, rel=2e-2, abs=1e-3 * theirs.residual_total)
            n = reference.rows[slot].published
            page, place = rig.sealed_at(slot, torch.arange(n, device=DEVICE))
            for layer in range(shape.layers):
                sealed = reference.rows[slot].layers[layer]
                means = rig.memory.landmarks[layer][page, :, place].float().transpose(0, 1).cpu()
                close(means, sealed.means[:, :n], 1e-20)
                a = rig.memory.factor_a[layer].unflatten(1, (-1, chunk))[page, place].float().flatten(0, 1).cpu()
                close(a, sealed.coordinates[: n * chunk], 8e-3)
                units = rig.values[slot][layer, :, :n].float()
                assert torch.equal(plain_values(units), sealed.values[:, :n])


@pytest.mark.parametrize("values", ["element", "e4m3"])
def test_sealing_writes_what_the_formats_say(values: str, generator: torch.Generator) -> None:
    shape = Shape(heads=8, kv_heads=4, head_size=128, rank=96, window=16, values=values, landmarks=values)
    with Rig(shape, rows=2, tokens=2048) as rig:
        rig.fill(0, 1000, 1100, generator, value_scale=30.0)
        before = rig.state.row(0).published
        window = rig.read_live(0, 0, before * 8, before * 8 + 16)
        for _ in range(17):
            rig.step([0], qkv_for(rig, 1, generator))
        assert rig.state.row(0).published == before + 2

        chunks = torch.arange(before, before + 2, device=DEVICE)
        keys, plain = (x.unflatten(1, (2, 8)) for x in window)
        means = landmarks_of(rig, 0, 0, before + 2)[:, before:]
        page, place = rig.sealed_at(0, chunks)
        units = transposed_units(plain)
        if values == "e4m3":
            means = means + rig.memory.centres[0, rig.state.sealed_row_of(0)][:, None]
            small, scale = quantise(units, (2, 3, 4))
            assert rig.memory.value_scales is not None and rig.memory.centres is not None
            assert torch.allclose(rig.memory.value_scales[0][page, :, place].T, scale[..., 0, 0, 0], rtol=1e-6)
            found = rig.values[0].view(torch.uint8)[0, :, before : before + 2]
            assert (found == small.view(torch.uint8).cpu()).float().mean() > 0.999
        else:
            assert torch.equal(rig.values[0][0, :, before : before + 2], units.to(rig.dtype).cpu())
        close(means, keys.mean(2), 5e-2 if values == "e4m3" else 4e-3)
        assert not excluded_of(rig, 0, 0, before + 2)[:, before:].any()
        word = rig.memory.excluded[0][page, :, place // 32]
        assert not bool((word >> (place % 32)[:, None] & 1).any())
