"""A selection of the GPU's tests on the emulated GPU, in a process of its own: a crash would take all tests along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.build import ROOT

GPU = "tests/plugins/gpu"
SHUFFLED = {"TSK_EMULATED_ORDER": "random1", "TSK_EMULATED_COPIES": "random"}
SELECTION = {
    "plugins": ({}, f"{GPU}/test_plugins.py", "sequence or pass"),
    "steps and prompts": ({}, f"{GPU}/test_reduced.py", "steps or prompt"),
    "both in another order": (SHUFFLED, f"{GPU}/test_reduced.py", "9"),
    "prompts": ({}, f"{GPU}/test_context.py", "stretches and 129 and (smollm2 or 96) or equal or outgrows"),
    "prompts on a device before Hopper": (
        {"TSK_EMULATED_CAPABILITY": "80"},
        f"{GPU}/test_context.py",
        "stretches and 129 and (smollm2 or 96) or bits and chunk",
    ),
    "prompts in another order": (SHUFFLED, f"{GPU}/test_context.py", "stretches and 129 and chunk or tiny or finite"),
}


@pytest.mark.parametrize("name", SELECTION)
def test_selection(name: str, emulated_library: Path) -> None:
    how, file, which = SELECTION[name]
    variables = {
        **how,
        "TRTLLM_SHADOWKV_EMULATED": "1",
        "TRTLLM_SHADOWKV_LIBRARY": str(emulated_library),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", which],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " skipped" not in done.stdout
