"""examples/triton as its users run it: programs of their own, against the session's server."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.tiny_llm import prompt
from tests.triton_grpc import LIMIT
from tests.triton_server import TritonServer, free_ports, segments, wait_for
from trtllm_shadowkv import LLM, SamplingParams
from trtllm_shadowkv.triton.repository import write_repository

EXAMPLES = Path(__file__).parents[2] / "examples/triton"


def run(name: str, *options: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / f"{name}.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("options", [[], ["--stream"], ["--protocol", "grpc"], ["--protocol", "grpc", "--stream"]])
def test_client(server: TritonServer, demo_llm: LLM, options: list[str]) -> None:
    url = server.grpc if "grpc" in options else server.http
    asked = {"max_tokens": 12, "temperature": 0.7, "seed": 5}
    flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = run("client", "--url", url, "--prompt", "The capital of France is", *flags, *options)
    text = demo_llm.generate("The capital of France is", SamplingParams(**asked)).text  # type: ignore[arg-type]
    assert done.stdout == f"{text}\n"
    figures = dict(line.split() for line in done.stderr.splitlines())
    assert (figures["finish_reason"], figures["sequence_length"]) == ("length", "12")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_says_why_not(server: TritonServer, protocol: str) -> None:
    options = ["--protocol", protocol, "--prompt", "a"]
    url = server.grpc if protocol == "grpc" else server.http
    done = run("client", "--url", url, *options, "--max-tokens", "0", status=1)
    assert "max_tokens is 0; expected a whole number from 1" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    assert len(run("client", "--url", nobody, *options, status=1).stderr.splitlines()) == 1


def test_load(server: TritonServer, tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    sizes = ["--prompt-tokens", "300", "--vocabulary", "240", "--max-tokens", "8", "--requests", "6"]
    options = ["--model", "tiny", *sizes, "--concurrency", "1", "3", "--json", written]
    done = run("load", "--url", server.http, *options)
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [["1", "6", "0"], ["3", "6", "0"]]
    rows = json.loads(written.read_text())["rows"]
    for row in rows:
        assert 0 < row["first_token_median"] <= row["first_token_p95"]
        assert row["tokens_per_second"] > 0 and row["time_per_token"] > 0


def test_serve(triton_venv: Path, tiny_engine: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    """From a repository to an answer, and an interrupt that leaves nothing."""
    repository = tmp_path / "models"
    write_repository(tiny_engine, repository, model_name="tiny", settings={"threads": 1})
    ports = free_ports(3)
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    with socket.create_server(("127.0.0.1", ports[0])):
        done = run("serve", repository, "--venv", triton_venv, *options, status=1)
        assert f"127.0.0.1:{ports[0]} cannot be listened on" in done.stderr
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, EXAMPLES / "serve.py", repository, "--venv", triton_venv, *options]
    # Not this environment's: whoever starts a server need not have it activated.
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": os.defpath})
    try:
        wait_for(lambda: process.poll() is not None or ready(ports[0]), "the model is ready")
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        with closing(http.client.HTTPConnection("127.0.0.1", ports[0], timeout=LIMIT)) as connection:
            body = json.dumps({"input_ids": prompt(20), "max_tokens": 5})
            connection.request("POST", "/v2/models/tiny/generate", body, {"Connection": "close"})
            answer = json.loads(connection.getresponse().read())
        expected = tiny_llm.generate(prompt(20), SamplingParams(max_tokens=5))
        assert answer["text_output"] == expected.text  # type: ignore[union-attr]
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        started = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        assert segments(started)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
        assert segments(started) == []
    finally:
        process.kill()
        log.close()


def ready(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
            connection.request("GET", "/v2/models/tiny/ready", headers={"Connection": "close"})
            return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def test_serve_says_why_not(triton_venv: Path, tmp_path: Path) -> None:
    done = run("serve", tmp_path, "--venv", triton_venv, status=1)
    assert "holds no model" in done.stderr
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.pbtxt").touch()
    spaced = tmp_path / "my models"
    (spaced / "m").mkdir(parents=True)
    (spaced / "m/config.pbtxt").touch()
    assert "has a space" in run("serve", spaced, "--venv", triton_venv, status=1).stderr
    done = run("serve", tmp_path, "--venv", tmp_path, status=1)
    assert "is no environment" in done.stderr
    done = run("serve", tmp_path, "--venv", sys.prefix, status=1)
    assert "has no nvidia-pytriton" in done.stderr
    assert len(done.stderr.splitlines()) == 1
