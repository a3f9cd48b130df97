"""The process that holds the engine, spoken to as model.py does: most of it inside this process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BuildTiny
from tests.tiny_llm import assert_drained, build_tiny_llm, one, wait_until
from tests.tiny_llm import prompt as any_prompt
from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.errors import GenerationError, RequestError
from trtllm_shadowkv.request import RequestHandle, RequestOutput
from trtllm_shadowkv.triton import worker

NAN = "~"
"""A prompt that holds it fails; forbidden as output, so that no other does."""
Message = dict[str, Any]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [token if token != ord(NAN) else 1 for token in any_prompt(length, seed)]


def inputs(what: str | list[int], tokens: int = 12, **more: list[Any]) -> dict[str, list[Any]]:
    given: dict[str, list[Any]] = {"text_input": [what]} if isinstance(what, str) else {"input_ids": what}
    return {**given, "max_tokens": [tokens], "ignore_eos": [True], "bad_words": [NAN], **more}


def alone(llm: LLM, what: str | list[int], tokens: int = 12, **more: Any) -> RequestOutput:
    """What LLM.generate answers to the same."""
    attention = more.pop("attention", None)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, bad=NAN, **more)
    return one(llm, what, params, attention=attention)


def is_last(message: Message) -> bool:
    return message["op"] == "error" or bool(message.get("last"))


class Client:
    """A Server on a thread of its own, and what it sent."""

    def __init__(self, llm: LLM, *, reads: bool = True) -> None:
        self.socket, theirs = socket.socketpair()
        self.ended: Future[bool] = Future()
        self.messages: list[Message] = []
        self.metrics: dict[str, float] = {}
        self.numbers = 0
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._serve, args=(llm, theirs), daemon=True)]
        if reads:
            self._threads.append(threading.Thread(target=self._read, daemon=True))
        for thread in self._threads:
            thread.start()

    def _serve(self, llm: LLM, theirs: socket.socket) -> None:
        async def run() -> bool:
            reader, writer = await asyncio.open_connection(sock=theirs, limit=1 << 31)
            try:
                return await worker.Server(llm, reader, writer).serve()
            finally:
                writer.close()

        try:
            self.ended.set_result(asyncio.run(run()))
        except Exception as e:
            self.ended.set_exception(e)

    def _read(self) -> None:
        for line in self.socket.makefile("rb"):
            message = json.loads(line)
            with self._changed:
                self.messages.append(message)
                if message["op"] == "metrics":
                    for name, labels, value in message["values"]:
                        self.metrics[":".join((name.removeprefix("shadowkv_"), *labels.values()))] = value
                self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60), f"waited too long until {what}"

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def message(self, given: Message, *, id: str = "", parameters: Message | None = None) -> Message:
        self.numbers += 1
        return {"op": "submit", "number": self.numbers, "id": id, "inputs": given, "parameters": parameters or {}}

    def submit(self, given: Message, **more: Any) -> int:
        message = self.message(given, **more)
        self.send(message)
        return int(message["number"])

    def cancel(self, number: int) -> None:
        self.send({"op": "cancel", "number": number})

    def of(self, number: int) -> list[Message]:
        return [m for m in self.messages if m.get("number") == number]

    def started(self, number: int) -> None:
        self.wait(lambda: bool(self.of(number)), f"request {number} is answered")

    def answer(self, number: int) -> list[Message]:
        """All messages of a request, once the last one came."""
        self.wait(lambda: any(is_last(m) for m in self.of(number)), f"request {number} ends")
        return self.of(number)

    def error(self, number: int) -> tuple[str, str]:
        last = self.answer(number)[-1]
        assert last["op"] == "error", last
        return last["code"], last["text"]

    def ask(self, given: Message, **more: Any) -> Message:
        """Outputs of a request that is answered in one piece."""
        (message,) = self.answer(self.submit(given, **more))
        assert message["op"] == "response", message
        return dict(message["outputs"])

    def settle(self) -> None:
        """Check that every request had one last message, and that nothing follows it."""
        for number in range(1, self.numbers + 1):
            self.answer(number)
        fence = self.submit({})
        self.answer(fence)
        for number in range(1, fence + 1):
            assert [is_last(m) for m in self.of(number)].count(True) == 1, self.of(number)
            assert is_last(self.of(number)[-1])

    def end(self) -> bool:
        """What serve() returned; the socket was closed, or `close` was sent."""
        result = self.ended.result(60)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self.socket.close()
        return result


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llm(tmp_path_factory.mktemp("worker"), ord(NAN))


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, threads=1) as llm:
        yield llm


@contextmanager
def talk(llm: LLM) -> Iterator[Client]:
    """A client whose requests must all have ended properly."""
    client = Client(llm)
    yield client
    client.settle()
    client.send({"op": "close"})
    assert client.end() is True
    assert_drained(llm)


@pytest.fixture
def client(llm: LLM) -> Iterator[Client]:
    with talk(llm) as client:
        yield client


# --- the process itself -------------------------------------------------------------------------------------------


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
    ours.settimeout(60)
    try:
        lines = ours.makefile("r")
        assert json.loads(lines.readline()) == {"op": "ready", "metrics": [list(row) for row in worker.METRICS]}
        (record,) = (tmp_path / f"trtllm-shadowkv-{os.getuid()}").iterdir()
        assert json.loads(record.read_text())["segments"] == [str(segment)]
        process.send_signal(signal.SIGINT)  # of a terminal: whoever started it closes the socket
        message = {"op": "submit", "number": 3, "id": "", "inputs": inputs("Hello"), "parameters": {}}
        ours.sendall(json.dumps(message).encode() + b"\n")
        answer = next(m for m in map(json.loads, lines) if m["op"] != "metrics")
        assert (answer["op"], answer["number"], answer["last"]) == ("response", 3, True)
        assert answer["outputs"]["text_output"] == [alone(llm, "Hello").text]
        ours.sendall(b'{"op": "close"}\n')
        _, errors = process.communicate(timeout=60)
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
            thread.join(60)
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


# --- answers ------------------------------------------------------------------------------------------------------


def test_the_first_message_is_ready(client: Client) -> None:
    client.wait(lambda: len(client.messages) > 1, "two messages came")
    ready, metrics = client.messages[:2]
    assert ready == {"op": "ready", "metrics": [list(row) for row in worker.METRICS]}
    assert metrics["op"] == "metrics"


PROMPTS: list[str | list[int]] = ["Hello", "Zażółć gęślą jaźń 🙂", prompt(5), prompt(300), prompt(700, 1)]


@pytest.mark.parametrize("what", PROMPTS, ids=range(len(PROMPTS)))
def test_an_answer_in_one_piece(client: Client, llm: LLM, what: str | list[int]) -> None:
    expected = alone(llm, what, 40).outputs[0]
    found = client.ask(inputs(what, 40))
    figures = expected.statistics
    assert found.pop("time_to_first_token")[0] > 0
    assert found.pop("shadowkv_hit_rate", [None]) == [figures.hit_rate]
    assert found == {
        "text_output": [expected.text],
        "output_ids": expected.token_ids,
        "sequence_length": [40],
        "finish_reason": ["length"],
        "num_input_tokens": [figures.prompt_tokens],
        "shadowkv_bytes_fetched": [figures.bytes_fetched],
        "shadowkv_host_bytes": [figures.host_bytes],
        "shadowkv_sealed_tokens": [figures.sealed_tokens],
    }
    assert (figures.sealed_tokens > 0) == (figures.prompt_tokens >= 256)


@pytest.mark.parametrize("what", PROMPTS, ids=range(len(PROMPTS)))
def test_an_answer_in_pieces(client: Client, llm: LLM, what: str | list[int]) -> None:
    expected = alone(llm, what, 40).outputs[0]
    pieces = client.answer(client.submit(inputs(what, 40, stream=[True])))
    outputs = [piece["outputs"] for piece in pieces]
    assert len(pieces) > 5
    assert [piece["last"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(o["text_output"][0] for o in outputs) == expected.text
    assert [t for o in outputs for t in o.get("output_ids", [])] == expected.token_ids
    assert all(o["text_output"] != [""] for o in outputs[:-1])
    so_far = 0
    for output in outputs:
        so_far += len(output.get("output_ids", []))
        assert output["sequence_length"] == [so_far]
    assert all(set(o) == {"text_output", "output_ids", "sequence_length"} for o in outputs[:-1])
    assert outputs[-1]["finish_reason"] == ["length"]
    assert outputs[-1]["num_input_tokens"] == [expected.statistics.prompt_tokens]


def test_sampling_and_attention_are_passed_on(client: Client, llm: LLM) -> None:
    sampled = client.ask(inputs("abc", temperature=[0.9], top_k=[50], seed=[7]))
    assert sampled["output_ids"] == alone(llm, "abc", temperature=0.9, top_k=50, seed=7).outputs[0].token_ids
    dense = client.ask(inputs(prompt(400), attention_mode=["dense"]))
    expected = alone(llm, prompt(400), attention=AttentionParams(mode="dense")).outputs[0]
    assert (dense["output_ids"], dense["shadowkv_sealed_tokens"]) == (expected.token_ids, [0])
    ids = alone(llm, "abc").outputs[0].token_ids
    stopped = client.ask(inputs("abc", end_id=[ids[4]]))
    assert (stopped["output_ids"], stopped["finish_reason"]) == (ids[: ids.index(ids[4]) + 1], ["stop"])


def test_log_probs_come_with_the_last_message(client: Client, llm: LLM) -> None:
    expected = alone(llm, "abc", logprobs=0).outputs[0]
    assert expected.logprobs is not None
    by_token = [by[token] for by, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    whole = client.ask(inputs("abc", return_log_probs=[True]))
    pieces = client.answer(client.submit(inputs("abc", return_log_probs=[True], stream=[True])))
    for outputs in (whole, pieces[-1]["outputs"]):
        assert outputs["output_log_probs"] == by_token
        assert outputs["cum_log_probs"] == [expected.cumulative_logprob]
    assert not any("cum_log_probs" in piece["outputs"] for piece in pieces[:-1])
    assert "cum_log_probs" not in client.ask(inputs("abc"))


def test_many_at_a_time_are_what_they_are_alone(client: Client, llm: LLM) -> None:
    work = [(prompt(length, length), tokens) for length in (3, 90, 300, 500) for tokens in (1, 5, 30)]
    numbers = [client.submit(inputs(what, tokens, stream=[tokens == 5])) for what, tokens in work]
    for number, (what, tokens) in zip(numbers, work, strict=True):
        found = [t for m in client.answer(number) for t in m["outputs"].get("output_ids", [])]
        assert found == alone(llm, what, tokens).outputs[0].token_ids


def test_an_engine_without_tokenizer(build_tiny: BuildTiny) -> None:
    with LLM(build_tiny().engine.path, threads=1) as llm, talk(llm) as client:
        ask = {"input_ids": [5, 6, 7], "max_tokens": [6], "ignore_eos": [True], "stream": [True]}
        pieces = [m["outputs"] for m in client.answer(client.submit(ask))]
        expected = one(llm, [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)).outputs[0].token_ids
        assert [t for piece in pieces for t in piece["output_ids"]] == expected
        assert len(pieces) > 1
        assert all(piece["text_output"] == [""] for piece in pieces)
        code, text = client.error(client.submit({"text_input": ["x"]}))
        assert (code, "needs a tokenizer" in text) == ("INVALID_ARG", True)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": [0]}, "max_tokens is 0"),
        ({"max_tokens": [1_000_000]}, "at most the engine's max_seq_len"),
        ({"temperature": [float("nan")]}, "temperature is nan"),
        ({"input_ids": [1]}, "text_input and input_ids"),
        ({"text_input": ["\udcff"]}, "no UTF-8"),
        ({"text_input": ["x" * 10_000]}, "10,000"),
        ({"stop_token_ids": [99_999]}, "99999"),
        ({"attention_top_k": [5000]}, "at most 1024"),
        ({"stop": [True, True]}, "stop has 2 elements"),
        ({"max_tokens": ["many"]}, "max_tokens is 'many'"),
        ({"\udcff": [1]}, "unknown input"),
    ],
)
def test_a_request_that_is_refused(client: Client, more: Message, text: str) -> None:
    code, found = client.error(client.submit({**inputs("x"), **more}))
    assert code == "INVALID_ARG"
    assert text.replace(",", "") in found.replace(",", "")
    assert "\n" not in found


def test_other_refusals(client: Client) -> None:
    code, text = client.error(client.submit(inputs([])))
    assert (code, "empty" in text or "no token" in text) == ("INVALID_ARG", True), text
    code, text = client.error(client.submit(inputs("x"), parameters={"max_token": 5}))
    assert (code, text.partition(";")[0]) == (
        "INVALID_ARG",
        "unknown input 'max_token' (did you mean 'max_tokens'?)",
    )
    client.ask(inputs("x"), parameters={"priority": 1, "timeout": 5})


def test_a_full_queue(engine_dir: Path) -> None:
    with LLM(engine_dir, threads=1, max_queue=1, max_batch_size=1) as llm, talk(llm) as client:
        runs = client.submit(inputs("a", 3000, stream=[True]))
        client.started(runs)
        waits = client.submit(inputs("b", 5))
        wait_until(lambda: llm.usage().waiting == 1, "the second waits")
        code, text = client.error(client.submit(inputs("c")))
        assert (code, "at most 1 waiting (max_queue)" in text) == ("UNAVAILABLE", True)
        assert client.error(client.submit(inputs("c", 0)))[0] == "INVALID_ARG"
        client.cancel(runs)
        assert client.error(runs)[0] == "CANCELLED"
        assert client.answer(waits)[-1]["outputs"]["finish_reason"] == ["length"]


def test_an_engine_that_is_closed(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    with talk(llm) as client:
        runs = client.submit(inputs("a", 3000, stream=[True]))
        client.started(runs)
        llm.close()
        assert client.error(runs) == ("UNAVAILABLE", "the engine is being closed")
        code, text = client.error(client.submit(inputs("a")))
        assert (code, "the LLM is closed" in text) == ("UNAVAILABLE", True)
        client.wait(lambda: client.metrics.get("requests_total:error") == 2, "both are counted")
        assert "requests_total:cancelled" not in client.metrics


def test_a_request_that_fails(client: Client, llm: LLM) -> None:
    neighbour = client.submit(inputs(prompt(300), 30))
    for stream in (False, True):
        code, text = client.error(client.submit(inputs(f"abc{NAN}", stream=[stream])))
        assert (code, "NaN logits" in text) == ("INTERNAL", True)
    assert client.answer(neighbour)[-1]["outputs"]["output_ids"] == alone(llm, prompt(300), 30).outputs[0].token_ids
    assert len(client.ask(inputs("abc"))["output_ids"]) == 12
    assert not [m for m in client.messages if m["op"] == "dead"]


def test_a_fault_of_ours(client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(llm, "prepare", fails)
        assert client.error(client.submit(inputs("a"))) == ("INTERNAL", "KeyError: 'of the test'")
    client.ask(inputs("a"))


@pytest.mark.parametrize("dead", [True, False])
def test_after_a_failure_the_engine_is_tried(client: Client, monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    exits: list[int] = []
    tried = threading.Event()

    def fails(llm: LLM) -> None:
        tried.set()
        raise GenerationError("the GPU fell off") if dead else RequestError("too busy to try")

    monkeypatch.setattr(worker, "probe", fails)
    monkeypatch.setattr(os, "_exit", exits.append)
    assert client.error(client.submit(inputs(NAN)))[0] == "INTERNAL"
    assert tried.wait(60)
    if dead:
        client.wait(lambda: client.messages[-1] == {"op": "dead", "reason": "the GPU fell off"}, "it says so")
        wait_until(lambda: exits == [1], "it ends")
    else:
        client.ask(inputs("a"))
        assert not [m for m in client.messages if m["op"] == "dead"]
        assert exits == []


# --- cancelled ----------------------------------------------------------------------------------------------------

CANCELLED = ("CANCELLED", "the request was cancelled")


def test_a_cancel_before_it_runs(client: Client, llm: LLM) -> None:
    message = client.message(inputs("a", 3000))
    client.send(message, {"op": "cancel", "number": message["number"]})
    assert client.error(message["number"]) == CANCELLED
    client.wait(lambda: client.metrics.get("requests_total:cancelled") == 1, "it is counted")


def test_a_cancel_in_the_queue_while_it_reads_and_while_it_writes(client: Client, llm: LLM) -> None:
    busy = [client.submit(inputs("a", 3000, stream=[True])) for _ in range(4)]
    for number in busy:
        client.started(number)
    waits = client.submit(inputs("b", 3000))
    wait_until(lambda: llm.usage().waiting == 1, "it waits")
    client.cancel(waits)
    assert client.error(waits) == CANCELLED
    client.cancel(busy[0])
    client.cancel(busy[0])
    assert client.error(busy[0]) == CANCELLED
    reads = client.submit(inputs(prompt(3000), 5))
    wait_until(lambda: llm.usage().running == 4, "it has a row")
    client.cancel(reads)
    assert client.error(reads) == CANCELLED
    for number in busy[1:]:
        client.cancel(number)
        assert client.error(number) == CANCELLED


def test_a_cancel_afterwards_and_of_nothing(client: Client) -> None:
    done = client.submit(inputs("a"))
    client.answer(done)
    client.cancel(done)
    client.cancel(12345)
    assert len(client.answer(done)) == 1
    client.ask(inputs("a"))


def test_a_cancel_that_comes_too_late_changes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended by itself, but nobody was told yet: still one last message, its answer."""

    def late(handle: RequestHandle) -> None:
        handle.result(60)

    monkeypatch.setattr(RequestHandle, "abort", late)
    number = client.submit(inputs("a", 60, stream=[True]))
    client.started(number)
    client.cancel(number)
    assert client.answer(number)[-1]["outputs"]["finish_reason"] == ["length"]
    client.settle()
    client.wait(lambda: client.metrics.get("requests_total:length") == 1, "it is counted")
    assert "requests_total:cancelled" not in client.metrics


