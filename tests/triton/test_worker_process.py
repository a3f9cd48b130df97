"""Start and end of the process that holds the engine."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llm import assert_drained, wait_until
from tests.triton.worker_client import Client, Message, alone, inputs
from trtllm_shadowkv import LLM
from trtllm_shadowkv.errors import GenerationError
from trtllm_shadowkv.triton import worker


def write_model(folder: Path, engine_dir: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.yaml").write_text(f"engine_dir: {engine_dir}\nthreads: 1\n")
    return folder


def given(theirs: int, server: int, segments: list[str], **more: Any) -> str:
    return json.dumps(
        {
            "protocol": worker.PROTOCOL,
            "socket": theirs,
            "server": server,
            "shared_memory": segments,
            "settings": {},
            **more,
        }
    )


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/shadowkv_test_{uuid.uuid4().hex}")
    path.write_bytes(b"x")
    yield path
    path.unlink(missing_ok=True)


def test_the_process_answers_and_ends(llm: LLM, engine_dir: Path, segment: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    folder = write_model(tmp_path / "1", engine_dir)
    arguments = given(theirs.fileno(), os.getpid(), [str(segment)], settings={"max_queue": "7", "UPPER": "x"})
    process = subprocess.Popen(
        [sys.executable, "-m", "trtllm_shadowkv.triton.worker", str(folder), arguments],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    ours.settimeout(180)
    try:
        lines = ours.makefile("r")
        assert json.loads(lines.readline())["op"] == "ready"
        (record,) = (tmp_path / f"trtllm-shadowkv-{os.getuid()}").iterdir()
        assert json.loads(record.read_text())["segments"] == [str(segment)]
        process.send_signal(signal.SIGINT)  # of a terminal: whoever started it closes the socket
        message = {"op": "submit", "number": 3, "id": "", "inputs": inputs("Hello"), "parameters": {}}
        ours.sendall(json.dumps(message).encode() + b"\n")
        answer = next(m for m in map(json.loads, lines) if m["op"] != "metrics")
        assert (answer["op"], answer["number"], answer["last"]) == ("response", 3, True)
        assert answer["outputs"]["text_output"] == [alone(llm, "Hello").text]
        ours.sendall(b'{"op": "close"}\n')
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
        process.wait()
        ours.close()
    assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert not record.exists()
    assert segment.exists()  # the server lives, and removes it itself


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, list[Message]]]]:
    """Runs worker.serve_model here, for a socket whose other side ``talk`` uses meanwhile: exit status and messages."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    interrupt = signal.getsignal(signal.SIGINT)
    logger = logging.getLogger("trtllm_shadowkv")
    level = logger.level

    def run(
        folder: Path,
        server: int = os.getpid(),
        segments: list[str] | None = None,
        talk: Callable[[socket.socket], None] | None = None,
        **more: Any,
    ) -> tuple[int, list[Message]]:
        ours, theirs = socket.socketpair()
        arguments = given(theirs.detach(), server, segments or [], **more)
        thread = threading.Thread(target=talk, args=(ours,)) if talk is not None else None
        if thread is not None:
            thread.start()
        code = 0
        try:
            worker.serve_model(folder, json.loads(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        if thread is not None:
            thread.join(180)
            assert not thread.is_alive()
            return code, []
        with ours:
            return code, [json.loads(line) for line in ours.recv(1 << 20).splitlines()]

    yield run
    signal.signal(signal.SIGINT, interrupt)
    logger.setLevel(level)


Main = Callable[..., tuple[int, list[Message]]]


def test_an_engine_that_does_not_exist(main: Main, tmp_path: Path) -> None:
    code, messages = main(write_model(tmp_path / "1", tmp_path / "nowhere"))
    assert (code, [m["op"] for m in messages]) == (1, ["dead"])
    assert "nowhere" in messages[0]["reason"]


def test_a_model_without_settings(main: Main, tmp_path: Path) -> None:
    code, messages = main(tmp_path)
    assert (code, [m["op"] for m in messages]) == (1, ["dead"])
    assert "engine_dir is None" in messages[0]["reason"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("treads", "1", "unknown setting 'treads'"),
        ("threads", "many", "threads is 'many'"),
        ("threads", "[", r"the parameter threads is '\['"),
        ("max_batch_size", "0", "max_batch_size is 0"),
        ("device_memory", "0.5", "device_memory is 0.5"),
        ("tokenizer", "nowhere", "nowhere is no directory"),
        ("executor", "cuda", "executor is 'cuda'"),
    ],
)
def test_settings_that_are_none(
    main: Main, engine_dir: Path, tmp_path: Path, name: str, value: str, reason: str
) -> None:
    code, messages = main(write_model(tmp_path / "1", engine_dir), settings={name: value})
    assert (code, [m["op"] for m in messages]) == (1, ["dead"])
    assert reason.replace("\\", "") in messages[0]["reason"]


@pytest.mark.parametrize("protocol", [worker.PROTOCOL + 1, None, "1"])
def test_another_protocol(main: Main, engine_dir: Path, tmp_path: Path, protocol: Any) -> None:
    code, messages = main(write_model(tmp_path / "1", engine_dir), protocol=protocol)
    assert (code, [m["op"] for m in messages]) == (1, ["dead"])
    assert "is of another version; run triton-repository again" in messages[0]["reason"]


def test_an_engine_that_cannot_generate(
    main: Main, engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(llm: LLM) -> None:
        raise GenerationError("of the test")

    monkeypatch.setattr(worker, "probe", fails)
    assert main(write_model(tmp_path / "1", engine_dir)) == (1, [{"op": "dead", "reason": "of the test"}])


@pytest.mark.parametrize("unread", [False, True])
def test_a_server_that_is_killed(main: Main, engine_dir: Path, segment: Path, tmp_path: Path, unread: bool) -> None:
    """The end of the file without `close`, and a reset connection: what it left is removed."""
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def talk(ours: socket.socket) -> None:
        lines = ours.makefile("r")
        assert json.loads(lines.readline())["op"] == "ready"
        message = {"op": "submit", "number": 1, "id": "", "inputs": inputs("Hello", 3000, stream=[True])}
        ours.sendall(json.dumps({**message, "parameters": {}}).encode() + b"\n")
        while json.loads(lines.readline())["op"] == "metrics":
            pass
        server.kill()
        server.wait()
        if unread:
            time.sleep(0.1)
        else:
            ours.shutdown(socket.SHUT_WR)
            lines.read()
        lines.close()
        ours.close()

    try:
        folder = write_model(tmp_path / "1", engine_dir)
        assert main(folder, server=server.pid, segments=[str(segment)], talk=talk)[0] == 0
    finally:
        server.kill()
        server.communicate()
    assert not segment.exists()
    assert list((tmp_path / f"tmp/trtllm-shadowkv-{os.getuid()}").iterdir()) == []


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"{\n", b"\xff\n", b"\n", b"[]\n", b'{"op": "submit"}\n', b'{"op"'])
def test_a_message_that_is_none_ends_it(llm: LLM, line: bytes) -> None:
    client = Client(llm)
    client.started(client.submit(inputs("a", 3000, stream=[True])))
    client.socket.sendall(line)
    client.socket.shutdown(socket.SHUT_WR)
    with pytest.raises((ValueError, KeyError, TypeError)):
        client.end()
    client.socket.close()
    assert_drained(llm)


@pytest.mark.parametrize("how", ["close", "end of file", "reset"])
def test_the_end_of_the_other_side(llm: LLM, how: str) -> None:
    client = Client(llm, reads=how != "reset")
    number = client.submit(inputs("a", 3000, stream=[True]))
    if how == "reset":
        wait_until(lambda: llm.usage().running == 1, "it runs")
        time.sleep(0.05)
        client.socket.close()  # with messages that were not read
    else:
        client.started(number)
        if how == "close":
            client.send({"op": "close"})
        else:
            client.socket.shutdown(socket.SHUT_WR)
    assert client.end() is (how == "close")
    assert_drained(llm)  # what ran is aborted


def test_an_operation_of_another_version_is_ignored(client: Client) -> None:
    client.send({"op": "something", "number": 1})
    client.ask(inputs("a"))
