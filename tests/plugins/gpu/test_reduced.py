"""A few steps of every kind of row and format: what `make sanitize-gpu` runs under compute-sanitizer."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.gpu.oracle import check_step
from tests.plugins.gpu.prompts import check_prompt, check_seal, natural_qkv, read_prompt, seal
from tests.plugins.gpu.rig import Rig, Shape
from tests.plugins.gpu.test_decode_step import qkv_for

SHAPES = {
    "head 128, e4m3": Shape(heads=8, kv_heads=2, head_size=128, rank=96, top_k=40, landmarks="e4m3", values="e4m3"),
    "head 64, group of 3": Shape(heads=6, kv_heads=2, head_size=64, rank=48, top_k=20, dtype="float16"),
    "head 96, group of 9": Shape(heads=9, kv_heads=1, head_size=96, rank=80, top_k=16, chunk=16, window=48, limit=128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_steps(name: str, generator: torch.Generator) -> None:
    with Rig(SHAPES[name], rows=4, tokens=4_096) as rig:
        for slot, length in enumerate((3_000, 700, 40, 300)):
            rig.fill(slot, length, length + 24, generator, dense=slot == 3)
        slots = [1, -1, 3, 0, 2]
        for step in range(18):
            results = rig.step(slots, qkv_for(rig, len(slots), generator))
            if step in (0, 17):
                check_step(rig, slots, *results)


@pytest.mark.parametrize("name", SHAPES)
def test_prompt(name: str, generator: torch.Generator) -> None:
    """A prompt in stretches, its seal, and a step."""
    with Rig(SHAPES[name], rows=1, tokens=512) as rig:
        rig.allocate(0, 300, 320)
        qkv = natural_qkv(rig, 300, generator)
        check_prompt(rig, 0, qkv, *read_prompt(rig, 0, qkv, [129, 1, 170]))
        check_seal(rig, 0, *seal(rig, 0), loss=4e-3)
        check_step(rig, [0], *rig.step([0], qkv_for(rig, 1, generator)))
