"""What the process that holds the engine answers to model.py, and what it refuses; here it runs in this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BuildTiny
from tests.tiny_llm import one, wait_until
from tests.triton.worker_client import NAN, Client, Message, alone, inputs, prompt, talk
from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.errors import GenerationError, RequestError
from trtllm_shadowkv.triton import worker

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
        assert (client.metrics["requests_total:error"], client.metrics["requests_total:cancelled"]) == (2, 0)


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
    assert tried.wait(180)
    if dead:
        client.wait(lambda: client.messages[-1] == {"op": "dead", "reason": "the GPU fell off"}, "it says so")
        wait_until(lambda: exits == [1], "it ends")
    else:
        client.ask(inputs("a"))
        assert not [m for m in client.messages if m["op"] == "dead"]
        assert exits == []
