"""The form of every result under docs/results."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trtllm_shadowkv.errors import ShadowKVError

PACKAGES = ("torch", "onnxruntime", "onnxruntime-extensions", "transformers", "numpy")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def report(command: str, results: Any) -> dict[str, Any]:
    """Results with the command that made them, the machine and the versions."""
    return {
        "command": command,
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "python": platform.python_version(),
        "versions": {p: _version(p) for p in PACKAGES},
        "results": results,
    }


def gpu_report(command: str) -> dict[str, Any]:
    """The head of a report of what ran on GPU 0; its rows are added by :func:`as_json`."""
    from trtllm_shadowkv.library import load  # here, because other reports need no library

    device = load().device_info(0)
    data = report(command, None)
    del data["results"]
    data["versions"] |= {"driver": device.driver_version, "cuda": device.runtime_version}
    return data | {"gpu": device.name}


def run_on_gpu(main: Callable[[], None]) -> None:
    """Run a bench of GPU 0; what is missing for it ends the program with one line.

    Raises:
        SystemExit: no GPU, library or TensorRT.
    """
    from trtllm_shadowkv.library import load

    try:
        load().device_info(0)
        main()
    except ShadowKVError as e:
        raise SystemExit(f"error: {e}") from e


def as_json(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A report with its rows, one a line."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def write(data: dict[str, Any], path: str | None) -> None:
    """Print as JSON, and store where a path is given."""
    text = json.dumps(data, indent=2)
    sys.stdout.write(text + "\n")
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
