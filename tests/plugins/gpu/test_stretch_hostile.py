"""Prompts with elements that are not finite: they reach what the formula says they reach, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.gpu.oracle import close
from tests.plugins.gpu.prompts import normal_qkv, read_prompt
from tests.plugins.gpu.rig import Rig, Shape

TOKENS, TOKEN, HEAD = 150, 77, 1


def place(shape: Shape, part: str) -> int:
    """First element of head HEAD of a token's queries or keys."""
    return (HEAD if part == "query" else shape.heads + HEAD) * shape.head_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["query", "key"])
@pytest.mark.parametrize("stretches", [[150], [70, 80]], ids=str)
def test_one_element_that_is_not_finite(
    part: str, value: float, dtype: str, stretches: list[int], generator: torch.Generator
) -> None:
    shape = Shape(heads=6, kv_heads=2, head_size=64, dtype=dtype)
    group = shape.heads // shape.kv_heads
    with Rig(shape, rows=2, tokens=256) as rig:
        qkv = normal_qkv(rig, TOKENS, generator)
        rig.allocate(0, TOKENS, TOKENS, dense=True)
        _, clean = read_prompt(rig, 0, qkv, stretches)
        qkv[0, TOKEN, place(shape, part) + 3] = value
        rig.allocate(1, TOKENS, TOKENS, dense=True)
        q, out = read_prompt(rig, 1, qkv, stretches)

        before, after = (x[0].unflatten(1, (shape.heads, -1)).transpose(0, 1) for x in (clean, out))  # [Hq, S, D]
        reached = torch.zeros(before.shape[:2], dtype=torch.bool, device=before.device)
        if part == "query":
            reached[HEAD, TOKEN] = True
        else:
            reached[HEAD * group : (HEAD + 1) * group, TOKEN:] = True
        assert torch.equal(before[~reached].view(torch.int16), after[~reached].view(torch.int16))

        keys, values = rig.read_live(1, 0, 0, TOKENS)
        queries = q[0].double().unflatten(1, (shape.heads, -1)).transpose(0, 1)
        keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
        # Element by element, so that no product that is masked reaches a sum.
        scores = (queries[:, :, None] * keys[:, None]).sum(-1) / shape.head_size**0.5
        scores.masked_fill_(torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        expected = scores.softmax(-1) @ values
        assert torch.equal(after.isnan(), expected.isnan())
        close(after.nan_to_num(), expected.nan_to_num(), 6e-3)
