"""What rows take of a GPU state and its value pool, by the books of a dry state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.dry_state import STREAM, make
from tests.runtime.test_pinned_value_pool import Maker
from trtllm_shadowkv.errors import ConfigError, NoRoomError, StateError
from trtllm_shadowkv.library import Library
from trtllm_shadowkv.runtime.executors.gpu_state import Capacity, GpuState, RowPages
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool

SLOTS, TOKENS = 4, 4096


def capacity_of(library: Library, device_bytes: int, **changes: Any) -> Capacity:
    def size_of(**sizes: int) -> int:
        with make(library, slots=SLOTS, max_batch=SLOTS, max_tokens=TOKENS, **sizes, **changes) as state:
            return state.device_bytes

    with make(library, **changes) as shape:
        return Capacity.within(device_bytes, SLOTS, TOKENS, shape.config, size_of)


def made(library: Library, device_bytes: int, **changes: Any) -> GpuState:
    c = capacity_of(library, device_bytes, **changes)
    pages = {"live_pages": c.live_pages, "sealed_pages": c.sealed_pages, "sealed_rows": c.sealed_rows}
    cuda = make(library, slots=SLOTS, max_batch=SLOTS, max_tokens=TOKENS, **pages, **changes)
    return GpuState(cuda, PinnedValuePool(1 << 30, 1, Maker()) if c.sealed_rows else None, c, STREAM)


@pytest.fixture
def gpu(library: Library) -> Iterator[GpuState]:
    state = made(library, 200 << 20)
    yield state
    state.close()


def test_fp8_values_take_half_the_host_memory_and_fp8_landmarks_less_of_the_device(library: Library) -> None:
    rows = {}
    for stored in ("auto", "fp8"):
        state = made(library, 200 << 20, config={"value_dtype": stored, "landmark_dtype": stored})
        rows[stored] = state.footprint(1000, 1100, False)
        assert state.cuda.value_format == state.cuda.landmark_format == {"auto": "element", "fp8": "e4m3"}[stored]
        state.close()
    assert rows["fp8"].host < 0.51 * rows["auto"].host  # in whole pages
    assert rows["fp8"].sealed < rows["auto"].sealed
    assert rows["fp8"].live == rows["auto"].live


def test_more_rows_than_a_state_has_pages_for(library: Library) -> None:
    """2^20 pages at most of either kind, whatever the memory would hold."""

    def size_of(**sizes: int) -> int:
        with make(library, slots=1024, max_batch=1024, max_tokens=1 << 18, **sizes) as state:
            return state.device_bytes

    with make(library) as state:
        config = state.config
    c = Capacity.within(1 << 46, 1024, 1 << 18, config, size_of)
    assert c.live_pages == 1 << 20
    assert c.sealed_pages < 1 << 20


@pytest.mark.parametrize("megabytes", [20, 24, 27, 40, 60, 2000])
def test_device_memory_is_used_as_far_as_rows_can_use_it(library: Library, megabytes: int) -> None:
    c = capacity_of(library, megabytes << 20)

    def size(live: int, sealed: int) -> int:
        pages = {"live_pages": live, "sealed_pages": sealed, "sealed_rows": c.sealed_rows}
        with make(library, slots=SLOTS, max_batch=SLOTS, max_tokens=TOKENS, **pages) as state:
            return state.device_bytes

    with make(library) as state:
        longest = RowPages.of(state.config, TOKENS, TOKENS, dense=False)
    most_live, most_sealed = SLOTS * longest.live, SLOTS * longest.sealed
    assert longest.live + (SLOTS - 1) * longest.kept <= c.live_pages <= most_live
    assert longest.sealed <= c.sealed_pages <= most_sealed
    assert size(c.live_pages, c.sealed_pages) <= megabytes << 20
    assert c.live_pages == most_live or size(c.live_pages + 1, c.sealed_pages) > megabytes << 20
    assert c.sealed_pages == most_sealed or size(c.live_pages, c.sealed_pages + 1) > megabytes << 20
    if megabytes == 2000:
        assert (c.live_pages, c.sealed_pages) == (most_live, most_sealed)


def test_too_little_device_memory_says_how_much_is_enough(library: Library) -> None:
    with pytest.raises(ConfigError, match=r"there are 1,048,576 bytes .*; expected at least [\d,]+") as e:
        capacity_of(library, 1 << 20)
    least = int(str(e.value).split("at least ")[1].split(", for")[0].replace(",", ""))
    assert (
        capacity_of(library, least).sealed_pages
        == RowPages.of(make(library).config, TOKENS, TOKENS, dense=False).sealed
    )
    with pytest.raises(ConfigError):
        capacity_of(library, least - 1)


def test_a_state_of_dense_rows_has_live_pages_alone(library: Library) -> None:
    state = made(library, 200 << 20, config={"attention": "dense"})
    assert (state.capacity.sealed_pages, state.capacity.sealed_rows, state.values) == (0, 0, None)
    state.allocate(0, prompt_tokens=4000, total_tokens=4096, top_k=4, dense=False)
    assert state.footprint(4000, 4096, False) == state.footprint(1, 4096, True)
    assert state.footprint(4000, 4096, False).sealed == state.footprint(4000, 4096, False).host == 0
    state.release(0)
    state.close()


def test_a_footprint_is_what_a_row_takes(gpu: GpuState) -> None:
    assert gpu.values is not None
    rng = random.Random(3)
    for _ in range(300):
        total = rng.choice([rng.randint(1, 100), rng.randint(1, TOKENS)])
        prompt, dense = rng.randint(1, total), rng.random() < 0.2
        need = gpu.footprint(prompt, total, dense)
        gpu.allocate(0, prompt_tokens=prompt, total_tokens=total, top_k=4, dense=dense)
        row = gpu.cuda.row(0)
        assert need.live == row.live_pages * gpu.capacity.live_bytes
        assert need.sealed == row.sealed_pages * gpu.capacity.sealed_bytes
        assert gpu.values.used <= need.host <= 1.001 * gpu.values.used  # with its share of what slabs leave over
        gpu.begin_pass("context", [0], 0, prompt, True)
        if gpu.must_seal(0):
            # A dry state seals nothing, but keeps the books of it.
            gpu.seal_prompt(0)
            assert need.once_sealed().live == gpu.cuda.row(0).live_pages * gpu.capacity.live_bytes
        gpu.release(0)
        assert gpu.values.used == 0
        gpu.release(0)


def test_what_cannot_be_had_takes_nothing(gpu: GpuState) -> None:
    assert gpu.values is not None
    gpu.allocate(0, prompt_tokens=1000, total_tokens=4096, top_k=4, dense=False)
    used = gpu.values.used
    for problem, changes in ((StateError, {"slot": 0}), (StateError, {"top_k": 5}), (ConfigError, {"slot": 99})):
        row: dict[str, Any] = {"slot": 1, "prompt_tokens": 9, "total_tokens": 4096, "top_k": 4, "dense": False}
        row |= changes
        with pytest.raises(problem):
            gpu.allocate(row.pop("slot"), **row)
        assert gpu.values.used == used
    small = PinnedValuePool(1 << 30, 1, Maker())
    gpu.values, whole = small, gpu.values
    taken = small.take(1 << 29, 2)
    with pytest.raises(NoRoomError, match="value pool"):
        gpu.allocate(1, prompt_tokens=9, total_tokens=4096, top_k=4, dense=False)
    small.give(taken)
    gpu.allocate(1, prompt_tokens=9, total_tokens=4096, top_k=4, dense=False)
    gpu.release(1)
    gpu.values = whole


def test_pages_that_run_out_are_no_room(library: Library) -> None:
    gpu = GpuState(make(library, live_pages=100), None, Capacity(100, 12, 2, 1, 1, 1), STREAM)
    row: dict[str, Any] = {"prompt_tokens": 4096, "total_tokens": 4096, "top_k": 4, "dense": True}
    for slot in range(3):
        gpu.allocate(slot, **row)
    with pytest.raises(NoRoomError, match="4 free live pages; expected at least 32"):
        gpu.allocate(3, **row)
    gpu.release(1)
    gpu.allocate(3, **row)
    gpu.close()
