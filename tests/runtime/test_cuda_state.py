"""The C ABI of a CUDA state as far as it goes without a GPU: its structures, and every refusal.

The library must be there (`make test` compiles it).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.dry_state import PAGE, SEALED_PAGE, STREAM, allocate, make, step
from trtllm_shadowkv.errors import ConfigError, MissingDependencyError, StateError
from trtllm_shadowkv.library import ENVIRONMENT, Library
from trtllm_shadowkv.native_state import DRY, Buffers, NativeApi, Row, StateConfig, Statistics
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab

ROOT = Path(__file__).parents[2]
C_API = ROOT / "plugins/state/c_api.h"


@pytest.fixture(scope="module")
def api(library: Library) -> NativeApi:
    return NativeApi(library)


# --- the ABI ----------------------------------------------------------------------------------------------------------


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    structures = {
        "tsk_state_config": StateConfig,
        "tsk_buffers": Buffers,
        "tsk_row": Row,
        "tsk_statistics": Statistics,
    }
    lines, expected = [], []
    for name, structure in structures.items():
        fields = [field[0] for field in structure._fields_]
        lines += [f'    printf("%zu\\n", offsetof({name}, {field}));' for field in fields]
        lines.append(f'    printf("%zu\\n", sizeof({name}));')
        expected += [getattr(structure, field).offset for field in fields] + [ctypes.sizeof(structure)]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    head = f'#include "{C_API}"\n#include <stddef.h>\n#include <stdio.h>\n'
    source.write_text("\n".join([head, "int main(void)", "{", *lines, "    return 0;", "}", ""]))
    subprocess.run(["cc", "-std=c11", "-Wall", "-Werror", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


# --- creation ---------------------------------------------------------------------------------------------------------

GOOD: dict[str, int] = {
    "device": DRY,
    "element": 1,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": 64,
    "chunk_size": 8,
    "rank": 16,
    "top_k": 4,
    "outliers": 2,
    "window": 32,
    "cache_slots": 8,
    "slots": 4,
    "sealed_rows": 2,
    "max_batch": 6,
    "live_pages": 40,
    "sealed_pages": 12,
    "max_tokens": 4096,
    "dense_limit": 64,
}


def create(api: NativeApi, changes: dict[str, Any]) -> None:
    """Create a state of GOOD with changes, and destroy it."""
    values: dict[str, Any] = {"inverse_frequencies": (ctypes.c_float * 64)(*[0.5] * 64), **GOOD, **changes}
    state = ctypes.c_void_p()
    api("tsk_state_create", ctypes.byref(StateConfig(**values)), ctypes.byref(state))
    api("tsk_state_destroy", state.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": -2}, "device is -2"),
        ({"element": 2}, "element is 2; expected 0 to 1"),
        ({"landmark_format": -1}, "landmark_format is -1"),
        ({"value_format": 2}, "value_format is 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_kv_heads": 33, "num_heads": 33}, "num_kv_heads is 33; expected 1 to 32"),
        ({"num_heads": 7}, "num_heads is 7 with num_kv_heads 2"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 34}, "expected 1 to 16 query heads for each KV head"),
        ({"head_size": 80}, "head_size is 80; expected 64, 96 or 128"),
        ({"chunk_size": 12}, "chunk_size is 12; expected 8 or 16"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": 24}, "rank is 24; expected a multiple of 16 up to 128"),
        ({"rank": 144}, "rank is 144"),
        ({"rank": 528, "num_kv_heads": 8, "head_size": 128}, "rank is 528; expected a multiple of 16 up to 512"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 2049, "cache_slots": 8192}, "top_k is 2049"),
        ({"outliers": 0}, "outliers is 0"),
        ({"outliers": 1025}, "outliers is 1025"),
        ({"cache_slots": 3}, "cache_slots is 3; expected 4 to 8192"),
        ({"cache_slots": 8193}, "cache_slots is 8193"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": (1 << 21) + 1}, "max_tokens is 2097153; expected 1 to 2097152"),
        ({"window": 0}, "window is 0"),
        ({"window": 36}, r"window is 36; expected a multiple of chunk_size \(8\)"),
        ({"dense_limit": 38}, r"dense_limit is 38; expected at least window \+ chunk_size - 1 = 39"),
        ({"dense_limit": -2}, "dense_limit is -2"),
        ({"slots": 0}, "slots is 0"),
        ({"sealed_rows": -1}, "sealed_rows is -1"),
        ({"sealed_rows": 5}, "sealed_rows is 5; expected 0 to 4"),
        ({"sealed_rows": 0}, "sealed_rows is 0 and sealed_pages is 12; expected both"),
        ({"sealed_pages": 0}, "sealed_rows is 2 and sealed_pages is 0; expected both"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": 1025}, "max_batch is 1025"),
        ({"live_pages": 0}, "live_pages is 0"),
        ({"sealed_pages": -1}, "sealed_pages is -1"),
        ({"row_groups": 9}, "row_groups is 9; expected 0 to 8"),
        ({"reserved": 1}, "reserved is 1"),
        ({"inverse_frequencies": None}, "inverse_frequencies is null"),
        ({"inverse_frequencies": (ctypes.c_float * 32)(float("nan"))}, r"inverse_frequencies\[0\] is nan"),
        ({"inverse_frequencies": (ctypes.c_float * 32)(*[0.1] * 31, float("inf"))}, r"frequencies\[31\] is inf"),
        ({"num_layers": 1024, "live_pages": 1 << 20, "num_kv_heads": 32, "num_heads": 32}, "an array of the state has"),
    ],
)
def test_creation_refuses(api: NativeApi, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        create(api, changes)
    assert "expected" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 32, "num_kv_heads": 2},
        {"num_heads": 32, "num_kv_heads": 32, "rank": 512, "head_size": 128},
        {"top_k": 2048, "cache_slots": 8192, "outliers": 1024, "max_batch": 1024, "max_tokens": 1 << 21},
        {"dense_limit": 39, "chunk_size": 8},
        {"dense_limit": -1, "sealed_rows": 0, "sealed_pages": 0},
        {"sealed_rows": 0, "sealed_pages": 0},
        {"row_groups": 8, "landmark_format": 1, "value_format": 1, "element": 0, "chunk_size": 16, "head_size": 96},
    ],
)
def test_creation_accepts(api: NativeApi, changes: dict[str, Any]) -> None:
    create(api, changes)


def test_null_handles_and_results_are_refused(api: NativeApi, state: CudaState) -> None:
    with pytest.raises(ConfigError, match="state is null; expected the address of the result"):
        api("tsk_state_create", None, None)
    with pytest.raises(ConfigError, match="config is null"):
        api("tsk_state_create", None, ctypes.byref(ctypes.c_void_p()))
    with pytest.raises(ConfigError, match="state is null; expected what tsk_state_create gave"):
        api("tsk_state_release", None, 0)
    with pytest.raises(ConfigError, match="pinned is null; expected what tsk_pinned_create gave"):
        api("tsk_pinned_destroy", None)
    allocate(state, 0, 10, 20)
    for name, arguments in {
        "tsk_state_describe": (None,),
        "tsk_state_row": (0, None),
        "tsk_state_pages": (0, 0, None, 0, None),
        "tsk_state_statistics": (0, None, STREAM),
        "tsk_state_fault": (None, STREAM),
        "tsk_state_begin_generation": (None, 1, None),
    }.items():
        with pytest.raises(ConfigError, match=" is null; expected the "):
            state._call(name, *arguments)
    count = ctypes.c_int32()
    with pytest.raises(ConfigError, match="ids is null"):
        state._call("tsk_state_pages", 0, 0, None, 1, ctypes.byref(count))
    with pytest.raises(ConfigError, match="kind is 2"):
        state._call("tsk_state_pages", 0, 2, None, 0, ctypes.byref(count))
    with pytest.raises(ConfigError, match="capacity is -1"):
        state._call("tsk_state_pages", 0, 0, None, -1, ctypes.byref(count))


def test_python_refuses_what_ctypes_would_cut_off(library: Library, state: CudaState) -> None:
    with pytest.raises(ConfigError, match="dtype is 'float32'; expected one of float16, bfloat16"):
        make(library, dtype="float32")
    with pytest.raises(ConfigError, match="value_format is 'fp8'"):
        make(library, value_format="fp8")
    with pytest.raises(ConfigError, match=r"max_tokens is .*a whole number of 32 bits"):
        make(library, max_tokens=1 << 33)
    with pytest.raises(ConfigError, match="slot is True"):
        state.release(True)
    with pytest.raises(ConfigError, match=r"stream is .*; expected an address"):
        state.load_row(0, 1, stream=1 << 64)
    with pytest.raises(ConfigError, match="stage is 'sleep'; expected one of append, seal"):
        state.stage("sleep", 0, 0, 1, 1, stream=STREAM)
    with pytest.raises(ConfigError, match="1 value addresses; expected 2, one a layer"):
        allocate(state, 0, 100, 200, value_addresses=[16])


def test_sizes(state: CudaState) -> None:
    sizes = state.buffers()
    assert (sizes["group"], sizes["chunk_shift"], sizes["logit_stride"]) == (4, 3, 4)
    assert (sizes["live_table_stride"], sizes["sealed_table_stride"], sizes["ring"]) == (32, 8, 2)
    assert (state.live_pages, state.sealed_pages, state.sealed_rows, state.cache_slots) == (40, 12, 2, 8)
    live = 2 * 40 * 2 * 2 * PAGE * 64 * 2
    sealed = 2 * 12 * (SEALED_PAGE * 16 + 2 * SEALED_PAGE // 8 * 64) * 2
    assert live + sealed < sizes["device_bytes"] < 2 * (live + sealed)
    assert sizes["live"] == 0


def test_nothing_is_taken_for_sealed_rows_where_there_are_none(library: Library) -> None:
    with make(library, config={"attention": "dense"}) as dense, make(library, max_tokens=64) as short:
        for state in (dense, short):
            assert (state.sealed_rows, state.sealed_pages, state.buffers()["ring"]) == (0, 0, 0)


def test_without_a_gpu_a_device_is_refused(library: Library) -> None:
    # With every GPU hidden, so that the same holds on a machine that has some.
    code = f"""
