"""What model.py does with messages that the server will not take; all else of it runs in the real server."""

from __future__ import annotations

import json
import socket
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trtllm_shadowkv.triton.repository import _HERE


class Sender:
    """Of a request; ``fails``: as the server's when it takes nothing more."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.sent = fails, list[tuple[Any, int]]()

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.fails:
            raise RuntimeError("the server takes nothing more")
        self.sent.append((response, flags))


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> Any:
    """A model without a server, whose engine's process is the other end of ``model.theirs``."""
    backend: Any = ModuleType("triton_python_backend_utils")
    backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    backend.Tensor = lambda name, array: (name, array.tolist())
    backend.InferenceResponse = lambda tensors=None, error=None: error or tensors
    backend.TritonError = type("TritonError", (str,), {"__new__": lambda cls, text, code: str.__new__(cls, text)})
    backend.TritonError.INTERNAL = 0
    backend.Logger = type("Logger", (), {"log_error": staticmethod(logged.append)})
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    module: dict[str, Any] = {"__name__": "model"}
    exec(compile((_HERE / "model.py").read_text(), "model.py", "exec"), module)
    made = module["TritonPythonModel"]()
    made._name, made._senders, made._metrics, made._families = "m", {}, {}, {}
    made._lock, made._telling = threading.Lock(), threading.Lock()
    made._outputs = {"text_output": np.object_, "output_ids": np.int32}
    made._socket, made.theirs = socket.socketpair()
    with made._socket, made.theirs:
        yield made


def piece(number: int, last: bool = False, **outputs: list[Any]) -> dict[str, Any]:
    return {"op": "response", "number": number, "last": last, "outputs": outputs}


def test_a_request_that_the_server_drops_ends_alone(model: Any, logged: list[str]) -> None:
    good, bad = Sender(), Sender(fails=True)
    model._senders.update({1: good, 2: bad})
    for number in (2, 1):
        model._handle(piece(number, text_output=["né"], output_ids=[7, 8]))
    model._handle(piece(2, output_ids=["x"]))
    model._handle(piece(1, last=True, text_output=["."]))
    tensors = [("text_output", [["né".encode()]]), ("output_ids", [[7, 8]])]
    assert good.sent == [(tensors, 0), ([("text_output", [[b"."]])], 1)]
    assert 1 not in model._senders
    told = [json.loads(line) for line in model.theirs.recv(1 << 16).splitlines()]
    assert told == [{"op": "cancel", "number": 2}] * 2
    assert "the server takes nothing more" in logged[0]
    model._handle({"op": "metrics", "values": [["unknown", {}, 1]]})
    assert "KeyError" in logged[-1]


def test_messages_for_requests_that_have_ended_go_nowhere(model: Any, logged: list[str]) -> None:
    sender = Sender()
    model._senders[3] = sender
    model._handle({"op": "error", "number": 3, "code": "INTERNAL", "text": "no"})
    model._handle({"op": "error", "number": 3, "code": "INTERNAL", "text": "again"})
    model._handle(piece(3, last=True, text_output=["late"]))
    assert sender.sent == [("no", 1)]
    assert logged == []
