"""Engines come and go: several at a time, again and again, and damaged ones with one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import Made
from tests.engine.test_generation import executor_of, tokens
from trtllm_shadowkv import LLM, SamplingParams, names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.errors import ConfigError, EngineError, GenerationError

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
SMALL: dict[str, Any] = {"device_memory": 4 << 30, "host_memory": 1 << 30}


def test_two_engines_in_one_process(engine: Made, text: list[int]) -> None:
    """Their passes alternate on two streams, each with its own state."""
    found = []
    for name in ("float16", "bfloat16"):
        with LLM(engine(name), **SMALL) as llm:
            found.append([tokens(llm.generate(text[i : i + 1500], PARAMS)) for i in range(4)])  # type: ignore[arg-type]
    with LLM(engine("float16"), **SMALL) as one, LLM(engine("bfloat16"), **SMALL) as other:
        handles = [[llm.generate_async(text[i : i + 1500], PARAMS) for i in range(4)] for llm in (one, other)]
        again = [[list(handle.result().outputs[0].token_ids) for handle in half] for half in handles]
    assert again == found


def test_memory_comes_back(engine: Made, text: list[int]) -> None:
    """torch's share; the rest of this process is watched in test_memory.py, where nothing else runs."""
    for _ in range(3):
        with LLM(engine("float16"), **SMALL) as llm:
            llm.generate(text[:1500], PARAMS)
            assert torch.cuda.memory_allocated() > 1 << 20
        assert torch.cuda.memory_allocated() < 1 << 20


def test_an_llm_that_is_dropped_ends_well(engine: Made) -> None:
    """Never closed, in a process that ends; and collected, in one that goes on."""
    script = (
        "import gc, sys, torch\n"
        "from trtllm_shadowkv import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device_memory=4 << 30, host_memory=1 << 30)\n"
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=4))\n"
        "del llm; gc.collect()\n"
        "torch.zeros(1, pin_memory=True).cuda()\n"
        "llm = LLM(sys.argv[1], device_memory=4 << 30, host_memory=1 << 30)\n"
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=4))\n"
        "print('well')\n"
    )
    command = [sys.executable, "-c", script, str(engine("float16"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


def test_a_plugin_that_refuses_says_why(engine: Made, text: list[int]) -> None:
    """Through TensorRT's log, in the error of the request that failed; the next one is none the worse for it."""
    with LLM(engine("float16"), **SMALL) as llm:
        before = llm.generate(text[:1500], PARAMS)
        executor = executor_of(llm)
        executor.state.cuda.unbind()
        with pytest.raises(GenerationError, match="no state is bound to this stream"):
            llm.generate(text[:1500], PARAMS)
        executor.state.cuda.bind(executor.state.stream)
        assert tokens(llm.generate(text[:1500], PARAMS)) == tokens(before)  # type: ignore[arg-type]


def test_equal_weights_are_stored_once(llama_engine: Path) -> None:
    """32 layers of 0.44 GB each, which are one layer's; and two profiles."""
    assert (llama_engine / names.ENGINE_FILE).stat().st_size < 3e9


def test_too_little_memory_for_a_row(engine: Made) -> None:
    with pytest.raises(ConfigError, match=r"1,048,576 bytes of device memory .*; lower max_batch_size"):
        LLM(engine("float16"), device_memory=1 << 20, host_memory=1 << 30)


def test_logits_of_many_positions(engine: Made, text: list[int]) -> None:
    """A context pass returns up to 128 of them, the same as each alone."""
    with LLM(engine("float16"), **SMALL) as llm:
        executor = executor_of(llm)

        def read(wanted: list[int]) -> Any:
            executor.state.allocate(0, prompt_tokens=300, total_tokens=301, top_k=64, dense=True)
            try:
                return executor.context(0, text[:300], 0, True, wanted).copy()
            finally:
                executor.state.release(0)

        many = read(list(range(100, 228)))
        for i in (100, 227):
            assert (read([i])[0] == many[i - 100]).all()


# --- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.fixture
def copy(engine: Made, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(engine("float16"), tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")


def edit_manifest(directory: Path, **changes: str) -> None:
    path = directory / names.MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_architecture": "8.0"}, r"was compiled for compute capability 8\.0; expected \d+\.\d+; trtllm-shadowkv"),
        ({"tensorrt_version": "10.3.0"}, r"was compiled with TensorRT 10\.3\.0; expected 10\.\S+; trtllm-shadowkv"),
        ({"plugin_library_version": "0.0.9"}, r"was compiled with plugin library 0\.0\.9; expected \S+; trtllm"),
    ],
)
def test_engines_of_other_machines(copy: Path, changes: dict[str, str], message: str) -> None:
    edit_manifest(copy, **changes)
    with pytest.raises(EngineError, match=message):
        LLM(copy, **SMALL)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def other_version(data: bytes) -> bytes:
    return bytes(64) + data[64:]


@pytest.mark.parametrize("damage", [cut, empty, other_version])
@pytest.mark.parametrize("described", [False, True], ids=["as damaged", "as if whole"])
def test_damaged_engines(copy: Path, damage: Callable[[bytes], bytes], described: bool) -> None:
    """The manifest sees the damage; where it was written after it, TensorRT does."""
    path = copy / names.ENGINE_FILE
    path.write_bytes(damage(path.read_bytes()))
    if described:
        record = manifest.read(copy)
        of = {"gpu_architecture": "gpu_architecture", "tensorrt": "tensorrt_version"}
        of |= {"plugin_library": "plugin_library_version", "backend": "backend"}
        manifest.write(copy, **{name: record[key] for name, key in of.items()})
    with pytest.raises(EngineError, match=r"rank0\.engine") as caught:
        LLM(copy, **SMALL)
    assert "\n" not in str(caught.value)
    assert ("TensorRT cannot load" in str(caught.value)) == described


def test_no_plugin_library(engine: Made, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "trtllm_shadowkv",
        "generate",
        str(engine("float16")),
        "--prompt",
        "Hello",
    ]
    environment = {**os.environ, "TRTLLM_SHADOWKV_LIBRARY": str(tmp_path / "none.so")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode != 0
    assert "none.so" in done.stderr
    assert "Traceback" not in done.stderr
