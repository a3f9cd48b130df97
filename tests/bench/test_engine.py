from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_shadowkv.bench.engine import MATRICES, gpu_steps, keep_probability


def kernel(name: str | None, start: int, duration: int) -> tuple[str | None, Any]:
    return name, SimpleNamespace(start_ns=lambda: start, duration_ns=lambda: duration)


def test_a_step_ends_with_the_kernel_that_ends_last() -> None:
    kernels = [
        kernel("append", 3000, 500),
        kernel(None, 0, 100),  # before the first step
        kernel("prologue", 1000, 1000),
        kernel("fetch", 3500, 4000),
        kernel(None, 4000, 1000),
        kernel("prologue", 10_000, 1000),
        kernel(None, 12_000, 2000),
    ]
    time, parts = gpu_steps(kernels)
    assert time == pytest.approx((6.5 + 4) / 2)
    assert parts == pytest.approx({"prologue": 1, "append": 0.25, "fetch": 2, MATRICES: 1.5})


@pytest.mark.parametrize(("target", "expected"), [(0.6, 0.625), (0.05, 0.0), (0.95, 1.0)])
def test_keep_probability(target: float, expected: float) -> None:
    assert keep_probability(target, drawn=0.1, kept=0.9) == pytest.approx(expected)
