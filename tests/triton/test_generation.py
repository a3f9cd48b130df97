"""Answers of a real Triton server: in every way of asking those of LLM alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest

from tests.tiny_llm import prompt
from tests.triton.conftest import exactly
from tests.triton_requests import WAYS, Ask, Got, ask
from tests.triton_server import TritonServer, wait_for
from trtllm_shadowkv import LLM
from trtllm_shadowkv.request import CompletionOutput

FRANCE = "The capital of France is"
STREAMED = WAYS[1::2]


def same(answer: Got, alone: CompletionOutput) -> None:
    assert (answer.text, answer.ids) == (alone.text, alone.token_ids)
    assert answer.last["finish_reason"] == alone.finish_reason
    assert answer.last["num_input_tokens"] == alone.statistics.prompt_tokens


@pytest.fixture(scope="module")
def france(demo_llm: LLM) -> CompletionOutput:
    """A known greedy answer."""
    answer = Ask(FRANCE, {"max_tokens": 16}).alone(demo_llm)
    assert answer.text.startswith(" Paris")
    return answer


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_that_of_llm(server: TritonServer, france: CompletionOutput, way: str) -> None:
    answer = ask(server, "shadowkv", Ask(FRANCE, {"max_tokens": 16}), way)
    same(answer, france)
    if way in STREAMED:
        assert len(answer.pieces) > 2
        assert all(answer.pieces[:-1])
    else:
        assert len(answer.pieces) == 1
    assert 0 < answer.last["time_to_first_token"] < 60


def test_a_stream_comes_while_it_is_generated(server: TritonServer) -> None:
    for way in STREAMED:
        inputs = {"input_ids": [5], "stream": True, **exactly(3000)}
        if way == "generate_stream":
            stream = server.generate_stream("tiny", **inputs)
            first = next(stream)
            wait_for(lambda: server.metrics("tiny")["shadowkv_requests_running"] == 1, "it runs")
            stream.close()  # type: ignore[attr-defined]
        else:
            with server.grpc_stream("tiny", **inputs) as grpc:
                first = grpc.next()
                wait_for(lambda: server.metrics("tiny")["shadowkv_requests_running"] == 1, "it runs")
        assert first["sequence_length"] < 100


# --- many at once -----------------------------------------------------------------------------------------------------


def _tiny_requests(llm: LLM) -> list[Ask]:
    requests = [
        Ask(prompt(n, seed), exactly(tokens, temperature=1.0, top_k=40, seed=seed))
        for seed, (n, tokens) in enumerate([(5, 40), (90, 120), (300, 30), (700, 60), (1500, 20), (257, 300)])
    ]
    requests += [Ask(prompt(n, 7), exactly(50)) for n in (1, 30, 600)]
    requests += [
        Ask("Grüße, 東京 🎉", exactly(200, temperature=1.5, seed=2**64 - 1)),
        Ask("x" * 400, exactly(80, temperature=0.8, top_p=0.9, min_p=0.02, seed=4)),
        Ask("a b c", exactly(60, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
        Ask(prompt(500, 8), exactly(40), mode="dense"),
        Ask(prompt(800, 9), exactly(40, temperature=0.7, seed=5), chunks=16),
        Ask(prompt(40, 10), exactly(1)),
        Ask(prompt(320, 11), exactly(64, top_k=3, seed=0)),
    ]
    return requests


def _demo_requests(llm: LLM) -> list[Ask]:
    assert llm.tokenizer is not None
    long = "One day a fox met a crow that held a piece of cheese, and the fox said to the crow: what a fine bird. " * 6
    texts = ["Once upon a time", "def fibonacci(n):", "Zürich, 東京 und 🎉 sind", "1, 2, 3, 4,", "The sun is", "Q: "]
    requests = [
        Ask(text, {"max_tokens": 5 + 2 * i, "temperature": 0.9, "top_k": 50, "seed": i}) for i, text in enumerate(texts)
    ]
    requests += [Ask(text, {"max_tokens": 8}, stop=["\n", " the"]) for text in texts]
    requests += [
        Ask(long, {"max_tokens": 10}),
        Ask(long[50:], {"max_tokens": 8, "temperature": 1.0, "seed": 3}),
        Ask(long[:550], {"max_tokens": 6, "top_p": 0.8, "seed": 3}, mode="dense"),
        Ask(llm.tokenizer.encode(FRANCE), {"max_tokens": 12, "temperature": 0.5, "seed": 11}),
    ]
    return requests


@pytest.mark.parametrize("model", ["shadowkv", "tiny"])
def test_sixteen_clients_at_once_get_what_each_would_alone(
    server: TritonServer, model: str, request: pytest.FixtureRequest
) -> None:
    llm = request.getfixturevalue({"shadowkv": "demo_llm", "tiny": "tiny_llm"}[model])
    requests = {"shadowkv": _demo_requests, "tiny": _tiny_requests}[model](llm)
    assert len(requests) == 16
    alone = [one.alone(llm) for one in requests]
    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(lambda one, way: ask(server, model, one, way), requests, cycle(WAYS))
        for answer, expected in zip(answers, alone, strict=True):
            same(answer, expected)
            assert answer.last["shadowkv_sealed_tokens"] == expected.statistics.sealed_tokens
    assert sum(one.statistics.sealed_tokens > 0 for one in alone) >= 2


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def test_token_ids_in_the_place_of_a_text(server: TritonServer, demo_llm: LLM, france: CompletionOutput) -> None:
    assert demo_llm.tokenizer is not None
    ids = demo_llm.tokenizer.encode(FRANCE)
    for way in WAYS:
        same(ask(server, "shadowkv", Ask(ids, {"max_tokens": 16}), way), france)


def test_end_tokens(server: TritonServer, demo_llm: LLM, france: CompletionOutput) -> None:
    at = 6
    end = france.token_ids[at]
    assert end not in france.token_ids[:at]
    ended = ask(server, "shadowkv", Ask(FRANCE, {"max_tokens": 16}), end_id=end)
    assert (ended.ids, ended.last["finish_reason"]) == (france.token_ids[: at + 1], "stop")
    same(ended, Ask(FRANCE, {"max_tokens": 16, "stop_token_ids": [end]}).alone(demo_llm))

    chat = demo_llm.chat_ids([{"role": "user", "content": "Answer with one word: is the sky blue?"}])
    own = Ask(chat, {"max_tokens": 24})
    on = Ask(chat, {"max_tokens": 24, "ignore_eos": True})
    assert (own.alone(demo_llm).finish_reason, on.alone(demo_llm).finish_reason) == ("stop", "length")
    same(ask(server, "shadowkv", own), own.alone(demo_llm))
    same(ask(server, "shadowkv", on, "gRPC stream"), on.alone(demo_llm))
    same(ask(server, "shadowkv", own, end_id=-1), on.alone(demo_llm))


@pytest.mark.parametrize(
    "settings", [exactly(40), exactly(40, temperature=1.0, top_k=40, seed=6)], ids=["greedy", "sampled"]
)
def test_log_probs_are_those_of_llm(server: TritonServer, tiny_llm: LLM, settings: dict[str, Any]) -> None:
    given = prompt(300, 12)
    alone = Ask(given, {**settings, "logprobs": 0}).alone(tiny_llm)
    assert alone.logprobs is not None
    expected = [by[token] for by, token in zip(alone.logprobs, alone.token_ids, strict=True)]
    for way in WAYS:
        answer = ask(server, "tiny", Ask(given, settings), way, return_log_probs=True)
        same(answer, alone)
        assert answer.last["output_log_probs"] == pytest.approx(expected, rel=1e-6)
        assert answer.last["cum_log_probs"] == pytest.approx(alone.cumulative_logprob, rel=1e-6)
    assert "output_log_probs" not in ask(server, "tiny", Ask(given, settings)).last


def test_figures_of_the_last_response_are_those_of_llm(server: TritonServer, tiny_llm: LLM, demo_llm: LLM) -> None:
    long = "The cat sat on the mat, and the dog lay by the door. " * 15
    for model, llm, request in (
        ("tiny", tiny_llm, Ask(prompt(900, 1), exactly(60))),
        ("shadowkv", demo_llm, Ask(long, {"max_tokens": 6, "ignore_eos": True})),
    ):
        figures = request.alone(llm).statistics
        for way in WAYS[::3]:
            last = ask(server, model, request, way).last
            assert last["shadowkv_hit_rate"] == pytest.approx(figures.hit_rate, rel=1e-6)
            assert 0.5 < last["shadowkv_hit_rate"] < 1
            assert last["shadowkv_host_bytes"] == figures.host_bytes > 0
            assert last["shadowkv_sealed_tokens"] == figures.sealed_tokens > 64
            assert last["shadowkv_bytes_fetched"] == figures.bytes_fetched > 0
            assert last["num_input_tokens"] == figures.prompt_tokens
            assert last["sequence_length"] == figures.generated_tokens
    short = ask(server, "tiny", Ask([5], exactly(3))).last
    assert "shadowkv_hit_rate" not in short
    assert (short["shadowkv_sealed_tokens"], short["shadowkv_host_bytes"]) == (0, 0)


# --- text -------------------------------------------------------------------------------------------------------------


def test_stop_words_end_an_answer_wherever_tokens_end(
    server: TritonServer, demo_llm: LLM, france: CompletionOutput
) -> None:
    text = france.text
    assert demo_llm.tokenizer is not None
    words = [text[3:9], text[5:14], " answer is", "The ans", text[-5:], "s.\n\nThe answ"]
    for word in words:
        assert word in text
        assert len(demo_llm.tokenizer.encode(word, special=False)) > 1
    for stop in ([word] for word in words):
        request = Ask(FRANCE, {"max_tokens": 16}, stop=[*stop, "never comes"])
        alone = request.alone(demo_llm)
        assert (alone.text, alone.finish_reason) == (text[: text.index(stop[0])], "stop")
        for way in ("generate", *STREAMED):
            same(ask(server, "shadowkv", request, way), alone)
    almost = Ask(FRANCE, {"max_tokens": 16}, stop=[text[3:9] + "\0", " answer isn't"])
    for way in STREAMED:
        same(ask(server, "shadowkv", almost, way), france)


def test_pieces_never_split_a_character(server: TritonServer, tiny_llm: LLM, demo_llm: LLM) -> None:
    wild = Ask("🎉", exactly(400, temperature=1.0, seed=1))
    tokyo = Ask("東京 大阪 🎉 東京 大阪 🎉 東京 大阪 🎉 東京", {"max_tokens": 16})
    for model, llm, request in (("tiny", tiny_llm, wild), ("shadowkv", demo_llm, tokyo)):
        alone = request.alone(llm)
        assert any(ord(c) > 127 and c != "\N{REPLACEMENT CHARACTER}" for c in alone.text)
        for way in STREAMED:
            answer = ask(server, model, request, way)
            same(answer, alone)
            assert 2 < len(answer.pieces) < len(alone.token_ids)  # some waited for the rest of their character
    assert "大阪" in alone.text


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_add_up(server: TritonServer, tiny_llm: LLM) -> None:
    requests = [Ask(prompt(n, 3), exactly(20)) for n in (10, 300, 600)]
    alone = [one.alone(tiny_llm).statistics for one in requests]
    before = server.metrics("tiny")
    for one, way in zip(requests, WAYS[1:], strict=True):
        ask(server, "tiny", one, way)

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in server.metrics("tiny").items()}

    values = grown()
    assert values["shadowkv_requests_total:length"] == 3
    wait_for(lambda: grown()["nv_inference_request_success"] == grown()["nv_inference_count"] == 3, "it counts too")
    assert values["shadowkv_prompt_tokens_total"] == 910
    assert values["shadowkv_generated_tokens_total"] == 60
    assert values["shadowkv_sealed_tokens_total"] == sum(one.sealed_tokens for one in alone) > 0
    assert values["shadowkv_bytes_fetched_total"] == sum(one.bytes_fetched for one in alone) > 0
    assert values["shadowkv_chunks_hit_total"] > values["shadowkv_chunks_missed_total"] > 0
    now = server.metrics("tiny")
    looked_up = now["shadowkv_chunks_hit_total"] + now["shadowkv_chunks_missed_total"]
    assert now["shadowkv_hit_rate"] == pytest.approx(now["shadowkv_chunks_hit_total"] / looked_up, rel=1e-5)
    assert now["shadowkv_device_memory_bytes"] > 0 < now["shadowkv_host_memory_bytes"]


def test_memory_in_use_shows_while_a_request_runs(server: TritonServer) -> None:
    with server.grpc_stream("tiny", input_ids=prompt(900, 1), stream=True, **exactly(3000)) as stream:
        stream.next()
        wait_for(lambda: server.metrics("tiny")["shadowkv_host_memory_used_bytes"] > 0, "its values are counted")
        values = server.metrics("tiny")
        assert values["shadowkv_requests_running"] == 1
        assert 0 < values["shadowkv_device_memory_used_bytes"] < values["shadowkv_device_memory_bytes"]
