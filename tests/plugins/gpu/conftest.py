"""Tests in this folder run on a GPU: `make test-gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.plugins.gpu.device import DEVICE, EMULATED, synchronize

if torch.cuda.is_available():
    torch.set_num_threads(1)  # of the little that the oracle does on the CPU, in each of many workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None
    if not EMULATED and not torch.cuda.is_available():
        missing = "no NVIDIA GPU that torch can use on this machine"
    for item in items:
        if "plugins/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(20260410)


@pytest.fixture(autouse=True)
def working_context() -> Iterator[None]:
    """After an illegal access every later CUDA call of the process fails: stop, and let pytest-xdist start another."""
    yield
    try:
        synchronize()
    except RuntimeError as e:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the CUDA context is broken: {str(e).splitlines()[0]}", 1)
