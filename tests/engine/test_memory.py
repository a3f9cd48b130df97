"""Memory of Llama-3.1-8B's shape against the plan. Marked ``alone``: nothing else may run on the GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import Made
from tests.engine.test_generation import executor_of
from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams, names
from trtllm_shadowkv.bench.synthetic import llama
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.hardware import gpu_by_name
from trtllm_shadowkv.workload import GPU_RESERVE, Workload

pytestmark = pytest.mark.alone
ROWS, PROMPT, NEW = 24, 122_000, 100


def used() -> int:
    """Bytes of the GPU's memory that are in use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_llama_reads_122k_tokens_and_takes_what_was_planned(llama_engine: Path) -> None:
    """24 rows of 122,100 tokens as planned; one is read, in stretches, and goes on."""
    before = used()  # with torch's own context
    config = EngineDirectory.open(llama_engine).build.shadowkv
    need = Workload(llama(32), gpu_by_name("h200"), config, PROMPT + NEW).bytes
    engine_bytes = (llama_engine / names.ENGINE_FILE).stat().st_size  # not the model's: its layers share their weights
    memory = {"device_memory": int(ROWS * need.gpu + need.prefill), "host_memory": 9 << 30}
    with LLM(llama_engine, max_batch_size=ROWS, **memory) as llm:
        planned = engine_bytes + GPU_RESERVE + need.prefill + ROWS * need.gpu
        choose = random.Random(0)
        prompt = [choose.randrange(128_000) for _ in range(PROMPT)]
        for mode in ("shadowkv", "dense"):
            params = SamplingParams(max_tokens=NEW, ignore_eos=True)
            output = llm.generate(prompt, params, attention=AttentionParams(mode=mode))  # type: ignore[arg-type]
            assert isinstance(output, RequestOutput)
            figures = output.outputs[0].statistics
            print(f"{mode}: {figures}")
            assert len(output.outputs[0].token_ids) == NEW
            assert (figures.sealed_tokens > PROMPT - 300) == (mode == "shadowkv")
        taken = used() - before
        scheduler, executor = llm._scheduler, executor_of(llm)
        row = executor.state.footprint(PROMPT, PROMPT + NEW, False)
        held = row.once_sealed()
        live, sealed, _ = scheduler.limits.pools
        rows = min(sealed.capacity // sealed.taken(held), 1 + (live.capacity - live.taken(row)) // live.taken(held))
        print(f"planned {planned / 1e9:.2f} GB, taken {taken / 1e9:.2f} GB; {rows} rows")
    assert abs(taken / planned - 1) <= 0.05
    assert abs(rows - ROWS) <= 1


def test_memory_comes_back_whole(engine: Made, text: list[int]) -> None:
    """Also what TensorRT, CUDA graphs and the plugin library took; the first engine leaves modules behind."""

    def run() -> int:
        with LLM(engine("bfloat16"), device_memory=8 << 30, host_memory=1 << 30) as llm:
            llm.generate(text[:3000], SamplingParams(max_tokens=20, ignore_eos=True))
        torch.cuda.empty_cache()
        return used()

    first = run()
    assert abs(run() - first) < 64 << 20
    assert abs(run() - first) < 64 << 20


def test_a_killed_process_leaves_nothing(engine: Made) -> None:
    before = used()
    script = (
        "import os, sys\n"
        "from trtllm_shadowkv import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device_memory=8 << 30, host_memory=1 << 30)\n"
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=4))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(engine("float16"))]
    done = subprocess.run(command, capture_output=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert abs(used() - before) < 64 << 20
