"""Cancellations and stops that come to the process that holds the engine."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from tests.tiny_llm import wait_until
from tests.triton.worker_client import CANCELLED, Client, inputs, is_last, prompt
from trtllm_shadowkv import LLM
from trtllm_shadowkv.request import RequestHandle


def test_a_cancel_before_it_runs(client: Client, llm: LLM) -> None:
    message = client.message(inputs("a", 3000))
    client.send(message, {"op": "cancel", "number": message["number"]})
    assert client.error(message["number"]) == CANCELLED
    assert client.metrics["requests_total:cancelled"] == 1


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
        handle.result(180)

    monkeypatch.setattr(RequestHandle, "abort", late)
    number = client.submit(inputs("a", 60, stream=[True]))
    client.started(number)
    client.cancel(number)
    assert client.answer(number)[-1]["outputs"]["finish_reason"] == ["length"]
    client.settle()
    assert (client.metrics["requests_total:length"], client.metrics["requests_total:cancelled"]) == (1, 0)


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
    assert client.metrics["requests_total:cancelled"] == ends["CANCELLED"]
    assert client.metrics["requests_total:length"] == ends[""]


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
