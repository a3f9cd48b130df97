"""The books of a CUDA state while prompts are read and sealed, and what is refused; no GPU is needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tests.runtime.dry_state import PAGE, STREAM, allocate, make, step
from trtllm_shadowkv.errors import ConfigError, StateError
from trtllm_shadowkv.library import Library
from trtllm_shadowkv.runtime.cuda_state import CudaState


def read(state: CudaState, slot: int, stretches: Sequence[int]) -> None:
    """Announce stretches of these lengths, from where the row is."""
    for length in stretches:
        start = state.length(slot)
        last = start + length == state.row(slot).prompt_tokens
        state.begin_pass("context", [slot], start, length, last, stream=STREAM)


def test_a_prompt_is_done_with_its_last_token(state: CudaState) -> None:
    allocate(state, 0, 50, 60)
    for done, length in ((7, 7), (8, 1), (49, 41)):
        read(state, 0, [length])
        row = state.row(0)
        assert (row.length, row.prompt_done, row.must_seal) == (done, False, False)
        with pytest.raises(StateError, match="slot 0 is not loaded"):
            step(state, 0)
    read(state, 0, [1])
    assert state.row(0).prompt_done
    step(state, 0)
    assert state.length(0) == 51


def test_a_long_prompt_must_be_sealed_and_keeps_its_window(state: CudaState) -> None:
    allocate(state, 0, 1000, 1100)
    read(state, 0, [400, 500, 100])
    before, row = state.live_pages_of(0), state.row(0)
    assert (row.must_seal, row.sealed, len(before)) == (True, False, 8)
    with pytest.raises(StateError, match="expected a sealed row; seal it first"):
        step(state, 0)
    state.seal_prompt(0, STREAM)
    row = state.row(0)
    assert (row.must_seal, row.sealed, row.published, row.prompt_chunks) == (False, True, 121, 121)
    after = state.live_pages_of(0)
    assert len(after) == 2
    assert set(after) <= set(before)
    assert after[999 // PAGE % 2] == before[999 // PAGE]
    assert state.statistics(0, STREAM).sealed_tokens == 968
    step(state, 0)
    with pytest.raises(StateError, match="slot 0 is sealed already; expected a row that the next token takes over"):
        state.seal_prompt(0, STREAM)


def test_a_row_that_outgrows_its_limit_is_sealed_then(state: CudaState) -> None:
    allocate(state, 0, 60, 80)
    read(state, 0, [60])
    for _ in range(4):
        with pytest.raises(StateError, match=r"slot 0 holds 6\d tokens and stays dense"):
            state.seal_prompt(0, STREAM)
        step(state, 0)
    assert state.must_seal(0)
    state.seal_prompt(0, STREAM)
    assert state.row(0).published == (65 - 32) // 8
    step(state, 0)


def test_sealing_refuses(state: CudaState) -> None:
    with pytest.raises(StateError, match="slot 0 is free"):
        state.seal_prompt(0, STREAM)
    allocate(state, 0, 200, 300)
    read(state, 0, [199])
    with pytest.raises(StateError, match="slot 0 has only a part of its prompt"):
        state.seal_prompt(0, STREAM)
    allocate(state, 1, 200, 300, dense=True)
    read(state, 1, [200])
    with pytest.raises(StateError, match="slot 1 holds 200 tokens and stays dense"):
        state.seal_prompt(1, STREAM)
    with pytest.raises(ConfigError, match="slot is 9"):
        state.seal_prompt(9, STREAM)
    read(state, 0, [1])
    with pytest.raises(ConfigError, match="stream is the null stream"):
        state.seal_prompt(0, 0)
    state.seal_prompt(0, STREAM)


def test_stretches_that_are_refused(state: CudaState) -> None:
    allocate(state, 0, 100, 200)
    for slots, start, length, last in (
        ([0], 1, 10, False),
        ([0], 0, 0, False),
        ([0, 1], 0, 10, False),
        ([2], 0, 1, False),
    ):
        with pytest.raises(StateError):
            state.begin_pass("context", slots, start, length, last, stream=STREAM)
    for length, last in ((99, True), (100, False)):
        with pytest.raises(StateError, match="expected a prompt of 100"):
            state.begin_pass("context", [0], 0, length, last, stream=STREAM)
    with pytest.raises(ConfigError, match="length is 101; expected 1 to 100"):
        state.begin_pass("context", [0], 0, 101, False, stream=STREAM)
    with pytest.raises(ConfigError, match="stream is the null stream"):
        state.begin_pass("context", [0], 0, 10, False)
    with pytest.raises(ConfigError, match="start is 5; expected 0 to 0"):
        state._call("tsk_state_begin_context", 0, 5, 10, STREAM)
    assert state.length(0) == 0
    read(state, 0, [100])
    with pytest.raises(StateError, match="the row holds 100"):
        state.begin_pass("context", [0], 100, 1, False, stream=STREAM)
    with pytest.raises(StateError, match="slot 0 has its whole prompt of 100 tokens"):
        state._call("tsk_state_begin_context", 0, 100, 1, STREAM)


def test_ops_follow_the_pass(state: CudaState) -> None:
    allocate(state, 0, 100, 200)
    allocate(state, 1, 10, 20)
    read(state, 0, [60])
    address = 1 << 20
    ops: tuple[Callable[[int], None], ...] = (
        lambda tokens: state.landmark_topk(0, address, address, tokens, address, None, STREAM),
        lambda tokens: state.key_reconstruct(0, tokens, STREAM),
        lambda tokens: state.sparse_attention(0, address, tokens, address, STREAM),
    )
    for op in ops:
        for tokens in (1, 59, 61):
            with pytest.raises(ConfigError, match=f"batch is {tokens}; expected 60 to 60"):
                op(tokens)
        with pytest.raises(StateError, match="dry"):  # everything else is as it should be
            op(60)
    with pytest.raises(ConfigError, match="qkv is address 8"):
        state.landmark_topk(0, 8, address, 60, address, None, STREAM)
    with pytest.raises(StateError, match="this is a context pass; expected a generation pass"):
        state.step_prologue(address, 1, STREAM)
    with pytest.raises(StateError, match="this is a context pass; expected a generation pass"):
        state.stage("append", 0, 0, 1, 1, qkv=address, positions=address, q=address, stream=STREAM)
    read(state, 1, [10])
    step(state, 1)
    with pytest.raises(ConfigError, match="batch is 60; expected 1 to 6"):
        state.key_reconstruct(0, 60, STREAM)


def test_release_in_the_middle_leaves_nothing(library: Library) -> None:
    """Rows that are abandoned at every point; afterwards the state has room for what it had room for at first."""
    with make(library) as state:
        random_ = random.Random(0)
        for _ in range(200):
            slot = random_.randrange(4)
            state.release(slot)
            prompt = random_.randrange(1, 900)
            try:
                allocate(state, slot, prompt, prompt + 100)
            except StateError:
                continue
            left = random_.randrange(prompt + 1)
            while left > 0:
                length = random_.randrange(1, left + 1)
                read(state, slot, [length])
                left -= length
            if state.must_seal(slot) and random_.random() < 0.7:
                state.seal_prompt(slot, STREAM)
        for slot in range(4):
            state.release(slot)
        allocate(state, 0, 40 * PAGE // 2, 40 * PAGE // 2, dense=True)
        allocate(state, 1, 40 * PAGE // 2, 40 * PAGE // 2, dense=True)
        state.release(0)
        state.release(1)
        allocate(state, 2, 100, 3000)
        allocate(state, 3, 100, 3000)
