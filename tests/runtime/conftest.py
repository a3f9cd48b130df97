"""Dry states for the tests of a CUDA state's books; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.dry_state import make
from trtllm_shadowkv.library import Library, load
from trtllm_shadowkv.runtime.cuda_state import CudaState


@pytest.fixture(scope="module")
def library() -> Library:
    return load()


@pytest.fixture
def state(library: Library) -> Iterator[CudaState]:
    with make(library) as made:
        yield made
