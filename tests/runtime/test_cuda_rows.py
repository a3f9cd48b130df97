"""The books of a CUDA state's rows: pages, sealing, steps, and what is refused; no GPU is needed.

The library must be there (`make test` compiles it).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.dry_state import PAGE, SEALED_PAGE, STREAM, allocate, make, step
from trtllm_shadowkv.errors import ConfigError, StateError
from trtllm_shadowkv.library import Library
from trtllm_shadowkv.runtime.cuda_state import CudaState


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 4}, "slot is 4; expected 0 to 3"),
        ({"total": 0}, "total_tokens is 0"),
        ({"total": 4097}, "total_tokens is 4097; expected 1 to 4096"),
        ({"prompt": 0}, "prompt_tokens is 0"),
        ({"prompt": 101}, "prompt_tokens is 101; expected 1 to 100"),
        ({"value_addresses": None}, "value_addresses is null; expected a device address for each layer"),
        ({"value_addresses": [16, 24]}, r"value_addresses\[1\] is address 24; expected .* multiple of 16"),
        ({"value_addresses": [0, 16]}, r"value_addresses\[0\] is null"),
        ({"value_stride": 7}, "value_stride is 7; expected 8 to"),
        ({"stream": 0}, "stream is the null stream"),
        ({"stream": 1}, "stream is the null stream"),
    ],
)
def test_allocation_refuses(state: CudaState, changes: dict[str, Any], message: str) -> None:
    # A chunk is sealed one step before it leaves the window: floor((100 + 1 - 32) / 8) = 8 chunks.
    arguments = {"slot": 0, "prompt": 80, "total": 100, "value_stride": 8, **changes}
    with pytest.raises(ConfigError, match=message):
        allocate(state, **arguments)
    allocate(state, 0, 80, 100, value_stride=8)


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_out_of_range_is_refused(state: CudaState, top_k: int) -> None:
    with pytest.raises(StateError, match=f"top_k is {top_k}; expected from 1 to 4"):
        allocate(state, 0, 10, 20, top_k=top_k)
    with pytest.raises(ConfigError, match=f"top_k is {top_k}; expected 1 to 4"):
        state._call("tsk_state_allocate", 0, 10, 20, top_k, 0, None, 0, STREAM)


def test_a_slot_in_use_is_refused(state: CudaState) -> None:
    allocate(state, 1, 10, 20)
    with pytest.raises(StateError, match="slot 1 is in use"):
        allocate(state, 1, 10, 20)
    with pytest.raises(StateError, match="slot 1 is in use; expected a free slot"):
        state._call("tsk_state_allocate", 1, 10, 20, 4, 0, None, 0, STREAM)


def test_a_free_slot_has_nothing_to_say(state: CudaState) -> None:
    for call in (state.row, state.length, state.is_sealed, state.must_seal, state.live_pages_of, state.sealed_row_of):
        with pytest.raises(StateError, match="slot 2 is free; expected one that was allocated"):
            call(2)
    with pytest.raises(StateError, match="slot 2 is free"):
        state.load_row(2, 1, STREAM)
    with pytest.raises(StateError, match="slot 2 is free"):
        state.statistics(2, STREAM)
    state.release(2)  # nothing to do
    with pytest.raises(ConfigError, match="slot is 4"):
        state.release(4)


@pytest.mark.parametrize(
    ("prompt", "total", "dense", "live", "sealed"),
    [
        (1, 1, False, 1, 0),
        (64, 64, False, 1, 0),  # within the limit
        (60, 65, False, 2, 1),  # a ring of 2 pages, and (65 + 1 - 32) // 8 = 4 chunks
        (300, 1000, False, 3, 2),  # 121 chunks of 8
        (1, 4096, False, 2, 8),  # 508 chunks
        (300, 1000, True, 8, 0),
        (1, 1025, True, 9, 0),
        (100, 551, False, 2, 2),  # the 65th chunk is sealed, though never selected
        (100, 550, False, 2, 1),
    ],
)
def test_pages_of_a_row(state: CudaState, prompt: int, total: int, dense: bool, live: int, sealed: int) -> None:
    allocate(state, 0, prompt, total, dense=dense)
    row = state.row(0)
    assert (row.live_pages, row.sealed_pages, row.sealed_row) == (live, sealed, 0 if sealed else -1)
    assert (row.length, row.prompt_tokens, row.total_tokens, row.top_k) == (0, prompt, total, 4)
    assert (row.dense, row.prompt_done, row.sealed, row.must_seal) == (dense, False, False, False)


def test_out_of_capacity_names_what_is_short_and_takes_nothing(library: Library) -> None:
    with make(library, live_pages=4, sealed_pages=2, sealed_rows=1) as state:
        with pytest.raises(StateError, match="4 free live pages; expected at least 5"):
            allocate(state, 0, 1, 5 * PAGE, dense=True)
        with pytest.raises(StateError, match="2 free sealed pages; expected at least 3"):
            allocate(state, 0, 100, 1200)
        allocate(state, 0, 100, 600)
        with pytest.raises(StateError, match="0 free sealed pages"):
            allocate(state, 1, 100, 600)
        allocate(state, 1, 1, 2 * PAGE, dense=True)
        with pytest.raises(StateError, match="0 free live pages"):
            allocate(state, 2, 1, 1)
        state.release(0)
        allocate(state, 0, 100, 600)
    with make(library, sealed_rows=1) as state:
        allocate(state, 0, 100, 600)
        with pytest.raises(StateError, match="0 free sealed rows; expected at least 1"):
            allocate(state, 1, 100, 600)
    with make(library, sealed_rows=0, sealed_pages=0) as state:
        with pytest.raises(StateError, match="0 free sealed pages"):
            allocate(state, 0, 100, 600)
        allocate(state, 0, 100, 600, dense=True)


def test_loading_refuses(state: CudaState) -> None:
    allocate(state, 0, 100, 600)
    for length in (0, 101, 600):
        with pytest.raises(ConfigError, match=f"length is {length}; expected 1 to 100"):
            state.load_row(0, length, STREAM)
    with pytest.raises(ConfigError, match="stream is the null stream"):
        state.load_row(0, 100, 0)
    state.load_row(0, 10, STREAM)
    state.load_row(0, 20, STREAM)  # again, as long as it is not sealed
    state.load_row(0, 100, STREAM)
    assert state.is_sealed(0)
    with pytest.raises(StateError, match="slot 0 is sealed"):
        state.load_row(0, 100, STREAM)


def test_a_loaded_row_is_sealed_where_its_next_token_is_over_the_limit(state: CudaState) -> None:
    for length, sealed in ((63, False), (64, True)):
        allocate(state, 0, 64, 100)
        state.load_row(0, length, STREAM)
        row = state.row(0)
        assert (row.sealed, row.must_seal, row.prompt_done) == (sealed, False, True)
        assert row.published == row.prompt_chunks == (4 if sealed else 0)
        state.release(0)
    allocate(state, 0, 64, 64)  # at its limit, but never over it
    state.load_row(0, 64, STREAM)
    assert not state.is_sealed(0)
    assert not state.must_seal(0)


@pytest.mark.parametrize("window", [8, 32, 96, 128, 136, 256])
def test_live_pages_of_a_sealed_row_are_those_of_its_window(library: Library, window: int) -> None:
    ring = (window + 126) // PAGE + 1
    with make(library, config={"window": window, "dense_limit": window + 7}, max_tokens=2048) as state:
        for length in range(window + 7, window + 600, 13):
            allocate(state, 0, length, 2048)
            before = state.live_pages_of(0)
            state.load_row(0, length, STREAM)
            after, row = state.live_pages_of(0), state.row(0)
            assert row.published == (length + 1 - window) // 8
            assert len(after) == row.live_pages == ring == state.buffers()["ring"]
            assert len(set(after)) == ring
            assert set(after) <= set(before)
            for index in range(row.published * 8 // PAGE, (length - 1) // PAGE + 1):
                assert after[index % ring] == before[index]
            state.release(0)


@pytest.mark.parametrize("chunk", [8, 16])
def test_a_window_never_needs_a_page_twice(chunk: int) -> None:
    """In every step the pages of the window, the chunk being sealed among it, lie in different entries of the ring."""
    for window in range(chunk, 400, chunk):
        ring = (window + 126) // PAGE + 1
        most = 0
        for length in range(window + chunk, window + chunk + 2 * PAGE):
            first = (length - window) // chunk * chunk
            most = max(most, (length - 1) // PAGE - first // PAGE + 1)
        assert most == ring  # enough, and no more than is needed


def test_steps(state: CudaState) -> None:
    allocate(state, 0, 70, 90)
    allocate(state, 1, 60, 90)
    allocate(state, 2, 60, 90, dense=True)
    for slot, length in enumerate((70, 60, 60)):
        with pytest.raises(StateError, match=f"slot {slot} is not loaded"):
            step(state, slot)
        state.load_row(slot, length, STREAM)
    for number in range(1, 5):
        positions = state.begin_generation([0, -1, 2, 1, -1])
        assert list(positions) == [69 + number, 0, 59 + number, 59 + number, 0]
        assert [state.length(slot) for slot in range(3)] == [70 + number, 60 + number, 60 + number]
        assert state.row(0).published == (70 + number - 32) // 8
        assert [state.must_seal(slot) for slot in range(3)] == [False, number == 4, False]
    with pytest.raises(StateError, match="slot 1 holds 64 tokens and its dense limit is 64; expected a sealed row"):
        step(state, 0, 2, 1)
    assert [state.length(slot) for slot in range(3)] == [74, 64, 64]  # all or none
    state.load_row(1, 64, STREAM)
    assert state.is_sealed(1)
    for _ in range(16):
        step(state, 1, 0)
    assert (state.length(0), state.row(0).published) == (90, 7)
    assert state.statistics(0, STREAM).sealed_tokens == 56
    assert state.statistics(0, STREAM).generated_sealed == 8 * 3
    with pytest.raises(StateError, match="slot 0 holds 90 tokens; expected fewer than its total of 90"):
        step(state, 1, 0)
    assert state.length(1) == 80


def test_passes_that_are_refused(state: CudaState) -> None:
    allocate(state, 0, 10, 20)
    allocate(state, 1, 10, 20)
    state.load_row(0, 10, STREAM)
    with pytest.raises(ConfigError, match="batch is 7; expected 1 to 6"):
        step(state, 0, *[-1] * 6)
    with pytest.raises(ConfigError, match="batch is 0"):
        step(state)
    for batch, error, message in (
        ([0, 0], ConfigError, "slot 0 is twice in the batch; expected each slot once"),
        ([0, 3], StateError, "slot 3 is free"),
        ([0, 4], ConfigError, "slot is 4"),
        ([0, 99], ConfigError, "slot is 99"),
        ([0, -2], ConfigError, "slot is -2"),
        ([0, 1], StateError, "slot 1 is not loaded"),
    ):
        with pytest.raises(error, match=message):
            step(state, *batch)
    assert state.length(0) == 10
    assert list(state.begin_generation([-1, 0, -1])) == [0, 10, 0]


def test_random_traffic_keeps_the_books(library: Library) -> None:
    rng = random.Random(0)
    with make(library, slots=8, sealed_rows=5, live_pages=30, sealed_pages=14) as state:
        lengths: dict[int, int] = {}
        refused = 0
        for _ in range(1000):
            slot = rng.randrange(8)
            if slot not in lengths:
                total = rng.randint(1, 1500)
                try:
                    allocate(state, slot, rng.randint(1, total), total, dense=rng.random() < 0.2)
                except StateError as e:
                    refused += 1
                    assert " free " in str(e)
                    continue
                lengths[slot] = state.row(slot).prompt_tokens
                state.load_row(slot, lengths[slot], STREAM)
            elif rng.random() < 0.3:
                state.release(slot)
                del lengths[slot]
            else:
                ready = [s for s in lengths if lengths[s] < state.row(s).total_tokens]
                for s in ready:
                    if state.must_seal(s):
                        state.load_row(s, lengths[s], STREAM)
                chosen = rng.sample(ready, min(len(ready), 6))
                if chosen:
                    step(state, *chosen)
                for s in chosen:
                    lengths[s] += 1
            check_books(state, lengths)
        assert refused > 10
        for slot in list(lengths):
            state.release(slot)
        allocate(state, 0, 30 * PAGE, 30 * PAGE, dense=True)  # everything came back


def check_books(state: CudaState, lengths: dict[int, int]) -> None:
    rows = {slot: state.row(slot) for slot in lengths}
    assert {slot: row.length for slot, row in rows.items()} == lengths
    assert_distinct([p for s in rows for p in state.live_pages_of(s)], state.live_pages)
    assert_distinct([p for s in rows for p in state.sealed_pages_of(s)], state.sealed_pages)
    assert_distinct([row.sealed_row for row in rows.values() if row.sealed_row >= 0], state.sealed_rows)
    for row in rows.values():
        assert row.published == 0 or row.published * 8 <= row.sealed_pages * SEALED_PAGE


def assert_distinct(ids: Sequence[int], count: int) -> None:
    assert len(set(ids)) == len(ids)
    assert all(0 <= i < count for i in ids)
