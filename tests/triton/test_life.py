"""Life and death of a real Triton server and of the processes that hold its engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import trtllm_shadowkv.triton
from tests.tiny_llm import build_tiny_llm, prompt
from tests.triton.conftest import exactly
from tests.triton_grpc import RequestFailed
from tests.triton_requests import Ask, ask, got
from tests.triton_server import TritonServer, wait_for
from trtllm_shadowkv import LLM
from trtllm_shadowkv.triton.repository import write_repository
from trtllm_shadowkv.triton.settings import load_settings

PACKAGE = Path(trtllm_shadowkv.triton.__file__).parent
EXAMPLE = Path(__file__).parents[2] / "examples/triton_model_repository/shadowkv"


SHORT, LONG, FOREVER = (Ask(prompt(300), exactly(tokens)) for tokens in (20, 1000, 5000))


@pytest.fixture(scope="session")
def expected(tiny_llm: LLM) -> list[int]:
    """Tokens of the short request."""
    return SHORT.alone(tiny_llm).token_ids


@pytest.fixture
def repository(tiny_engine: Path, tmp_path: Path) -> Path:
    repository = tmp_path / "repository"
    write_repository(tiny_engine, repository, model_name="tiny", settings={"threads": 1})
    return repository


@pytest.fixture
def make(triton_venv: Path, repository: Path, tmp_path: Path) -> Iterator[type[TritonServer]]:
    """Servers of that repository; those that still run at the end are killed."""
    with ExitStack() as made:

        class Made(TritonServer):
            def __init__(self) -> None:
                super().__init__(repository, tmp_path, venv=triton_venv, options=["--load-model=tiny"])
                made.callback(self.end)

        yield Made


def answers(server: TritonServer, expected: list[int]) -> None:
    assert ask(server, "tiny", SHORT).ids == expected


def test_a_failing_engine_and_one_that_dies(
    make: type[TritonServer], repository: Path, tmp_path: Path, expected: list[int]
) -> None:
    broken_engine = build_tiny_llm(tmp_path, nan_token=1)
    write_repository(broken_engine, repository, model_name="broken", settings={"threads": 1})
    edited = write_repository(broken_engine, repository, model_name="edited") / "config.pbtxt"
    edited.write_text(edited.read_text().replace("count: 1", "count: 2"))
    with make().start("tiny") as server:
        assert "expected max_batch_size 0 and one instance" in server.load("edited")[1]

        # One whose first generation fails is not loaded.
        status, text = server.load("broken")
        assert status == 400
        assert "the engine's process ended with 1" in text
        assert "NaN logits" in text
        assert not server.ready("broken")
        assert server.engines("broken") == []
        answers(server, expected)

        # One that is killed: its requests end at once, it is not ready, and a load starts it again.
        streams = [server.grpc_stream("tiny", stream=True, **FOREVER.inputs) for _ in range(3)]
        streams.append(server.grpc_stream("tiny", **FOREVER.inputs))
        for stream in streams[:3]:
            stream.next()
        with ThreadPoolExecutor(1) as client:
            http = client.submit(ask, server, "tiny", FOREVER)
            wait_for(lambda: server.metrics("tiny")["shadowkv_requests_waiting"] == 1, "a fifth request waits")
            (engine,) = server.engines("tiny")
            os.kill(engine, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(RequestFailed, match=r"the engine is gone \(exit code -9\)"):
                    list(stream)
                stream.close()
            with pytest.raises(RequestFailed, match="the engine is gone"):
                http.result(180)
        wait_for(lambda: not server.ready("tiny"), "the model is not ready")
        with pytest.raises(RequestFailed):
            ask(server, "tiny", SHORT)
        wait_for(lambda: not server.engines("tiny"), "the engine has ended")
        assert server.load("tiny")[0] == 200
        assert server.ready("tiny")
        answers(server, expected)


def test_a_server_that_stops_ends_the_requests_that_run(make: type[TritonServer], tiny_llm: LLM) -> None:
    with make().start("tiny") as server:
        with server.grpc_stream("tiny", stream=True, **LONG.inputs) as stream:
            first = stream.next()
            first.pop("final")
            server.interrupt()
            answer = got([first, *stream])
        assert answer.ids == LONG.alone(tiny_llm).token_ids
        server.stop()


def test_servers_that_are_killed(make: type[TritonServer], expected: list[int]) -> None:
    # Alone: its other processes end by themselves and clean up.
    server = make().start("tiny")
    stream = server.grpc_stream("tiny", stream=True, **FOREVER.inputs)
    stream.next()
    assert server.segments()
    server.kill()
    wait_for(lambda: not server.processes(), "the python backend's process has ended")
    wait_for(lambda: not server.engines(), "the engine's process has ended")
    assert server.segments() == []
    stream.close()

    # All of it at once: the next server cleans up.
    server = make().start("tiny")
    answers(server, expected)
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)  # or it might be quicker than we are
    server.kill(group=True)
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: not (server.processes() or server.engines()), "all is gone")
    assert server.segments()
    with make().start("tiny") as other:
        assert server.segments() == []
        answers(other, expected)


def test_the_example_repository() -> None:
    for name, link in (("config.pbtxt", EXAMPLE / "config.pbtxt"), ("model.py", EXAMPLE / "1/model.py")):
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name
    engine_dir, settings = load_settings(EXAMPLE / "1/model.yaml", {})
    assert Path(engine_dir).resolve() == EXAMPLE.parents[2] / "demo/engine"
    assert settings == {}
