"""One Triton server a session, with an engine of SmolLM2 as ``shadowkv`` and a tiny one as ``tiny``.

Beside it a worker without a server: ``client``, whose engine is ``llm``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Built
from tests.tiny_llm import NAN_TOKEN, build_tiny_llm
from tests.triton.worker_client import NAN, Client, talk
from tests.triton_server import TritonServer, server_environment, wait_for
from trtllm_shadowkv import LLM
from trtllm_shadowkv.triton.repository import write_repository

QUEUE = 24
"""Requests that may wait for ``tiny``."""


def exactly(tokens: int, **more: Any) -> dict[str, Any]:
    """So many tokens of ``tiny``, without the one that it must not feed back: a stop token comes too early."""
    return {"max_tokens": tokens, "min_tokens": tokens, "stop_token_ids": [NAN_TOKEN], "ignore_eos": True, **more}


@pytest.fixture(scope="session")
def triton_venv() -> Path:
    try:
        return server_environment()
    except LookupError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llm(tmp_path_factory.mktemp("triton_tiny"))


@pytest.fixture(scope="session")
def tiny_llm(tiny_engine: Path) -> Iterator[LLM]:
    """The engine of ``tiny`` in this process, for what it answers alone."""
    with LLM(tiny_engine, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_llm(demo_engine: Built) -> Iterator[LLM]:
    """The same of ``shadowkv``."""
    with LLM(demo_engine.engine.path, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def session_server(
    triton_venv: Path, demo_engine: Built, tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "repository"
    write_repository(demo_engine.engine.path, repository, settings={"threads": 1})
    write_repository(tiny_engine, repository, model_name="tiny", settings={"threads": 1, "max_queue": QUEUE})
    with TritonServer(repository, folder, venv=triton_venv).start("shadowkv", "tiny") as server:
        yield server
    assert "Traceback" not in server.log


@pytest.fixture
def server(session_server: TritonServer) -> Iterator[TritonServer]:
    """The session's server; whatever a test did with it, nothing may run in it afterwards."""
    yield session_server
    for model in ("shadowkv", "tiny"):
        wait_for(lambda model=model: idle(session_server, model), f"{model} has nothing to do")
        assert session_server.ready(model)


def idle(server: TritonServer, model: str) -> bool:
    values = server.metrics(model)
    names = ("requests_waiting", "requests_running", "device_memory_used_bytes", "host_memory_used_bytes")
    return not any(values[f"shadowkv_{name}"] for name in names)


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llm(tmp_path_factory.mktemp("worker"), ord(NAN))


@pytest.fixture(scope="session")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, threads=1) as llm:
        yield llm


@pytest.fixture
def client(llm: LLM) -> Iterator[Client]:
    with talk(llm) as client:
        yield client
