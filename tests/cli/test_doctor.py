"""The ``doctor`` command, also where nothing but the base installation is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import trtllm_shadowkv
from trtllm_shadowkv.cli import doctor as command
from trtllm_shadowkv.doctor import examine
from trtllm_shadowkv.nvml import Driver, GpuInfo

APP = typer.Typer()
APP.command("doctor")(command.doctor)

BASE = ("typer", "pyyaml")
RUN = """
import sys
import typer
from trtllm_shadowkv.cli.doctor import doctor
from trtllm_shadowkv.cli.plan import plan

app = typer.Typer()
app.command("doctor")(doctor)
app.command("plan")(plan)
try:
    app(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "onnx", "onnxruntime", "transformers", "tensorrt"} & set(sys.modules)
    assert not heavy, heavy
"""


def with_requirements(names: Iterable[str]) -> set[str]:
    """These distributions and all that they need, without extras."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform or Python version
            continue
        if name not in found:
            found.add(name)
            todo += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return found


def base_installation(folder: Path) -> str:
    """Search path of an interpreter that has this package and what it depends on, and nothing else."""
    for name in with_requirements(BASE):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top
            if not (folder / top).exists():
                (folder / top).symlink_to(target)
    return os.pathsep.join([str(Path(trtllm_shadowkv.__file__).parents[1]), str(folder)])


@pytest.mark.parametrize("arguments", ["doctor", "doctor --json", "plan --model llama-3.1-8b --json"])
def test_base_installation_is_enough(tmp_path: Path, arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", RUN, *arguments.split()],
        env={"PYTHONPATH": base_installation(tmp_path), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if arguments == "doctor":
        assert "pip install 'trtllm-shadowkv[cpu]'" in done.stdout
        assert "no: lacks" in done.stdout
    if arguments == "doctor --json":
        found = json.loads(done.stdout)
        assert set(found["versions"].values()) == {None}
        assert {part["name"] for part in found["missing"]} >= {"torch", "numpy", "onnxruntime", "tensorrt"}
        assert found["purposes"]["plan"] == []


def test_json_here() -> None:
    result = CliRunner().invoke(APP, ["--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["memory"]["total"] > 0 and found["cpus"]["usable"] >= 1
    assert found["versions"]["torch"]


def test_text_here() -> None:
    result = CliRunner().invoke(APP, [], catch_exceptions=False)
    assert result.exit_code == 0
    for words in ("ready to", "can be pinned now", "RLIMIT_MEMLOCK", "NUMA nodes", "/dev/shm", "huge pages"):
        assert words in result.output


def test_text_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuInfo(0, "NVIDIA H200", "00000000:45:00.0", 143771 << 20, 100 << 30, "9.0", 4, 16, 5, 16)
    unknown = GpuInfo(1, *([None] * 9))
    monkeypatch.setattr(command, "examine", lambda: examine(driver=lambda: Driver("580.95.05", "13.0", (gpu, unknown))))
    text = CliRunner().invoke(APP, [], catch_exceptions=False).output
    assert "580.95.05, CUDA 13.0" in text
    assert "NVIDIA H200, compute capability 9.0" in text
    assert "140.4 GiB, 100.0 GiB free" in text
    assert "gen 4 x16 now, gen 5 x16 at most (idle links slow down)" in text
    assert "gen ? x? now" in text


def test_text_with_nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none"
    report = examine(proc=none, sys=none, shm=none, driver=lambda: Driver(problem="no NVIDIA driver"))
    monkeypatch.setattr(command, "examine", lambda: report)
    result = CliRunner().invoke(APP, [], catch_exceptions=False)
    assert result.exit_code == 0
    assert "no NVIDIA driver" in result.output and "unknown" in result.output
