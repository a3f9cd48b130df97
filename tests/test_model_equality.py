"""Whole models: logits against transformers, ShadowKV at full rank and budget against dense attention, stretches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor
from trtllm_shadowkv.runtime.value_pool import ValuePool

if TYPE_CHECKING:
    from tests.conftest import BuildTiny, Built

Array = NDArray[Any]
LOGITS = 2e-3
"""Allowed difference from transformers, at any position."""
SAME = 1e-3
"""Allowed difference of two ways to the same numbers."""


def executor_of(engine: EngineDirectory, threads: int = 1, **changes: Any) -> tuple[OnnxCpuExecutor, CpuState]:
    state = CpuState(engine.model, replace(engine.build.shadowkv, **changes), ValuePool(1 << 31))
    return OnnxCpuExecutor(engine, state, threads=threads), state


def transformers_logits(built: Built, ids: Sequence[int], rounded: torch.dtype = torch.float32) -> Array:
    """Computed in float32 from weights rounded to ``rounded``, the head to float16 at least; [len(ids), vocab]."""
    model: Any = AutoModelForCausalLM.from_pretrained(built.model_dir, dtype=torch.float32)
    with torch.inference_mode():
        head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
        for name, weight in model.named_parameters():
            weight.copy_(weight.to(torch.float16 if name == head and rounded == torch.bfloat16 else rounded))
        logits: Array = model(torch.tensor([list(ids)])).logits[0].numpy()
    return logits


def feed(executor: OnnxCpuExecutor, slot: int, ids: Sequence[int], stretch: int, all_logits: bool) -> Array:
    """A prompt in stretches; logits of every position, or of the last."""
    out = []
    for start in range(0, len(ids), stretch):
        part = ids[start : start + stretch]
        last = start + stretch >= len(ids)
        wanted = range(len(part)) if all_logits else [len(part) - 1] if last else []
        out.append(executor.context(slot, part, start, last, wanted))
    return np.concatenate(out)


def step(executor: OnnxCpuExecutor, slots: Sequence[int], token: int) -> Array:
    """The same token for every row."""
    for slot in slots:
        if executor.state.must_seal(slot):
            executor.state.seal_prompt(slot)
    return executor.generation(slots, [token] * len(slots))


# --- tiny models of every kind ----------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped heads": {},
    "llama, a key head for every head": {"kv_heads": 4},
    "llama, one key head": {"kv_heads": 1},
    "llama, tied": {"tied": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, three heads a group, head_dim": {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 24},
    "llama, linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, llama3 rope": {"rope_scaling": LLAMA3},
    "llama, five layers in shards": {"layers": 5, "shards": 3},
    "mistral": {"architecture": "mistral"},
    "mistral, head_dim": {"architecture": "mistral", "head_dim": 32},
    "qwen2": {"architecture": "qwen2"},
    "qwen2, tied": {"architecture": "qwen2", "tied": True, "kv_heads": 1},
    "qwen3": {"architecture": "qwen3"},
    "qwen3, biases, tied, head_dim": {"architecture": "qwen3", "attention_bias": True, "tied": True, "head_dim": 32},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name: str, build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    """Of a prompt in two stretches, and of 60 tokens after it, one by one: 1,000 in all."""
    built = build_tiny(BuildConfig(shadowkv=ShadowKVConfig(attention="dense")), **MODELS[name])
    ids = text_bytes[5000:6000]
    executor, state = executor_of(built.engine)
    state.allocate(0, prompt_tokens=940, total_tokens=1000, top_k=1, dense=False)
    got = [feed(executor, 0, ids[:940], 701, all_logits=True), *(step(executor, [0], i) for i in ids[940:])]
    want = transformers_logits(built, ids)
    assert np.abs(np.concatenate(got) - want).max() < LOGITS
    assert np.abs(want).max() > 1 and np.abs(want - want[::-1]).max() > 1  # there is something to be wrong about


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_16_bit_builds(
    architecture: str, dtype: str, stored: torch.dtype, build_tiny: BuildTiny, text_bytes: list[int]
) -> None:
    """Weights are rounded once, to the engine's type or the head's, and computed with in float32."""
    build = BuildConfig(dtype=dtype, shadowkv=ShadowKVConfig(attention="dense"))  # type: ignore[arg-type]
    built = build_tiny(build, architecture=architecture, dtype=stored)
    ids = text_bytes[:1000]
    executor, state = executor_of(built.engine)
    state.allocate(0, prompt_tokens=1000, total_tokens=1000, top_k=1, dense=False)
    got = feed(executor, 0, ids, 1000, all_logits=True)
    assert got.dtype == np.float32
    assert np.abs(got - transformers_logits(built, ids, getattr(torch, dtype))).max() < LOGITS
    if stored == torch.float32:  # the rounding is seen, so it was done
        assert np.abs(got - transformers_logits(built, ids)).max() > LOGITS


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tokens", [2000, 2001, 1985])  # 2 · 1000, one more, and 31 · 64 + 1
def test_stretches(tokens: int, build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    """64 or 1,000 at a time or all at once: the same first token, landmarks and outliers."""
    built = build_tiny(BuildConfig(shadowkv=ShadowKVConfig(rank=16, top_k=6, outliers=9, window=32, dense_limit=256)))
    ids = text_bytes[20_000 : 20_000 + tokens + 1]
    results = []
    for stretch in (tokens, 1000, 64):
        executor, state = executor_of(built.engine)
        state.allocate(0, prompt_tokens=tokens, total_tokens=tokens + 1, top_k=6, dense=False)
        first = feed(executor, 0, ids[:tokens], stretch, all_logits=False)
        second = step(executor, [0], ids[tokens])
        sealed = state.rows[0].sealed
        assert sealed is not None
        n = sealed.published
        results.append((first, second, sealed.means[:, :, :n], sealed.bias[:, :, :n]))
    for first, second, means, bias in results[1:]:
        assert np.abs(first - results[0][0]).max() < SAME and np.abs(second - results[0][1]).max() < SAME
        assert torch.allclose(means, results[0][2], atol=1e-4)
        assert torch.equal(bias, results[0][3])


@pytest.mark.usefixtures("one_thread")
def test_from_ten_tokens_to_thousands(build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    """Far across the dense limit at full rank and budget, beside a dense row of the same tokens."""
    total, limit = 3000, 400
    build = BuildConfig(shadowkv=ShadowKVConfig(rank=32, top_k=512, outliers=8, window=64, dense_limit=limit))
    built = build_tiny(build)
    ids = text_bytes[40_000 : 40_000 + total]
    executor, state = executor_of(built.engine)
    for slot, dense in ((0, False), (1, True)):
        state.allocate(slot, prompt_tokens=10, total_tokens=total, top_k=512, dense=dense)
        executor.context(slot, ids[:10], 0, True, [9])
    want = transformers_logits(built, ids)
    for i in range(10, total):
        sealed, dense_row = step(executor, [0, 1], ids[i])
        assert np.abs(sealed - dense_row).max() < SAME
        assert np.abs(sealed - want[i]).max() < LOGITS
        assert state.is_sealed(0) == (i >= limit) and not state.is_sealed(1)
    statistics = state.statistics(0)
    assert statistics.sealed_tokens == (total - 64) // 8 * 8
    assert statistics.generated_sealed == statistics.sealed_tokens - (limit + 1 - 64) // 8 * 8
    assert statistics.residual is not None and statistics.residual < 1e-5
    assert statistics.hits + statistics.misses > 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama, three heads a group, head_dim", "qwen2", "qwen3, biases, tied, head_dim"])
def test_full_rank_and_budget_are_dense_attention(name: str, build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    options = MODELS[name]
    width = options.get("kv_heads", 2) * options.get("head_dim", 16)
    shadowkv = ShadowKVConfig(rank=width, top_k=100, outliers=4, window=32, dense_limit=128)
    built = build_tiny(BuildConfig(shadowkv=shadowkv), **options)
    ids = text_bytes[60_000:60_800]
    executor, state = executor_of(built.engine)
    for slot, dense in ((0, False), (1, True)):
        state.allocate(slot, prompt_tokens=500, total_tokens=800, top_k=100, dense=dense)
        feed(executor, slot, ids[:500], 500, all_logits=False)
    for i in range(500, 800):
        sealed, dense_row = step(executor, [0, 1], ids[i])
        assert np.abs(sealed - dense_row).max() < SAME
    assert state.is_sealed(0)


@pytest.mark.usefixtures("one_thread")
def test_a_small_budget_is_not_dense_attention(build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    """The equalities above must not hold because selection and rank do nothing."""
    ids = text_bytes[60_000:60_600]
    for rank, top_k in ((32, 2), (16, 100)):
        shadowkv = ShadowKVConfig(rank=rank, top_k=top_k, outliers=1, window=16, dense_limit=128)
        executor, state = executor_of(build_tiny(BuildConfig(shadowkv=shadowkv)).engine)
        for slot, dense in ((0, False), (1, True)):
            state.allocate(slot, prompt_tokens=500, total_tokens=600, top_k=top_k, dense=dense)
            feed(executor, slot, ids[:500], 500, all_logits=False)
        rows = [step(executor, [0, 1], i) for i in ids[500:]]
        assert max(float(np.abs(sealed - dense_row).max()) for sealed, dense_row in rows) > 10 * SAME


# --- the demo model ---------------------------------------------------------------------------------------------------


def test_smollm2_on_real_text(demo_engine: Built, demo_tokens: list[int]) -> None:
    """1,000 tokens: a dense row at all positions against transformers, a sealed row beside it while it generates.

    The dense row's prompt goes in at once, the sealed one's in stretches of 64.
    """
    prompt, total = 800, 1000
    executor, state = executor_of(demo_engine.engine, threads=2)
    for slot, dense in ((0, True), (1, False)):
        state.allocate(slot, prompt_tokens=prompt, total_tokens=total, top_k=128, dense=dense)
    got = [feed(executor, 0, demo_tokens[:prompt], prompt, all_logits=True)]
    first = feed(executor, 1, demo_tokens[:prompt], 64, all_logits=False)
    assert np.abs(first[0] - got[0][-1]).max() < SAME
    for token in demo_tokens[prompt:]:
        dense_row, sealed = step(executor, [0, 1], token)
        assert np.abs(sealed - dense_row).max() < SAME
        got.append(dense_row[None])
    assert state.is_sealed(1) and not state.is_sealed(0)
    statistics = state.statistics(1)
    assert statistics.generated_sealed == (total - 64) // 8 * 8 - (prompt + 1 - 64) // 8 * 8
    assert statistics.residual is not None and statistics.residual < 1e-5
    want = transformers_logits(demo_engine, demo_tokens)
    assert np.abs(np.concatenate(got) - want).max() < LOGITS
