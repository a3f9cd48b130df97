"""Binding a state to the stream of an engine; no GPU is needed."""

from __future__ import annotations

import pytest

from tests.runtime.dry_state import STREAM, make
from trtllm_shadowkv.errors import ConfigError, StateError
from trtllm_shadowkv.library import Library
from trtllm_shadowkv.runtime.cuda_state import CudaState


@pytest.mark.parametrize("stream", [0, 1, 2])  # null, cudaStreamLegacy, cudaStreamPerThread
def test_default_streams_are_refused(state: CudaState, stream: int) -> None:
    with pytest.raises(ConfigError, match="default stream"):
        state.bind(stream)
    state.bind(STREAM)


def test_one_stream_a_state_and_one_state_a_stream(state: CudaState, library: Library) -> None:
    state.bind(STREAM)
    for stream in (STREAM, STREAM + 16):
        with pytest.raises(StateError, match="the state is bound"):
            state.bind(stream)
    with make(library) as other:
        with pytest.raises(StateError, match="another state is bound to this stream"):
            other.bind(STREAM)
        other.bind(STREAM + 16)
        state.unbind()
        state.unbind()
        state.bind(STREAM)


def test_a_closed_state_leaves_its_stream(state: CudaState, library: Library) -> None:
    with make(library) as other:
        other.bind(STREAM)
    state.bind(STREAM)
