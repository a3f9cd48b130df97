"""The emulated GPU: its instructions do what theirs do, and mistakes of kernels are told."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.emulator.build import HERE, ROOT

ORDERS = ({}, {"TSK_EMULATED_ORDER": "reverse"}, {"TSK_EMULATED_ORDER": "random3", "TSK_EMULATED_COPIES": "random"})


def run(selftest: Path, case: str, how: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [selftest, case], env={**os.environ, **(how or {})}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("how", ORDERS, ids=["in order", "reverse", "random"])
def test_instructions(selftest: Path, how: dict[str, str]) -> None:
    done = run(selftest, "instructions", how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("deadlock", "LaunchFailure", "deadlock: no thread can go on\n    warp 0: 31 lanes wait in __shfl_sync"),
        ("part", "LaunchFailure", "lanes of a warp part"),
        ("barrier", "LaunchFailure", "threads of a block part"),
        ("end", "LaunchFailure", "the thread ends while thread 0 waits in __syncthreads"),
        ("mask", "LaunchFailure", "only whole warps"),
        ("unasked", "InvalidValue", "65536 bytes of dynamic shared memory where 49152"),
        ("past", "IllegalAddress", "written past its end, at byte 256 of 256"),
        ("misaligned", "MisalignedAddress", "thread 1 (warp 0 lane 1)"),
        ("foreign", "IllegalAddress", "not an address of shared memory"),
        ("guard", "IllegalAddress", "guardKernel"),
        ("stack", "IllegalAddress", "stack of a fiber overflows"),
        ("divide", "IllegalAddress", "division by zero"),
    ],
)
def test_mistakes_are_told_and_leave_nothing_behind(selftest: Path, case: str, error: str, words: str) -> None:
    done = run(selftest, case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"cudaError{error}"
    assert words in done.stderr


def test_races_show_in_another_order(selftest: Path) -> None:
    assert len({run(selftest, "race", how).stdout for how in ORDERS}) == 3


def test_copies_that_nobody_waited_for_show(selftest: Path) -> None:
    early = run(selftest, "no wait", {"TSK_EMULATED_COPIES": "early"}).stdout
    assert early.split() == ["0"] * 64 + ["cudaSuccess"]
    assert run(selftest, "no wait").stdout.split() == ["-1"] * 64 + ["cudaSuccess"]


def test_it_has_every_function_of_ptx() -> None:
    ours, theirs = (
        set(re.findall(r"^(?:template <[^\n]*>\n)?(?:\w+ )*[\w*]+[ *&]+(\w+)\(", path.read_text(), re.MULTILINE))
        for path in (HERE / "include/kernels/ptx.cuh", ROOT / "plugins/kernels/ptx.cuh")
    )
    assert len(theirs) > 20 and theirs <= ours, theirs - ours