def test_cancels_at_any_moment(client: Client) -> None:
    rng = random.Random(0)
    numbers = []
    for _ in range(60):
        number = client.submit(inputs("a", rng.choice([1, 2, 4]), stream=[rng.random() < 0.5]))
        time.sleep(rng.random() * 0.02)
        client.cancel(number)
        numbers.append(number)
    client.settle()
    ends = Counter(client.answer(number)[-1].get("code", "") for number in numbers)
    assert set(ends) <= {"", "CANCELLED"}
    client.wait(lambda: client.metrics.get("requests_total:cancelled", 0) == ends["CANCELLED"], "all are counted")
    client.wait(lambda: client.metrics.get("requests_total:length", 0) == ends[""], "all are counted")


def test_stop_ends_requests_by_their_id(client: Client, llm: LLM) -> None:
    other, *same = [client.submit(inputs("a", 3000, stream=[True]), id=id) for id in ("y", "x", "x", "x")]
    for number in (other, *same):
        client.started(number)
    same.append(client.submit(inputs("b", 3000), id="x"))  # in the queue
    nameless = client.submit(inputs("c", 3000))
    wait_until(lambda: llm.usage().waiting == 2, "they wait")
    stop = {"stop": [True]}
    assert client.ask(stop, id="x") == {"text_output": [""], "finish_reason": ["cancelled"]}
    assert [client.error(number) for number in same] == [CANCELLED] * 4
    for unknown in ("x", "z"):
        assert client.error(client.submit(stop, id=unknown)) == (
            "INVALID_ARG",
            f"no request '{unknown}' is running; expected the id of one that is",
        )
    code, text = client.error(client.submit(stop))
    assert (code, "stop without a request id" in text) == ("INVALID_ARG", True)
    assert not any(is_last(m) for number in (other, nameless) for m in client.of(number))
    client.ask({**inputs("whatever"), **stop}, id="y")  # clients of TensorRT-LLM send a text with it
    assert client.error(other) == CANCELLED
    client.cancel(nameless)
    assert client.error(nameless) == CANCELLED


