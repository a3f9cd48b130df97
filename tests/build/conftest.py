"""A tiny model on disk, and helpers around builds in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny

RunPython = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 64 wide, 16,384 positions; not to be written to."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_python() -> Any:
    """Start a program in a process of its own, with pipes; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def empty_beside(tmp_path: Path) -> Any:
    """Call it with a path: nothing may lie beside it but what is named."""

    def check(path: Path, *expected: str) -> None:
        assert sorted(p.name for p in path.parent.iterdir()) == sorted(expected)

    return check
