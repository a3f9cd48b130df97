"""Logits of engines against the CPU executor's in float32, along real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.conftest import PROMPT, TOKENS, Made
from trtllm_shadowkv import LLM, AttentionParams
from trtllm_shadowkv.eval.forced import Floats, agreement, forced_logits

MODES = ("dense", "shadowkv")


def distance(exact: Floats, other: Floats) -> float:
    """Mean over positions of the relative L2 error."""
    return float((np.linalg.norm(other - exact, axis=1) / np.linalg.norm(exact, axis=1)).mean())


@pytest.fixture(scope="module")
def transformers_top1(smollm2: Path, text: list[int]) -> Callable[[str], float]:
    """How often transformers in a 16-bit type chooses the token that it chooses in float32, at the same positions."""
    from transformers import AutoModelForCausalLM

    def logits(dtype: torch.dtype) -> Floats:
        model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            found = model(torch.tensor([text[: TOKENS - 1]], device="cuda")).logits[0, PROMPT - 1 :]
        return found.float().cpu().numpy()

    return lambda dtype: agreement(logits(torch.float32), logits(getattr(torch, dtype))).top1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_the_cpu_executors(
    engine: Made,
    cpu_logits: Callable[[str], Floats],
    text: list[int],
    dtype: str,
    mode: str,
    transformers_top1: Callable[[str], float],
) -> None:
    exact = cpu_logits(mode)  # first: it takes longest, and engines are compiled meanwhile, for other tests
    with LLM(engine(dtype)) as llm:
        logits, figures = forced_logits(llm, text[:PROMPT], text[PROMPT:TOKENS], AttentionParams(mode=mode))  # type: ignore[arg-type]
    same, error = agreement(exact, logits), distance(exact, logits)
    others = transformers_top1(dtype)
    print(
        f"{dtype} {mode}: top-1 {same.top1:.4f} (transformers {others:.4f}), relative L2 {error:.5f}, KL {same.kl:.2e}"
    )
    assert same.positions == TOKENS - PROMPT
    assert (figures.generated_sealed > 0) == (mode == "shadowkv")
    if dtype == "float16":
        assert same.top1 >= 0.99
        assert error <= 1e-2
    else:
        assert same.top1 >= others - 0.005


def test_full_rank_and_budget_are_dense(engine: Made, text: list[int]) -> None:
    """At 8K tokens, along 100 of them; the CPU tests hold the two within 1e-3 in float32."""
    found = {}
    with LLM(engine("maxima")) as llm:
        for mode in MODES:
            found[mode], figures = forced_logits(llm, text[:7900], text[7900:8000], AttentionParams(mode=mode))  # type: ignore[arg-type]
    same, error = agreement(found["dense"], found["shadowkv"]), distance(found["dense"], found["shadowkv"])
    print(f"full rank and budget: top-1 {same.top1:.4f}, relative L2 {error:.5f}, KL {same.kl:.2e}")
    assert figures.sealed_tokens > 7900 - 80
    assert same.top1 >= 0.97
    assert error <= 2e-2


def test_fp8_values_and_landmarks(engine: Made, cpu_logits: Callable[[str], Floats], text: list[int]) -> None:
    """Half the host memory; against float32 they lose little more than bfloat16 does."""
    exact, shadowkv = cpu_logits("shadowkv"), AttentionParams(mode="shadowkv")
    found = {}
    for stored in ("auto", "fp8"):
        with LLM(engine("bfloat16"), value_dtype=stored, landmark_dtype=stored) as llm:
            found[stored] = forced_logits(llm, text[:PROMPT], text[PROMPT:TOKENS], shadowkv)
    same, error = agreement(exact, found["fp8"][0]), distance(exact, found["fp8"][0])
    print(f"bfloat16 shadowkv, fp8 stored: top-1 {same.top1:.4f}, relative L2 {error:.5f}, KL {same.kl:.2e}")
    assert found["fp8"][1].host_bytes < 0.51 * found["auto"][1].host_bytes  # in whole pages
    assert found["fp8"][1].bytes_fetched < 0.6 * found["auto"][1].bytes_fetched
    assert same.top1 >= 0.98
    assert error <= 2e-2
