"""Speaks to a worker as model.py does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.tiny_llm import assert_drained, one
from tests.tiny_llm import prompt as any_prompt
from trtllm_shadowkv import LLM, SamplingParams
from trtllm_shadowkv.request import RequestOutput
from trtllm_shadowkv.triton import worker

NAN = "~"
"""A prompt that holds it fails; forbidden as output, so that no other does."""
Message = dict[str, Any]
CANCELLED = ("CANCELLED", "the request was cancelled")


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
                if message["op"] in ("ready", "metrics"):
                    for name, labels, value in message["values"]:
                        self.metrics[":".join((name.removeprefix("shadowkv_"), *labels.values()))] = value
                self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 180), f"waited too long until {what}"

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
        result = self.ended.result(180)
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive()
        self.socket.close()
        return result


@contextmanager
def talk(llm: LLM) -> Iterator[Client]:
    """A client whose requests must all have ended properly."""
    client = Client(llm)
    yield client
    client.settle()
    client.send({"op": "close"})
    assert client.end() is True
    assert_drained(llm)
