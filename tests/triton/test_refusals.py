"""Hostile requests to a real Triton server: each is refused and says why, while another client's goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tiny_llm import NAN_TOKEN, prompt
from tests.triton.conftest import QUEUE, exactly
from tests.triton_grpc import RequestFailed, tensor
from tests.triton_requests import Ask, ask, got
from tests.triton_server import TritonServer, wait_for
from trtllm_shadowkv import LLM

LONG = Ask(
    prompt(400, 1),
    exactly(3000, temperature=1.0, seed=1),
)
MIXED = "text_input and input_ids; expected one of them"
NOT_ONE = "unexpected shape for input"


@pytest.fixture(scope="module")
def alone(tiny_llm: LLM) -> list[int]:
    """The tokens of the long request."""
    return LONG.alone(tiny_llm).token_ids


@pytest.fixture
def undisturbed(server: TritonServer, alone: list[int]) -> Iterator[None]:
    """A long request of another client that goes on during and after the test; its tokens are those alone."""
    with server.grpc_stream("tiny", stream=True, **LONG.inputs) as stream:
        ids = stream.next()["output_ids"]
        yield
        for _ in range(stream.unread + 20):
            response = stream.next()
            ids += response.get("output_ids", [])
            if response["final"]:
                break
        assert ids == alone[: len(ids)]


HTTP: dict[str, tuple[dict[str, Any] | bytes, int, str]] = {
    "nothing": ({}, 400, "neither text_input nor input_ids"),
    "neither": ({"max_tokens": 3}, 400, "neither text_input nor input_ids"),
    "both": ({"text_input": "a", "input_ids": [1]}, 400, MIXED),
    "empty text": ({"text_input": ""}, 400, "text_input is empty"),
    "empty ids": ({"input_ids": []}, 400, "the prompt is empty"),
    "two texts": ({"text_input": ["a", "b"]}, 400, "can not convert input 'text_input' to tensor with proper shape"),
    "ids in two rows": ({"input_ids": [[1, 2], [3, 4]]}, 500, "Shape does not match"),
    "a number for a text": ({"text_input": 3}, 500, "non-string"),
    "null": ({"text_input": None}, 500, "non-string"),
    "an object": ({"text_input": {"a": 1}}, 500, "non-string"),
    "a text for a number": ({"text_input": "a", "max_tokens": "x"}, 500, "non-signed-integer"),
    "a fraction": ({"text_input": "a", "max_tokens": 1.5}, 500, "non-signed-integer"),
    "a text for a flag": ({"text_input": "a", "stream": "yes"}, 500, "non-boolean"),
    "two of one": ({"text_input": "a", "max_tokens": [1, 2]}, 400, "can not convert input 'max_tokens' to tensor"),
    "no tokens": ({"text_input": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    "negative": ({"text_input": "a", "max_tokens": -1}, 400, "max_tokens is -1"),
    "enormous": ({"text_input": "a", "max_tokens": 2**31 - 1}, 400, "at most the engine's max_seq_len, 6000"),
    "more than INT32": ({"text_input": "a", "max_tokens": 10**30}, 500, "non-signed-integer"),
    "cold": ({"text_input": "a", "temperature": -1.0}, 400, "temperature is -1.0"),
    "NaN": ({"text_input": "a", "temperature": float("nan")}, 400, "temperature is nan"),
    "infinite": ({"text_input": "a", "temperature": float("inf")}, 400, "temperature is inf"),
    "top_p": ({"text_input": "a", "top_p": 2.0}, 400, "top_p is 2.0"),
    "many stop words": ({"text_input": "a", "stop_words": ["x"] * 10_000}, 400, "10,000 strings; expected at most"),
    "a long stop word": ({"text_input": "a", "stop_words": ["y" * 5000]}, 400, "5,000 characters; expected at most"),
    "id too large": ({"input_ids": [1, 256]}, 400, "token id 256; expected 0 to 255"),
    "id negative": ({"input_ids": [-1]}, 400, "token id -1; expected 0 to 255"),
    "long ids": ({"input_ids": [1] * 6001}, 400, "6001 tokens; expected at most max_seq_len = 6000"),
    "long text": ({"text_input": "a" * 6001}, 400, "6001 tokens; expected at most max_seq_len = 6000"),
    "misspelt": ({"text_input": "a", "max_token": 3}, 400, "'max_token' (did you mean 'max_tokens'?)"),
    "unknown list": ({"text_input": "a", "nonsense": [1]}, 400, "parameter 'nonsense' has invalid type"),
    "beams": ({"text_input": "a", "beam_width": 3}, 400, "beam_width is 3; expected 1; there is no beam search"),
    "sequences": ({"text_input": "a", "num_return_sequences": 2}, 400, "send a request for each answer"),
    "attention": ({"text_input": "a", "attention_mode": "sparse"}, 400, "expected 'shadowkv' or 'dense'"),
    "attention top_k": ({"text_input": "a", "attention_top_k": 0}, 400, "attention top_k is 0"),
    "stop of nobody": ({"stop": True}, 400, "stop without a request id"),
    "stop of a stranger": ({"stop": True, "id": "nobody"}, 400, "no request 'nobody' is running"),
    "no UTF-8": (b'{"text_input": "a\xff"}', 400, "text_input holds bytes that are no UTF-8"),
    "half a pair": (b'{"text_input": "\\ud800"}', 500, "surrogate pair"),
    "half a document": (b'{"text_input": "a", "max_tok', 500, "failed to parse the request JSON"),
    "a list": (b'["a"]', 500, "non-object"),
    "twice": (b'{"text_input": "a", "max_tokens": 1, "max_tokens": 2}', 400, "already exists"),
}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("case", HTTP)
def test_http(server: TritonServer, case: str) -> None:
    given, status, message = HTTP[case]
    with pytest.raises(RequestFailed) as failed:
        if isinstance(given, bytes):
            server.generate("tiny", given)
        else:
            server.generate("tiny", **given)
    assert message in str(failed.value)
    assert failed.value.status == status


GRPC: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "neither": ([("max_tokens", 3)], "neither text_input nor input_ids"),
    "both": ([("text_input", "a"), ("input_ids", 1)], MIXED),
    "empty text": ([("text_input", "")], "text_input is empty"),
    "empty ids": ([("input_ids", [])], "the prompt is empty"),
    "without a batch": ([("text_input", "a", None, [1])], NOT_ONE),
    "a dimension more": ([("text_input", "a", None, [1, 1, 1])], NOT_ONE),
    "two texts": ([("text_input", ["a", "b"])], NOT_ONE),
    "a batch of two": ([("text_input", ["a", "b"], None, [2, 1])], NOT_ONE),
    "a batch of none": ([("input_ids", [], None, [0, 0])], NOT_ONE),
    "an end that is none": ([("text_input", "a"), ("end_id", -2)], "end_id is -2; expected a token id, or -1 for none"),
    "two of one": ([("text_input", "a"), ("max_tokens", [3, 4])], NOT_ONE),
    "INT64": ([("input_ids", [1, 2], "INT64")], "data-type is 'INT64', but model 'tiny' expects 'INT32'"),
    "a number for a text": ([("text_input", 3, "INT32")], "data-type is 'INT32', but model 'tiny' expects 'BYTES'"),
    "a fraction": ([("text_input", "a"), ("max_tokens", 3, "FP32")], "data-type is 'FP32'"),
    "no tokens": ([("text_input", "a"), ("max_tokens", 0)], "max_tokens is 0"),
    "negative": ([("text_input", "a"), ("max_tokens", -(2**31))], "max_tokens is -2147483648"),
    "enormous": ([("text_input", "a"), ("max_tokens", 2**31 - 1)], "at most the engine's max_seq_len, 6000"),
    "NaN": ([("text_input", "a"), ("temperature", float("nan"))], "temperature is nan"),
    "infinite": ([("text_input", "a"), ("temperature", float("inf"))], "temperature is inf"),
    "top_p": ([("text_input", "a"), ("top_p", 2.0)], "top_p is 2.0"),
    "many stop words": ([("text_input", "a"), ("stop_words", ["x"] * 10_000)], "10,000 strings; expected at most"),
    "a long stop word": ([("text_input", "a"), ("stop_words", "y" * 5000)], "5,000 characters; expected at most"),
    "id too large": ([("input_ids", [1, 99_999])], "token id 99999; expected 0 to 255"),
    "no UTF-8": ([("text_input", b"ab\xff")], "text_input holds bytes that are no UTF-8"),
    "a stop word that is none": ([("text_input", "a"), ("stop_words", b"\xc3")], "stop_words holds bytes"),
    "an encoded surrogate": ([("text_input", b"\xed\xa0\x80")], "no UTF-8"),
    "long ids": ([("input_ids", [1] * 6001)], "6001 tokens; expected at most max_seq_len = 6000"),
    "unknown": ([("text_input", "a"), ("nonsense", 3)], "unexpected inference input 'nonsense'"),
    "stop of nobody": ([("stop", True)], "stop without a request id"),
}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("case", GRPC)
def test_grpc(server: TritonServer, case: str) -> None:
    given, message = GRPC[case]
    with (
        server.grpc_stream("tiny", *(tensor(*one) for one in given)) as stream,
        pytest.raises(RequestFailed) as failed,
    ):
        list(stream)
    assert message in str(failed.value)


@pytest.mark.usefixtures("undisturbed")
def test_a_text_of_4_mb(server: TritonServer) -> None:
    with pytest.raises(
        RequestFailed, match="4,000,000 characters; expected at most 24,000 for this engine; shorten it"
    ):
        server.generate("tiny", text_input="a" * 4_000_000)


@pytest.mark.usefixtures("undisturbed")
def test_a_request_that_fails_in_the_engine_fails_alone(server: TritonServer) -> None:
    before = server.metrics("tiny")["shadowkv_requests_total:error"]
    bad = Ask([*prompt(300), NAN_TOKEN], {"max_tokens": 3})
    for way in ("generate", "generate_stream", "gRPC"):
        with pytest.raises(RequestFailed, match="NaN logits"):
            ask(server, "tiny", bad, way)
    assert server.ready("tiny")
    assert ask(server, "tiny", Ask([5, 6], {"max_tokens": 2})).ids
    assert server.metrics("tiny")["shadowkv_requests_total:error"] == before + 3


def test_the_long_request_itself(server: TritonServer, alone: list[int]) -> None:
    with server.grpc_stream("tiny", stream=True, **LONG.inputs) as stream:
        first = stream.next()
        first.pop("final")
        with pytest.raises(RequestFailed):
            server.generate("tiny", text_input="")
        answer = got([first, *stream])
    assert answer.ids == alone


def test_a_full_queue(server: TritonServer) -> None:
    def counts() -> tuple[float, float]:
        values = server.metrics("tiny")
        return values["shadowkv_requests_running"], values["shadowkv_requests_waiting"]

    with server.grpc_stream("tiny", **LONG.inputs) as running, server.grpc_stream("tiny", **LONG.inputs) as waiting:
        for _ in range(3):
            running.send(**LONG.inputs)
        wait_for(lambda: counts()[0] == 4, "four rows run")
        for _ in range(QUEUE - 1):
            waiting.send(text_input="a", max_tokens=2)
        wait_for(lambda: counts() == (4, QUEUE), "the queue is full")
        with pytest.raises(RequestFailed, match=f"{QUEUE} answers wait and 1 more were asked for"):
            server.generate("tiny", text_input="a", max_tokens=2)
