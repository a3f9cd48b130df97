"""Prompts on the GPU: stretches, seals, and whole sequences, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.plugins.gpu.oracle import check_step, close
from tests.plugins.gpu.prompts import check_prompt, check_seal, natural_qkv, normal_qkv, pre_rope, read_prompt, seal
from tests.plugins.gpu.rig import Rig, Shape
from tests.plugins.gpu.test_decode_step import qkv_for
from tests.reference.driver import prompt
from trtllm_shadowkv.reference.state import ReferenceState

SHAPES = {
    "smollm2": Shape(heads=9, kv_heads=3, head_size=64, rank=160, top_k=64, outliers=8, window=32, limit=128),
    "llama": Shape(heads=32, kv_heads=8, head_size=128, rank=160, top_k=64, outliers=48, window=256, limit=512),
    "head 96": Shape(heads=8, kv_heads=2, head_size=96, rank=48, top_k=20, outliers=3),
    "group of 16": Shape(heads=32, kv_heads=2, head_size=128, rank=80, top_k=33, outliers=5, layers=2),
    "chunk 16": Shape(heads=8, kv_heads=2, head_size=128, rank=96, top_k=50, outliers=6, chunk=16, window=64, limit=96),
    "all of the rank": Shape(heads=2, kv_heads=1, head_size=64, rank=64, outliers=1),
}
FORMATS = [("element", "bfloat16"), ("e4m3", "bfloat16"), ("e4m3", "float16")]


def shaped(name: str, how: tuple[str, str] = FORMATS[0]) -> Shape:
    return replace(SHAPES[name], landmarks=how[0], values=how[0], dtype=how[1])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stretches", [[1], [8], [7, 1, 9], [128], [129, 1, 126], [300, 1, 1, 64], [1000, 37]], ids=str)
def test_stretches_are_exact_attention(name: str, stretches: list[int], generator: torch.Generator) -> None:
    tokens = sum(stretches)
    with Rig(shaped(name), rows=2, tokens=2048) as rig:
        rig.allocate(1, 300, 400)  # somebody else's pages in between
        rig.allocate(0, tokens, tokens + 1, dense=True)
        qkv = normal_qkv(rig, tokens, generator)
        check_prompt(rig, 0, qkv, *read_prompt(rig, 0, qkv, stretches))


@pytest.mark.parametrize("name", ["smollm2", "llama", "head 96"])
def test_bits_do_not_depend_on_the_stretches(name: str, generator: torch.Generator) -> None:
    tokens = 700
    with Rig(shaped(name), rows=4, tokens=1024) as rig:
        qkv = normal_qkv(rig, tokens, generator)
        results = []
        for slot, stretches in enumerate(([700], [1, 699], [64, 128, 8, 500], [350, 349, 1])):
            rig.allocate(slot, tokens, tokens, dense=True)
            results.append(read_prompt(rig, slot, qkv, stretches))
        for q, out in results[1:]:
            assert torch.equal(q, results[0][0])
            assert torch.equal(out, results[0][1])


@pytest.mark.parametrize("how", FORMATS, ids="-".join)
@pytest.mark.parametrize("name", SHAPES)
def test_a_seal_is_the_references(name: str, how: tuple[str, str], generator: torch.Generator) -> None:
    shape = shaped(name, how)
    with Rig(shape, rows=3, tokens=4096) as rig:
        for slot, tokens in enumerate((shape.limit, shape.limit + 3 * shape.chunk + 1, 3000)):
            rig.allocate(slot, tokens, tokens + 50)
            qkv = natural_qkv(rig, tokens, generator)
            read_prompt(rig, slot, qkv, [tokens // 2, tokens - tokens // 2])
            check_seal(rig, slot, *seal(rig, slot))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_seal_unrotates_its_keys_and_leaves_all_else_equal(dtype: str, generator: torch.Generator) -> None:
    """In its live pages: neither the window, of which a page holds sealed tokens too, nor another row has changed."""
    shape = Shape(heads=5, kv_heads=5, layers=2, outliers=3, dtype=dtype)
    with Rig(shape, rows=2, tokens=512) as rig:
        for slot, tokens in enumerate((300, 200)):
            rig.allocate(slot, tokens, tokens + 20)
            read_prompt(rig, slot, natural_qkv(rig, tokens, generator), [tokens])
        before, values = rig.memory.live_keys.clone(), rig.memory.live_values.clone()
        at = torch.arange(264, device=before.device)
        page, place = rig.live_at(0, at), at % 128
        keys, _ = seal(rig, 0)
        assert rig.state.row(0).published * shape.chunk == len(at)
        after = rig.memory.live_keys.clone()
        for layer in range(shape.layers):
            found = after[layer, page, :, place].flatten(1)
            close(found, pre_rope(rig, keys[layer], len(at)), 2.0**-8 if dtype == "bfloat16" else 2.0**-11)
            after[layer, page, :, place] = before[layer, page, :, place]
        assert torch.equal(after.view(torch.int16), before.view(torch.int16))
        assert torch.equal(rig.memory.live_values.view(torch.int16), values.view(torch.int16))


def special_keys(kind: str, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """[tokens, width] float32 pre-RoPE keys."""
    device = generator.device
    normal = torch.randn(tokens, width, generator=generator, device=device)
    match kind:
        case "all equal":
            return normal[:1].expand(tokens, -1).clone()
        case "rank 1":
            return normal[:, :1] * normal[:1]
        case "zero":
            return torch.zeros_like(normal)
        case "huge":
            return normal * 1e30
        case "tiny":
            return normal * 1e-30
        case "one huge token":
            normal[tokens // 3] *= 1e4
            return normal
    raise AssertionError(kind)


@pytest.mark.parametrize("landmarks", ["element", "e4m3"])
@pytest.mark.parametrize("kind", ["all equal", "rank 1", "zero", "huge", "tiny", "one huge token"])
def test_hostile_keys(kind: str, landmarks: str, generator: torch.Generator) -> None:
    shape = Shape(heads=4, kv_heads=2, head_size=64, rank=32, outliers=5, landmarks=landmarks)
    tokens = 777
    with Rig(shape, rows=1, tokens=1024) as rig:
        rig.allocate(0, tokens, tokens + 10)
        qkv = normal_qkv(rig, tokens, generator)
        width = shape.kv_heads * shape.head_size
        qkv[:, :, 4 * 64 : 4 * 64 + width] = special_keys(kind, tokens, width, generator).to(rig.dtype)
        read_prompt(rig, 0, qkv, [tokens])
        # Of a flat spectrum nothing is nearly as good as the best basis, and nothing far worse.
        check_seal(rig, 0, *seal(rig, 0), loss=1e-3 if kind in ("all equal", "rank 1", "zero") else 4e-3)
        assert rig.state.fault(rig.stream.cuda_stream) == 0


@pytest.mark.parametrize(
    ("dtype", "keys"), [("bfloat16", (torch.nan, 0)), ("float16", (torch.inf, 0)), ("float16", (6e4, 6e4))]
)
def test_keys_that_are_not_finite_say_so_and_reach_nobody_else(
    dtype: str, keys: tuple[float, float], generator: torch.Generator
) -> None:
    """Also those that are finite, and not before RoPE: two elements that are partners, as far turned as these."""
    shape = Shape(heads=4, kv_heads=2, head_size=64, rank=32, outliers=5, landmarks="e4m3", values="e4m3", dtype=dtype)
    with Rig(shape, rows=2, tokens=1024) as rig:
        qkv = natural_qkv(rig, 500, generator)
        for slot in (0, 1):
            rig.allocate(slot, 500, 600)
            read_prompt(rig, slot, qkv, [500])
        page = rig.live_at(0, torch.tensor([1], device=qkv.device))
        rig.memory.live_keys[0][page, 1, 1, 0], rig.memory.live_keys[0][page, 1, 1, 32] = keys
        seal(rig, 0)
        assert rig.state.fault(rig.stream.cuda_stream) == 4
        check_seal(rig, 1, *seal(rig, 1))
        assert rig.state.fault(rig.stream.cuda_stream) == 0
        for _ in range(3):
            check_step(rig, [1], *rig.step([1], qkv_for(rig, 1, generator)))


def test_a_dense_row_that_outgrows_its_limit(generator: torch.Generator) -> None:
    shape = Shape(heads=4, kv_heads=2, head_size=64, rank=64, outliers=3, limit=100, values="e4m3")
    with Rig(shape, rows=1, tokens=512) as rig:
        rig.allocate(0, 60, 200)
        qkv = natural_qkv(rig, 60, generator)
        check_prompt(rig, 0, qkv, *read_prompt(rig, 0, qkv, [60]))
        steps = 0
        while rig.state.length(0) < 200:
            if rig.state.must_seal(0):
                check_seal(rig, 0, *seal(rig, 0))
            check_step(rig, [0], *rig.step([0], qkv_for(rig, 1, generator)))
            steps += 1
        assert (steps, rig.state.row(0).sealed) == (140, True)


def test_release_in_the_middle_of_a_prompt(generator: torch.Generator) -> None:
    """A slot that is given to another row after a part of a prompt, and after a seal, is as good as new."""
    shape = Shape(heads=4, kv_heads=2, head_size=64, rank=64, outliers=3, values="e4m3", landmarks="e4m3")
    with Rig(shape, rows=2, tokens=1024) as rig:
        for abandoned in (0, 300, 600):
            rig.allocate(0, 600, 700)
            qkv = natural_qkv(rig, 600, generator)
            if abandoned:
                read_prompt(rig, 0, qkv, [abandoned])
            if abandoned == 600:
                seal(rig, 0)
            rig.state.release(0)
            rig.allocate(0, 400, 500)
            qkv = natural_qkv(rig, 400, generator)
            check_prompt(rig, 0, qkv, *read_prompt(rig, 0, qkv, [399, 1]))
            check_seal(rig, 0, *seal(rig, 0))
            check_step(rig, [0], *rig.step([0], qkv_for(rig, 1, generator)))
            rig.state.release(0)


@pytest.mark.parametrize("how", [("element", "float16"), ("e4m3", "bfloat16")], ids="-".join)
def test_a_whole_sequence(how: tuple[str, str], generator: torch.Generator) -> None:
    """A prompt by stretches, its seal, and 300 steps with sealing, beside a reference state that is given the same.

    All chunks are selected, so that no near tie makes a difference: check_step judges selections.
    """
    shape = Shape(
        layers=2, heads=6, kv_heads=2, rank=128, top_k=160, outliers=4, landmarks=how[0], values=how[0], dtype=how[1]
    )
    tokens, steps = 901, 300
    with Rig(shape, rows=1, tokens=2048) as rig:
        reference = ReferenceState(rig.model, rig.config.resolved(rig.model.key_width))
        rig.allocate(0, tokens, tokens + steps)
        reference.allocate(0, prompt_tokens=tokens, total_tokens=tokens + steps, top_k=160, dense=False)
        qkv = natural_qkv(rig, tokens, generator)
        _, out = read_prompt(rig, 0, qkv, [256, 500, 145])
        expected = prompt(reference, 0, qkv.float().cpu()).out
        close(out.float().cpu(), expected, 6e-3)
        check_seal(rig, 0, *seal(rig, 0))
        reference.seal_prompt(0)
        on, previous = torch.tensor([0]), None
        found, wanted = [], []
        for _ in range(steps):
            previous = qkv_for(rig, 1, generator, previous).to(rig.dtype).float()
            q, selection, out = rig.step([0], previous)
            check_step(rig, [0], q, selection, out)
            reference.begin_pass("generation", [0], 0, 1, False)
            reference.step_prologue()
            positions = torch.tensor([reference.length(0) - 1])
            for layer in range(shape.layers):
                rq, rs = reference.landmark_topk(layer, previous[layer].cpu(), positions, on)
                ticket = reference.key_reconstruct(layer, rs, on)
                wanted.append(reference.sparse_attention(layer, rq, rs, ticket, on))
                found.append(out[layer].float().cpu())
        close(torch.stack(found), torch.stack(wanted), 4e-3 if how[0] == "element" else 4e-2)
        assert rig.state.row(0).published == rig.config.sealed_chunks(tokens + steps)