def test_stop_of_a_request_that_is_not_checked_yet(client: Client) -> None:
    work, stop = client.message(inputs("a", 3000), id="x"), client.message({"stop": [True]}, id="x")
    client.send(work, stop)
    assert client.error(work["number"]) == CANCELLED
    assert client.answer(stop["number"])[-1]["op"] == "response"


# --- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_add_up(client: Client, llm: LLM) -> None:
    known = {name.removeprefix("shadowkv_"): kind for name, kind, _ in worker.METRICS}
    answers = [client.submit(inputs(what, 20)) for what in (prompt(300), prompt(600, 1), "abc")]
    token = alone(llm, "abc").outputs[0].token_ids[0]
    stopped = client.submit(inputs("abc", stop_token_ids=[token]))
    refused = [client.submit(inputs("abc", 0)) for _ in range(2)]
    failed = client.submit(inputs(NAN))
    for number in (*answers, stopped, *refused, failed):
        client.answer(number)
    cancelled = [client.submit(inputs("abcde", 3000, stream=[True])) for _ in range(2)]
    for number in cancelled:
        client.started(number)
    client.wait(lambda: client.metrics["requests_running"] == 2, "both run")
    assert client.metrics["device_memory_used_bytes"] > 0
    assert client.metrics["device_memory_bytes"] == llm.usage().device_memory
    assert client.metrics["host_memory_bytes"] == llm.usage().host_memory
    for number in cancelled:
        client.cancel(number)
        client.answer(number)

    def total() -> float:
        return sum(value for name, value in client.metrics.items() if name.startswith("requests_total"))

    client.wait(lambda: total() == 9, "all are counted")
    gauges = ("requests_waiting", "requests_running", "device_memory_used_bytes", "host_memory_used_bytes")
    client.wait(lambda: all(client.metrics[name] == 0 for name in gauges), "gauges are zero")
    reasons = {"length": 3, "stop": 1, "error": 3, "cancelled": 2}
    assert {name.partition(":")[2]: n for name, n in client.metrics.items() if ":" in name} == reasons
    assert client.metrics["prompt_tokens_total"] == 300 + 600 + 3 + 3 + 1 + 2 * 5
    pieces = [m["outputs"] for number in cancelled for m in client.of(number) if m["op"] == "response"]
    seen = sum(len(piece.get("output_ids", ())) for piece in pieces)
    assert seen <= client.metrics["generated_tokens_total"] - (3 * 20 + 1) < 2 * 3000
    outputs = [client.of(number)[-1]["outputs"] for number in answers]
    for name, output in (
        ("bytes_fetched_total", "shadowkv_bytes_fetched"),
        ("sealed_tokens_total", "shadowkv_sealed_tokens"),
    ):
        assert client.metrics[name] >= sum(o[output][0] for o in outputs) > 0
    hits, misses = client.metrics["chunks_hit_total"], client.metrics["chunks_missed_total"]
    assert client.metrics["hit_rate"] == hits / (hits + misses)
    assert {name.partition(":")[0] for name in client.metrics} == set(known)
    assert {name for name, kind in known.items() if kind == "COUNTER"} == {n for n in known if n.endswith("_total")}


def test_metrics_that_did_not_change_are_not_sent(client: Client) -> None:
    client.wait(lambda: bool(client.metrics), "they came")
    before = len(client.messages)
    time.sleep(3 * worker._INTERVAL)
    assert len(client.messages) == before


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
