"""One tiny engine for all tests of ``LLM``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_llm import assert_drained, build_tiny_llm
from trtllm_shadowkv import LLM


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llm(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="session")
def shared(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, threads=1) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM; whatever a test did with it, nothing may be left of it."""
    yield shared
    assert_drained(shared)
