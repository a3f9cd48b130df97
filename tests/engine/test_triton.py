"""The model repository that `make test` runs on the CPU, with an engine of TensorRT's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import Made
from tests.triton_requests import Ask, ask
from tests.triton_server import TritonServer, server_environment, wait_for
from trtllm_shadowkv import LLM
from trtllm_shadowkv.triton.repository import write_repository

MEMORY = {"device_memory": 8_000_000_000, "host_memory": 4_000_000_000}
LENGTHS = (40, 3000, 700, 1500, 2500, 10, 1100, 90)


def test_an_engine_behind_triton(engine: Made, text: list[int], tmp_path: Path) -> None:
    """16 clients at a time get what LLM answers alone; an answer that is cancelled gives its row back."""
    try:
        server_environment()
    except LookupError as e:
        pytest.skip(str(e))
    path, repository = engine("bfloat16"), tmp_path / "repository"
    asks = []
    for i, length in enumerate((*LENGTHS, *LENGTHS)):
        sampling = {"temperature": 0.8, "top_k": 50, "seed": i} if i % 2 else {}
        asks.append(Ask(text[50 * i : 50 * i + length], {"max_tokens": 60, "ignore_eos": True, **sampling}))
    with LLM(path, **MEMORY) as llm:
        expected = [request.alone(llm) for request in asks]
    write_repository(path, repository, settings={"executor": "tensorrt", **MEMORY})
    with TritonServer(repository, tmp_path / "server").start("shadowkv") as server:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(asks)) as clients:
            ways = ["generate", "generate_stream"] * 8
            found = list(clients.map(lambda request, way: ask(server, "shadowkv", request, way), asks, ways))
        print(f"16 answers of 60 tokens in {time.perf_counter() - started:.2f} s")
        assert [(f.text, f.ids) for f in found] == [(e.text, e.token_ids) for e in expected]
        assert found[1].last["shadowkv_sealed_tokens"] > 0 and found[1].last["shadowkv_bytes_fetched"] > 0

        stream = server.generate_stream(
            "shadowkv", input_ids=text[:3000], max_tokens=4000, ignore_eos=True, stream=True
        )
        next(stream)
        assert server.metrics("shadowkv")["shadowkv_host_memory_bytes"] > 0
        stream.close()
        idle = ("requests_running", "requests_waiting", "device_memory_used_bytes", "host_memory_used_bytes")
        wait_for(lambda: all(server.metrics("shadowkv")[f"shadowkv_{name}"] == 0 for name in idle), "all is given back")
