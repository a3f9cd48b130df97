"""The issue's own measure of accuracy: a number hidden in real text is found as often as with dense attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.eval.passphrase import passphrase
from trtllm_shadowkv.runtime.executors.cpu_rows import Live
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor
from trtllm_shadowkv.runtime.scheduler import stretches
from trtllm_shadowkv.runtime.value_pool import ValuePool
from trtllm_shadowkv.tokenizer import Tokenizer

CONFIG = ShadowKVConfig(top_k=64, rank=96, outliers=8, dense_limit=1024)
ANSWER = 10
DEPTHS = 10


@pytest.fixture(scope="module")
def engine_dir(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "engine"
    build_engine(demo_model, folder, BuildConfig(shadowkv=CONFIG))
    return folder


@pytest.fixture(scope="module")
def executor(engine_dir: Path) -> OnnxCpuExecutor:
    from trtllm_shadowkv.engine_directory import EngineDirectory

    engine = EngineDirectory.open(engine_dir)
    return OnnxCpuExecutor(engine, CpuState(engine.model, CONFIG, ValuePool(1 << 33)))


def decode(executor: OnnxCpuExecutor, token: int) -> list[int]:
    tokens = [token]
    while len(tokens) < ANSWER:
        if executor.state.must_seal(0):
            executor.state.seal_prompt(0)
        tokens.append(int(executor.generation([0], tokens[-1:])[0].argmax()))
    return tokens


@dataclass
class Read:
    """A prompt that was read, and its keys and values before it was sealed; another may begin in the same way."""

    prompt: list[int]
    live: Live

    def begin(self, prompt: list[int], live: Live) -> int:
        """Copy what both prompts begin with; returns its tokens."""
        pairs = zip(self.prompt, prompt[:-1], strict=False)
        shared = next((i for i, (ours, other) in enumerate(pairs) if ours != other), 0)
        live.keys[:, :, :shared] = self.live.keys[:, :, :shared]
        live.values[:, :, :shared] = self.live.values[:, :, :shared]
        return shared


def both_answers(executor: OnnxCpuExecutor, prompt: list[int], before: Read | None) -> tuple[list[list[int]], Read]:
    """Greedy answers of dense attention and of ShadowKV. They share the prefill, which is the same in both: dense
    decoding only appends, so taking the row back to the end of its prompt leaves what prefill made."""
    state = executor.state
    assert isinstance(state, CpuState)
    total = len(prompt) + ANSWER
    state.allocate(0, prompt_tokens=len(prompt), total_tokens=total, top_k=CONFIG.top_k, dense=True)
    try:
        row = state.rows[0]
        read = Read(prompt, row.live)
        shared = row.length = 0 if before is None else before.begin(prompt, row.live)
        for start, length in stretches(len(prompt) - shared, 1024):
            begin, end = shared + start, shared + start + length
            logits = executor.context(0, prompt[begin:end], begin, end == len(prompt), [length - 1])
        first = int(logits[0].argmax())
        dense = decode(executor, first)
        row.length, row.shape = len(prompt), replace(row.shape, limit=CONFIG.limit)
        sparse = decode(executor, first)
        assert state.is_sealed(0)
    finally:
        state.release(0)
    return [dense, sparse], read


@pytest.mark.parametrize("tokens", [2000, 4000])
def test_pass_phrase_is_found_as_often_as_with_dense(executor: OnnxCpuExecutor, engine_dir: Path, tokens: int) -> None:
    tokenizer = Tokenizer.load(engine_dir)
    found, read = [0, 0], None
    for i in reversed(range(DEPTHS)):  # each prompt is the one before up to where its number is hidden
        hidden = passphrase(tokenizer, tokens, (i + 0.5) / DEPTHS, seed=i)
        assert abs(len(hidden.prompt_ids) - tokens) < 20
        answers, read = both_answers(executor, hidden.prompt_ids, read)
        for which, answer in enumerate(answers):
            found[which] += hidden.found(tokenizer.decode(answer))
    print(f"{tokens} tokens: dense {found[0]}/{DEPTHS}, ShadowKV {found[1]}/{DEPTHS}")
    assert found[0] >= DEPTHS // 2  # the task is one that the model can do
    assert found[1] >= found[0] - 1