import ctypes
from trtllm_shadowkv.errors import MissingDependencyError
from trtllm_shadowkv.library import load
from trtllm_shadowkv.native_state import NativeApi, StateConfig
from trtllm_shadowkv.runtime.pinned_slab import PinnedSlab
config = StateConfig(inverse_frequencies=(ctypes.c_float * 64)(), **{ {**GOOD, "device": 0} })
create = lambda: NativeApi(load())("tsk_state_create", ctypes.byref(config), ctypes.byref(ctypes.c_void_p()))
for call in (create, lambda: PinnedSlab(1 << 20)):
    try:
        call()
    except MissingDependencyError as e:
        print(e)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", ENVIRONMENT: str(library.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(("no CUDA driver on this machine", "no CUDA device that this process may use"))


@pytest.mark.parametrize("size", [0, -1, (1 << 40) + 1])
def test_slab_size_out_of_range_is_refused(library: Library, size: int) -> None:
    with pytest.raises(ConfigError, match=f"bytes is {size}; expected 1 to"):
        PinnedSlab(size, native=library)


# --- ops --------------------------------------------------------------------------------------------------------------

ADDRESS = 1 << 20


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        (
            "tsk_step_prologue",
            {"slots": ADDRESS, "batch": 1, "stream": STREAM},
            {"slots": [0, ADDRESS + 2], "batch": [0, 7], "stream": [0, 1]},
        ),
        (
            "tsk_landmark_topk",
            {
                **{"layer": 0, "qkv": ADDRESS, "positions": ADDRESS, "batch": 1, "q": ADDRESS, "selection": ADDRESS},
                "stream": STREAM,
            },
            {
                **{"layer": [-1, 2], "qkv": [0, ADDRESS + 8], "positions": [0, ADDRESS + 2], "batch": [0, 7]},
                **{"q": [0, ADDRESS + 8], "selection": [0, ADDRESS + 1], "stream": [0]},
            },
        ),
        (
            "tsk_key_reconstruct",
            {"layer": 0, "batch": 1, "stream": STREAM},
            {"layer": [-1, 2], "batch": [0, 7], "stream": [0]},
        ),
        (
            "tsk_sparse_attention",
            {"layer": 0, "q": ADDRESS, "batch": 1, "out": ADDRESS, "stream": STREAM},
            {"layer": [2], "q": [0, ADDRESS + 8], "batch": [0, 7], "out": [0, ADDRESS + 8], "stream": [0]},
        ),
        (
            "tsk_state_stage",
            {
                **{"stage": 7, "layer": 0, "begin": 0, "end": 2, "batch": 2, "qkv": 0, "positions": 0, "q": ADDRESS},
                **{"selection": 0, "out": ADDRESS, "stream": STREAM},
            },
            {
                **{"stage": [-1, 9], "layer": [2], "begin": [-1, 2], "end": [0, 3], "batch": [0, 7]},
                **{"q": [0, ADDRESS + 8], "stream": [0]},
            },
        ),
    ],
)
def test_ops_refuse(state: CudaState, call: str, good: dict[str, int], bad: dict[str, list[int]]) -> None:
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{name} is .*; expected "):
                state._call(call, *{**good, name: value}.values())
    with pytest.raises(StateError, match="the state is dry; expected one with a device"):
        state._call(call, *good.values())


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("append", {"qkv", "positions", "q"}),
        ("seal", set()),
        ("score", {"q"}),
        ("select", {"selection"}),
        ("fetch", set()),
        ("rebuild", set()),
        ("attend_resident", {"q"}),
        ("attend_fetched", {"q"}),
        ("merge", {"out"}),
    ],
)
def test_a_stage_looks_at_what_it_uses(library: Library, state: CudaState, name: str, needed: set[str]) -> None:
    given = dict.fromkeys(sorted(needed), ADDRESS)
    with pytest.raises(StateError, match="the state is dry"):
        state.stage(name, 0, 0, 1, 1, stream=STREAM, **given)
    for missing in needed:
        with pytest.raises(ConfigError, match=f"{missing} is null"):
            state.stage(name, 0, 0, 1, 1, stream=STREAM, **{**given, missing: None})
    with make(library, config={"attention": "dense"}) as dense:
        message = "the state is dry" if name in ("append", "attend_resident", "merge") else "no row is sealed"
        with pytest.raises(StateError, match=message):
            dense.stage(name, 0, 0, 1, 1, stream=STREAM, **given)


