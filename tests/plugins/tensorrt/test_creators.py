"""The creators as TensorRT 10.6 itself finds and calls them, without a GPU: see creators_process.py.

Where there is no GPU TensorRT cannot make a Builder or a Runtime, and so has no logger to give to plugins: their lines
are on standard error. test_build_phase.py has those that go to a logger.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.tensorrt.ops import ATTRIBUTES, OPS
from trtllm_shadowkv import library, names

ROOT = Path(__file__).parents[3]
PACKED = ROOT / "out/tensorrt/lib"
"""Where scripts/pack_tensorrt.sh puts the libraries."""

LIBRARIES = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
PHASES = ("BUILD", "RUNTIME")
Step = list[Any]
Changed = Mapping[str, Step | None]


@pytest.fixture(scope="module")
def folders() -> str:
    """LD_LIBRARY_PATH for TensorRT; skips where the bindings of 10.6 or the libraries are not on this machine."""
    try:
        version = importlib.metadata.version("tensorrt-cu12-bindings")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no TensorRT bindings: pip install --no-deps tensorrt-cu12-bindings==10.6.0")
    if not version.startswith("10.6."):
        pytest.skip(f"tensorrt-cu12-bindings is {version}; these tests are for 10.6.0")
    named = [f for f in os.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    for folder in (str(PACKED), *named):
        if all(Path(folder, name).is_file() for name in LIBRARIES):
            return ":".join([folder, *named])
    pytest.skip(f"no libraries of TensorRT in {PACKED} or LD_LIBRARY_PATH: run scripts/pack_tensorrt.sh")


def drive(folders: str, *steps: Step) -> tuple[list[Any], list[str]]:
    """What came of each step, and the lines on standard error."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("creators_process.py"), library.load().path],
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": folders},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"].startswith("10.6.")
    return answer["answers"], done.stderr.splitlines()


def create(op: str, phase: str, *extra: Step, kind: str = "INT32", changed: Changed | None = None) -> Step:
    """A step: all attributes but those ``changed``, None: left out, and ``extra`` ones."""
    fields = {**{name: [name, kind, [value]] for name, value in ATTRIBUTES.items()}, **(changed or {})}
    return ["create", op, phase, [*(f for f in fields.values() if f is not None), *extra]]


def described(op: str) -> dict[str, Any]:
    """What a plugin of an op says of itself."""
    return {
        "core": [op, names.PLUGIN_VERSION, names.DOMAIN],
        "outputs": next(len(o.outputs) for o in OPS if o.name == op),
        "interfaces": [["PLUGIN_V3ONE_CORE", 1], ["PLUGIN_V3ONE_BUILD", 1], ["PLUGIN_V3ONE_RUNTIME", 1]],
    }


OURS = sorted(
    ["PLUGIN CREATOR_V3ONE", op.name, names.PLUGIN_VERSION, *(f"{a}:INT32:1" for a in names.ATTRIBUTES)] for op in OPS
)
EACH = [(op.name, phase) for op in OPS for phase in PHASES]


def test_the_library_brings_three_creators(folders: str) -> None:
    (loaded,), lines = drive(folders, ["load"])
    assert loaded["new"] and sorted(loaded["creators"]) == OURS
    assert lines == []


def test_good_attributes_make_plugins(folders: str) -> None:
    for kind in ("INT32", "INT64"):
        answers, lines = drive(folders, ["load"], *(create(op, phase, kind=kind) for op, phase in EACH))
        assert answers[1:] == [described(op) for op, _ in EACH]
        assert lines == []


BAD: list[tuple[str, Changed, list[Step]]] = [
    ("attribute rank is missing", {"rank": None}, []),
    ("unknown attribute 'window'", {}, [["window", "INT32", [256]]]),
    ("attribute top_k is there twice", {}, [["top_k", "INT32", [16]]]),
    ("head_size is of plugin field type 1", {"head_size": ["head_size", "FLOAT32", [64.0]]}, []),
    ("outliers is of plugin field type 3", {"outliers": ["outliers", "INT8", [4]]}, []),
    ("layer has 2 values", {"layer": ["layer", "INT32", [3, 3]]}, []),
    ("head_size is 80", {"head_size": ["head_size", "INT32", [80]]}, []),
    ("chunk_size is 12", {"chunk_size": ["chunk_size", "INT64", [12]]}, []),
    (f"chunk_size is {2**32 + 8}", {"chunk_size": ["chunk_size", "INT64", [2**32 + 8]]}, []),
    ("top_k is 4096", {"top_k": ["top_k", "INT32", [4096]]}, []),
]


@pytest.mark.parametrize(("found", "changed", "extra"), BAD, ids=[found for found, _, _ in BAD])
def test_bad_attributes_make_none(folders: str, found: str, changed: Changed, extra: list[Step]) -> None:
    steps = [create(op, phase, *extra, changed=changed) for op, phase in EACH]
    answers, lines = drive(folders, ["load"], *steps, create(*EACH[0]))
    assert answers[1:] == [None] * len(EACH) + [described(EACH[0][0])]
    assert len(lines) == len(EACH)
    for (op, _), line in zip(EACH, lines, strict=True):
        # The node's name too: a model has an op of this name in every layer.
        assert line.startswith(f"{op} 'node': {found}; expected ")


def test_loading_twice_changes_nothing(folders: str) -> None:
    (first, again, plugin), lines = drive(folders, ["load"], ["load"], create(*EACH[0]))
    assert first["new"] and not again["new"]
    assert sorted(first["creators"]) == sorted(again["creators"]) == OURS
    assert plugin == described(EACH[0][0])
    assert lines == []


def test_the_library_can_be_unloaded_and_loaded_again(folders: str) -> None:
    _, gone, back, plugin, bad = drive(
        folders,
        ["load"],
        ["unload"],
        ["load"],
        create(*EACH[1]),
        create(*EACH[1], changed={"layer": None}),
    )[0]
    assert gone["creators"] == []
    assert back["new"] and sorted(back["creators"]) == OURS
    assert plugin == described(EACH[1][0])
    assert bad is None
