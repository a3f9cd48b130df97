"""Tests in this folder run the library's kernels on the CPU: tests/emulator."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.emulator import build


@pytest.fixture(scope="session")
def can_build() -> None:
    """Skips where the emulator cannot be built: it is for g++ on x86-64, and needs the headers of a CUDA toolkit."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("no g++ for x86-64 on this machine")
    try:
        build.cuda_include()
    except build.BuildError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def emulated_library(can_build: None) -> Path:
    """The library for the emulated GPU."""
    return build.build()


@pytest.fixture(scope="session")
def selftest(can_build: None) -> Path:
    """The emulator's own checks, a program."""
    return build.build([build.HERE / "selftest.cu", build.HERE / "mistakes.cu"], build.OUT / "selftest")
