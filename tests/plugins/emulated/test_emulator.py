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
        [selftest, case], env={**os.environ, **(how or {})}, capture_output=True, text=True, timeout=180
    )


EARLY = {"TSK_EMULATED_COPIES": "early"}


@pytest.mark.parametrize("how", [*ORDERS, EARLY], ids=["in order", "reverse", "random", "early"])
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
        ("fresh", "LaunchFailure", "of a barrier that initBarrier() did not make"),
        (
            "await",
            "LaunchFailure",
            "deadlock: no thread can go on\n    threads 32-63 wait for parity 0 of the barrier at",
        ),
        ("await", "LaunchFailure", "in phase 0 of which 63 of 64 have arrived"),
        ("unsynced", "LaunchFailure", "before a barrier of the block after initBarrier() of thread 0"),
        ("arrivals", "LaunchFailure", "more arrivals than expected: thread 30 ends"),
        ("twice", "LaunchFailure", "a second time in phase 0 of the barrier at"),
        ("written over", "LaunchFailure", "was written over"),
        ("counts", "LaunchFailure", "barrier 3 of 32 threads here, of 64 for thread 0"),
        ("alone", "LaunchFailure", "threads 0-31 wait at barrier 3"),
    ],
)
def test_mistakes_are_told_and_leave_nothing_behind(selftest: Path, case: str, error: str, words: str) -> None:
    done = run(selftest, case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"cudaError{error}"
    assert words in done.stderr


@pytest.mark.parametrize("how", [*ORDERS, EARLY], ids=["in order", "reverse", "random", "early"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("without fence", "no fenceForProducts() since it came"),
        ("without begin", "without beginProducts() before the batch"),
        ("without wait", "the thread ends before waitForProducts()"),
        ("written before", "was written while it was under way"),
        ("copied over", "byte 17376 of dynamic shared memory, which a product of warp"),
        ("stored over", "byte 1008 of dynamic shared memory was written while the product"),
        ("not at 1024", "not 32 s bytes after a multiple of 1,024"),
    ],
)
def test_mistakes_with_products_are_told(selftest: Path, case: str, words: str, how: dict[str, str]) -> None:
    done = run(selftest, f"product {case}" if case.split()[0] in ("without", "written") else f"matrix {case}", how)
    assert done.stdout.split()[-1] in ("cudaErrorLaunchFailure", "cudaErrorMisalignedAddress")
    assert words in done.stderr


@pytest.mark.parametrize("how", ORDERS, ids=["in order", "reverse", "random"])
def test_products_of_what_is_not_there_are_told(selftest: Path, how: dict[str, str]) -> None:
    done = run(selftest, "matrix not there", how)
    assert done.stdout.split()[-1] == "cudaErrorLaunchFailure"
    assert "where copies that were not waited for are to come" in done.stderr


def test_sums_that_nobody_waited_for_show(selftest: Path) -> None:
    assert run(selftest, "product").stdout.split() == ["0"] * 64 + ["cudaSuccess"]
    assert run(selftest, "product read before").stdout.split() == ["-1"] * 64 + ["cudaSuccess"]
    assert run(selftest, "product read before", EARLY).stdout.split() == ["0"] * 64 + ["cudaSuccess"]


def test_races_show_in_another_order(selftest: Path) -> None:
    assert len({run(selftest, "race", how).stdout for how in ORDERS}) == 3


def test_copies_that_nobody_waited_for_show(selftest: Path) -> None:
    for case in ("no wait", "ring"):
        assert run(selftest, case, EARLY).stdout.split() == ["0"] * 64 + ["cudaSuccess"]
        assert run(selftest, case).stdout.split() == ["-1"] * 64 + ["cudaSuccess"]


@pytest.mark.parametrize(("name", "least"), [("ptx.cuh", 21), ("hopper.cuh", 16)])
def test_it_has_every_function_of(name: str, least: int) -> None:
    ours, theirs = (
        set(re.findall(r"^(?:template <[^\n]*>\n)?(?:\w+ )*[\w*]+[ *&]+(\w+)\(", path.read_text(), re.MULTILINE))
        for path in (HERE / "include/kernels" / name, ROOT / "plugins/kernels" / name)
    )
    assert len(theirs) >= least and theirs <= ours, theirs - ours