def test_a_dense_state_needs_no_selection(library: Library) -> None:
    with make(library, config={"attention": "dense"}) as dense:
        with pytest.raises(StateError, match="the state is dry"):
            dense.landmark_topk(0, ADDRESS, ADDRESS, 1, ADDRESS, None, STREAM)
        with pytest.raises(ConfigError, match=f"selection is address {ADDRESS + 1}"):
            dense.landmark_topk(0, ADDRESS, ADDRESS, 1, ADDRESS, ADDRESS + 1, STREAM)


def test_the_rest_of_a_dry_state(state: CudaState) -> None:
    assert state.fault(STREAM) == 0
    state.poison()
    with pytest.raises(ConfigError, match="stream is the null stream"):
        state.fault(0)
    allocate(state, 0, 10, 20)
    assert state.statistics(0, STREAM).hit_rate is None


def test_a_closed_state_refuses_every_call(library: Library) -> None:
    state = make(library)
    state.close()
    state.close()
    calls: list[Any] = [
        lambda: allocate(state, 0, 10, 20),
        lambda: state.load_row(0, 1, STREAM),
        lambda: state.release(0),
        lambda: state.row(0),
        lambda: state.length(0),
        lambda: state.live_pages_of(0),
        lambda: state.statistics(0, STREAM),
        lambda: state.fault(STREAM),
        state.buffers,
        state.poison,
        lambda: step(state, -1),
        lambda: state.step_prologue(ADDRESS, 1, STREAM),
        lambda: state.landmark_topk(0, ADDRESS, ADDRESS, 1, ADDRESS, ADDRESS, STREAM),
        lambda: state.key_reconstruct(0, 1, STREAM),
        lambda: state.sparse_attention(0, ADDRESS, 1, ADDRESS, STREAM),
        lambda: state.stage("seal", 0, 0, 1, 1, stream=STREAM),
    ]
    for call in calls:
        with pytest.raises(StateError, match="the state is closed"):
            call()


def test_a_failed_creation_leaves_nothing_to_close(library: Library) -> None:
    with pytest.raises((MissingDependencyError, ConfigError)):
        make(library, device=1 << 20)
