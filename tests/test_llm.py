"""``LLM``: results that do not depend on company, and a clean state whatever happens to a request."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tiny
from tests.tiny_tokenizer import write_tokenizer
from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, RuntimeConfig, ShadowKVConfig
from trtllm_shadowkv.errors import CapacityError, ConfigError, EngineError, GenerationError, RequestError, StateError
from trtllm_shadowkv.request import RequestHandle

NAN_TOKEN = 250
"""A token whose embedding is NaN: prompts that hold it fail, and no others."""
SAMPLED = {"temperature": 1.0, "top_k": 40, "ignore_eos": True}
LIMIT = 256


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny engine with a tokenizer: rows are sealed from 256 tokens on, with rank and budget at their maxima."""
    parent = tmp_path_factory.mktemp("llm")
    model = write_tiny(parent / "model", max_positions=6000)
    write_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    save_file(tensors, model / "model.safetensors")
    kv = ShadowKVConfig(top_k=1024, outliers=8, window=64, dense_limit=LIMIT)
    return build_engine(model, parent / "engine", BuildConfig(max_batch_size=4, shadowkv=kv)).path


@pytest.fixture(scope="module")
def shared(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, threads=1) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM; whatever a test did with it, nothing may be left of it."""
    yield shared
    assert_drained(shared)


def assert_drained(llm: LLM) -> None:
    scheduler = llm._scheduler
    deadline = time.monotonic() + 20
    while scheduler.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.busy
    assert (scheduler.device_used, scheduler.host_used, llm.value_pool.used) == (0, 0, 0)
    assert sorted(scheduler._free_slots) == list(range(llm.engine.build.max_batch_size))
    assert scheduler.executor.state.rows == {}  # type: ignore[attr-defined]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 240, length).tolist()  # type: ignore[no-any-return]


def params(tokens: int, **more: Any) -> SamplingParams:
    """Without end token, and without the token that the model itself must not feed back."""
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True, "bad_token_ids": [NAN_TOKEN], **more})


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def batch(llm: LLM, prompts: list[Any], *args: Any, **kwargs: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, *args, **kwargs)
    assert isinstance(outputs, list)
    return outputs


def one(llm: LLM, prompt: Any, *args: Any, **kwargs: Any) -> RequestOutput:
    output = llm.generate(prompt, *args, **kwargs)
    assert isinstance(output, RequestOutput)
    return output


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.0005)


# --- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "seed": 7}])
def test_a_batch_of_any_lengths_gives_what_each_gives_alone(llm: LLM, sampling: dict[str, Any]) -> None:
    prompts = [prompt(n) for n in (1, 7, 8, 513, 5001)]
    together = batch(llm, prompts, params(24, **sampling))
    alone = [one(llm, p, params(24, **sampling)) for p in prompts]
    assert [ids(o) for o in together] == [ids(o) for o in alone]
    assert [o.prompt_token_ids for o in together] == prompts
    assert all(o.outputs[0].finish_reason == "length" for o in together)
    sealed = [o.outputs[0].statistics.sealed_tokens for o in together]
    assert [s > 0 for s in sealed] == [False, False, False, True, True]


def test_a_full_budget_is_dense_attention_over_5000_tokens_and_300_new_ones(llm: LLM) -> None:
    """Token for token; where they part, the two tokens must have been as good as equal."""
    p, settings = prompt(5000), params(300, logprobs=5)
    sparse, dense = one(llm, p, settings), one(llm, p, settings, attention=AttentionParams(mode="dense"))
    got, expected = sparse.outputs[0], dense.outputs[0]
    assert got.statistics.generated_sealed >= 232  # 300 tokens and a window of 64: the chunks left it one by one
    assert expected.statistics.sealed_tokens == 0
    assert got.logprobs is not None
    assert expected.logprobs is not None
    assert np.isfinite([list(step.values()) for step in got.logprobs]).all()
    for i, (a, b) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)):
        if a != b:
            assert abs(expected.logprobs[i].get(a, -np.inf) - expected.logprobs[i][b]) < 1e-3, f"token {i}"
            break
    assert i > 100


def test_a_sampled_answer_depends_on_its_own_seed_alone(llm: LLM) -> None:
    p = prompt(300)
    alone = ids(one(llm, p, params(16, **SAMPLED, seed=5)))
    rest = [prompt(n, seed=n) for n in (1, 40, 300, 700, 300)]
    for place in range(3):
        prompts = [*rest[:place], p, *rest[place:]]
        seeds = [params(16, **SAMPLED, seed=5 if q is p else 100 + i) for i, q in enumerate(prompts)]
        assert ids(batch(llm, prompts, seeds)[place]) == alone
    assert ids(one(llm, p, params(16, **SAMPLED, seed=6))) != alone
    assert ids(one(llm, p, params(16, **SAMPLED))) != ids(one(llm, p, params(16, **SAMPLED)))  # drawn seeds


def test_n_answers_are_those_of_one_seed_and_differ(llm: LLM) -> None:
    output = one(llm, prompt(20), params(8, n=5, **SAMPLED, seed=3))
    again = one(llm, prompt(20), params(8, n=5, **SAMPLED, seed=3))
    assert [o.index for o in output.outputs] == [0, 1, 2, 3, 4]
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 5
    assert ids(one(llm, prompt(20), params(8, **SAMPLED, seed=3))) == output.outputs[0].token_ids
    greedy = one(llm, prompt(20), params(8, n=3))
    assert len({tuple(o.token_ids) for o in greedy.outputs}) == 1


def test_a_request_may_ask_for_less_than_was_built(llm: LLM) -> None:
    p = prompt(2000)
    outputs = batch(
        llm, [p] * 3, params(8), attention=[AttentionParams(), AttentionParams(top_k=2), AttentionParams(mode="dense")]
    )
    figures = [o.outputs[0].statistics for o in outputs]
    assert ids(outputs[0]) == ids(outputs[2])
    assert figures[1].bytes_fetched < figures[0].bytes_fetched
    assert figures[2].bytes_fetched == figures[2].sealed_tokens == 0
    assert figures[2].hit_rate is None
    assert figures[0].hit_rate is not None


def test_statistics_say_what_happened(llm: LLM) -> None:
    figures = one(llm, prompt(300), params(12)).outputs[0].statistics
    assert (figures.prompt_tokens, figures.generated_tokens) == (300, 12)
    assert figures.queue_time is not None
    assert figures.time_to_first_token is not None
    assert 0 <= figures.queue_time <= figures.time_to_first_token
    assert figures.time_per_token is not None
    assert one(llm, prompt(3), params(1)).outputs[0].statistics.time_per_token is None


def test_logprobs_come_where_they_are_asked_for(llm: LLM) -> None:
    without, with_them = batch(llm, [prompt(9)] * 2, [params(6), params(6, logprobs=3)])
    assert without.outputs[0].logprobs is without.outputs[0].cumulative_logprob is None
    answer = with_them.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    assert answer.cumulative_logprob == pytest.approx(
        sum(step[t] for step, t in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert all(max(step, key=step.__getitem__) == t for step, t in zip(answer.logprobs, answer.token_ids, strict=True))


# --- ends ---------------------------------------------------------------------------------------------------------


def test_an_end_token_ends_an_answer_unless_it_is_ignored(llm: LLM) -> None:
    p = prompt(12)
    free = ids(one(llm, p, params(40)))
    stop = next(t for i, t in enumerate(free) if t not in free[:i] and i > 3)
    answer = one(llm, p, params(40, stop_token_ids=[stop])).outputs[0]
    assert answer.token_ids == free[: free.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_the_models_own_end_token_ends_an_answer(llm: LLM) -> None:
    settings = {"temperature": 5.0, "seed": 1}
    found = [one(llm, prompt(5, seed=s), params(400, ignore_eos=False, **settings)).outputs[0] for s in range(4)]
    ended = [o for o in found if o.finish_reason == "stop"]
    assert ended, "no answer met the end token in 1,600 tokens"
    for answer in ended:
        assert (answer.token_ids[-1], answer.stop_reason) == (2, 2)
        assert 2 not in answer.token_ids[:-1]
    longer = one(llm, prompt(5, seed=found.index(ended[0])), params(400, **settings))
    assert ids(longer)[: len(ended[0].token_ids)] == ended[0].token_ids
    assert longer.outputs[0].finish_reason == "length"


def test_a_stop_string_is_found_across_tokens_and_never_shown(llm: LLM) -> None:
    p = prompt(10)
    text = one(llm, p, params(60, bad_token_ids=[*range(32), *range(127, 256)])).text
    assert len(text) == 60
    stop = text[20:25]
    settings = {"stop": ["never seen", stop], "bad_token_ids": [*range(32), *range(127, 256)]}
    answer = one(llm, p, params(60, **settings)).outputs[0]
    at = text.index(stop)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[:at], "stop", stop)
    assert len(answer.token_ids) == at + len(stop)
    shown = "".join(d.text for d in llm.generate_stream(p, params(60, **settings)))
    assert shown == text[:at]
    included = one(llm, p, params(60, include_stop_str_in_output=True, **settings))
    assert included.text == text[: at + len(stop)]


@pytest.mark.parametrize(("length", "asked", "given"), [(6000, 50, 1), (5999, 50, 2), (5980, 50, 21), (5950, 50, 50)])
def test_an_answer_ends_where_the_engine_does(llm: LLM, length: int, asked: int, given: int) -> None:
    answer = one(llm, prompt(length), params(asked)).outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (given, "length")


def test_min_tokens_beyond_the_engines_end_is_no_trouble(llm: LLM) -> None:
    answer = one(llm, prompt(5999), SamplingParams(max_tokens=100, min_tokens=90)).outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (2, "length")


# --- streams ------------------------------------------------------------------------------------------------------


def test_deltas_add_up_to_the_answer(llm: LLM) -> None:
    """Random bytes: half characters must wait for their rest."""
    for p, n in ((prompt(30), 1), (prompt(300), 3)):
        settings = params(50, n=n, **{**SAMPLED, "seed": 11, "temperature": 3.0})
        whole = one(llm, p, settings)
        texts, tokens, ends = [""] * n, [[] for _ in range(n)], [0] * n  # type: ignore[var-annotated]
        for delta in llm.generate_stream(p, settings):
            assert not ends[delta.index], "a delta after the last one"
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.token_ids
            ends[delta.index] += delta.finish_reason is not None
        assert texts == [o.text for o in whole.outputs]
        assert tokens == [o.token_ids for o in whole.outputs]
        assert ends == [1] * n


def test_a_handle_gives_each_delta_once_and_its_result_again_and_again(llm: LLM) -> None:
    handle = llm.generate_async(prompt(8), params(6))
    first = next(iter(handle))
    rest = list(handle)
    assert [*first.token_ids, *(t for d in rest for t in d.token_ids)] == ids(handle.result())
    assert list(handle) == []  # and does not wait for ever
    assert handle.result() == handle.result(timeout=0)
    assert handle.finished


def test_waiting_has_an_end(llm: LLM) -> None:
    handle = llm.generate_async(prompt(5000), params(500))
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    assert not handle.finished
    handle.abort()
    assert handle.result(timeout=20).outputs[0].finish_reason == "cancelled"


def test_a_stream_that_is_closed_or_dropped_ends_its_request(llm: LLM) -> None:
    def started(stream: Iterator[Any]) -> Iterator[Any]:
        next(stream)
        return stream

    for begin in (lambda s: s, started):
        begin(llm.generate_stream(prompt(20), params(5000))).close()  # type: ignore[attr-defined]
        assert_drained(llm)
        stream = begin(llm.generate_stream(prompt(20), params(5000)))
        del stream
        gc.collect()
        assert_drained(llm)


# --- text ---------------------------------------------------------------------------------------------------------


def test_text_and_chats_go_through_the_tokenizer(llm: LLM) -> None:
    text = "Grüße, 世界"
    output = one(llm, text, params(4))
    assert output.prompt == text
    assert output.prompt_token_ids == list(text.encode())
    chat = llm.chat([{"role": "user", "content": "hi"}], params(4))
    assert chat.prompt_token_ids == list(b"user:hi\nassistant:")
    assert ids(chat) == ids(one(llm, "user:hi\nassistant:", params(4)))
    assert llm.chat_ids(({"role": "user", "content": "hi"},)) == chat.prompt_token_ids


@pytest.mark.parametrize(
    "messages",
    ["hi", [], None, 5, [1], ["hi"], {"role": "user", "content": "x"}, [{"content": "x"}], [{"role": "user"}],
     [{"role": "user", "content": None}], [[{"role": "user", "content": "x"}]]],
)  # fmt: skip
def test_messages_that_are_no_conversation_are_one_clear_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages|prompt is empty"):
        llm.chat(messages)


def test_half_a_surrogate_pair_is_one_clear_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="expected valid Unicode"):
        llm.generate("a\ud800b")


def test_without_a_tokenizer_there_are_token_ids_alone(tmp_path: Path) -> None:
    engine = build_engine(write_tiny(tmp_path / "m"), tmp_path / "e", BuildConfig(max_batch_size=2))
    with LLM(engine.path) as llm:
        assert one(llm, [5, 6], params(3)).text == ""
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([5], SamplingParams(stop="x")),
            lambda: llm.generate([5], SamplingParams(bad=["x"])),
        ):
            with pytest.raises(RequestError, match="needs a tokenizer and this engine has none"):
                call()
        write_tokenizer(tmp_path)
        with LLM(engine.path, tokenizer=tmp_path) as other:
            assert one(other, [5, 6], params(3)).outputs[0].token_ids == ids(one(llm, [5, 6], params(3)))
            with pytest.raises(RequestError, match="refuses these messages"):
                other.chat([{"role": "user", "content": 5}])
        write_tokenizer(tmp_path, chat_template=None)
        with LLM(engine.path, tokenizer=tmp_path) as other, pytest.raises(RequestError, match="no chat template"):
            other.chat([{"role": "user", "content": "x"}])


def test_a_tokenizer_that_wants_to_cut_texts_does_not_get_its_way(engine_dir: Path, tmp_path: Path) -> None:
    """And is not changed while another thread is inside it, which its library would answer with an error."""
    write_tokenizer(tmp_path, truncation=4)
    with LLM(engine_dir, tokenizer=tmp_path, threads=1) as llm, ThreadPoolExecutor(8) as pool:
        texts = [chr(97 + i) * 200 for i in range(24)]
        outputs = list(pool.map(lambda t: one(llm, t, params(4)), texts))
    assert [o.prompt_token_ids for o in outputs] == [list(t.encode()) for t in texts]


class _Broken:
    """A tokenizer of the caller's own that cannot decode what the model says."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        if self.broken:
            raise RuntimeError("no such token")
        return "".join(map(chr, ids))

    broken = False


def test_a_tokenizer_that_fails_ends_one_request_and_no_other(engine_dir: Path) -> None:
    broken = _Broken()
    with LLM(engine_dir, tokenizer=broken, threads=1) as llm:
        handles = [llm.generate_async(prompt(n), params(2000)) for n in (5, 300)]
        for handle in handles:
            next(iter(handle))
        broken.broken = True
        for handle in handles:
            with pytest.raises(GenerationError, match="no such token"):
                handle.result(timeout=20)
        assert_drained(llm)
        broken.broken = False
        handle = llm.generate_async(prompt(5), params(2000))
        next(iter(handle))
        broken.broken = True
        handle.abort()  # its held-back text is asked for once more
        with pytest.raises(GenerationError, match="no such token"):
            handle.result(timeout=20)
        assert_drained(llm)
        broken.broken = False
        assert len(ids(one(llm, prompt(5), params(3)))) == 3


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts of type NoneType"),
        (5, "prompts of type int"),
        (1.5, "prompts of type float"),
        (b"bytes", "prompts of type bytes"),
        ({1: 2}, "prompts of type dict"),
        ({"prompt": "x"}, "prompts of type dict"),
        ({1, 2}, "prompts of type set"),
        (np.array(3), "prompts of type ndarray"),
        (torch.tensor(3), "prompts of type Tensor"),
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (np.array([], int), "the prompt is empty"),
        ([[]], "prompt 0 of 1: the prompt is empty"),
        (["a", ""], "prompt 1 of 2: the prompt is empty"),
        ([1.0, 2.0], "prompt 0 of 2: a prompt of type float"),
        ([True, False], "prompt 0 of 2: a prompt of type bool"),
        (np.arange(3.0), "prompt 0 of 3: a prompt of type float64"),
        (np.array([True]), "prompt 0 of 1: a prompt of type bool"),
        ([[[1]]], "prompt 0 of 1: a prompt of type list of list"),
        ([[1], None], "prompt 1 of 2: a prompt of type NoneType"),
        ([[1, "a"]], "a prompt of type list"),
        ([[1], {"prompt": "x"}], "prompt 1 of 2: a prompt of type dict"),
        ([-1], "token id -1; expected 0 to 255"),
        ([3, 256], "token id 256; expected 0 to 255"),
        ([[3], [10**30]], "prompt 1 of 2: the prompt holds token id 1000"),
        ([7] * 6001, "6001 tokens; expected at most max_seq_len = 6000"),
        ("x" * 6001, "6001 tokens; expected at most max_seq_len = 6000"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_none_is_one_clear_error(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)


def test_every_list_of_whole_numbers_is_a_prompt(llm: LLM) -> None:
    expected = ids(one(llm, [4, 5, 6], params(4)))
    for form in ((4, 5, 6), range(4, 7), np.arange(4, 7), np.arange(4, 7, dtype=np.uint8), torch.arange(4, 7),
                 [np.int64(4), np.int32(5), 6]):  # fmt: skip
        assert ids(one(llm, form, params(4))) == expected
        assert ids(llm.generate_async(form, params(4)).result()) == expected
    for forms in (np.array([[4, 5, 6]] * 2), torch.tensor([[4, 5, 6]] * 2), ([4, 5, 6], (4, 5, 6)),
                  (np.arange(4, 7), [4, 5, 6]), iter([[4, 5, 6], [4, 5, 6]])):  # fmt: skip
        assert [ids(o) for o in batch(llm, forms, params(4))] == [expected] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_tokens": 3}, "sampling_params is dict"),
        ("x", "sampling_params is str"),
        (0, "sampling_params is int"),
        (False, "sampling_params is bool"),
        (np.array([1, 2]), "sampling_params is ndarray"),
        ([], "0 sampling_params for 2 prompts"),
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
        ([SamplingParams(), "x"], r"sampling_params\[1\] is str"),
        (AttentionParams(), "sampling_params is AttentionParams"),
    ],
)
def test_parameters_of_another_kind_or_number_are_refused(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], value)
    if not isinstance(value, list):
        with pytest.raises(RequestError, match=message):
            llm.generate_async([1], value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dense", "attention is str"),
        ([], "0 attention for 2 prompts"),
        (AttentionParams(top_k=1025), "attention top_k is 1025; expected at most 1024"),
        (AttentionParams(mode="dense", top_k=5), "dense attention with a top_k"),
    ],
)
def test_attention_of_another_kind_or_beyond_what_was_built_is_refused(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], attention=value)


@pytest.mark.parametrize("value", [{"mode": "sparse"}, {"mode": 1}, {"top_k": 0}, {"top_k": True}, {"top_k": 1.5}])
def test_attention_parameters_check_themselves(value: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="attention"):
        AttentionParams(**value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop_token_ids": [256]}, "end or stop token 256"),
        ({"bad_token_ids": [999]}, "bad token 999"),
        ({"bad_token_ids": list(range(256))}, "every token of the vocabulary is forbidden"),
    ],
)
def test_sampling_that_the_model_cannot_do_is_refused(llm: LLM, value: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([5], SamplingParams(**value))


def test_one_refused_prompt_starts_none_of_the_batch(llm: LLM) -> None:
    before = next(llm._ids)
    with pytest.raises(RequestError, match="prompt 2 of 3"):
        llm.generate([[1], [2], [-3]], params(5))
    assert llm._worker._waiting == 0
    assert next(llm._ids) >= before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"treads": 2}, r"unknown setting 'treads' \(did you mean 'threads'\?\)"),
        ({"threads": 0}, r"runtime\.threads is 0"),
        ({"runtime": {"threads": 2}}, "runtime is dict; expected a RuntimeConfig"),
        ({"max_stretch": 8193}, "max_stretch is 8193; expected at most"),
        ({"top_k": 8}, "top_k = 8, but the engine was built with 1024"),
        ({"window": 60}, r"shadowkv\.window is 60"),
        ({"shadowkv": {"windw": 64}}, r"did you mean 'window'"),
        ({"runtime": RuntimeConfig(shadowkv={"rank": 16})}, "rank = 16, but"),
        ({"executor": "cuda"}, "executor is 'cuda'"),
        ({"tokenizer": 5}, "a tokenizer of type int"),
        ({"tokenizer": b"x"}, "a tokenizer of type bytes"),
        ({"tokenizer": "/nowhere"}, "the tokenizer /nowhere is no directory"),
        ({"tokenizer": "/proc"}, "the tokenizer in /proc cannot be loaded"),
    ],
)  # fmt: skip
def test_settings_that_are_none_are_one_clear_error(engine_dir: Path, settings: Any, message: str) -> None:
    before = threading.active_count()
    with pytest.raises((ConfigError, EngineError), match=message) as error:
        LLM(engine_dir, **settings)
    assert "\n" not in str(error.value)
    assert threading.active_count() == before


def test_run_time_settings_may_come_in_three_ways(engine_dir: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"window": 32, "threads": 1},
        {"shadowkv": {"window": 32}, "threads": 1},
        {"runtime": RuntimeConfig(threads=1, shadowkv={"window": 32})},
    ]
    results = []
    for settings in ways:
        with LLM(engine_dir, **settings) as llm:
            assert (llm.config.window, llm.runtime.threads) == (32, 1)
            results.append(ids(one(llm, prompt(400), params(8))))
    assert results[0] == results[1] == results[2]


# --- memory and queue ---------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_and_one_that_must_wait_waits(engine_dir: Path, shared: LLM) -> None:
    p = prompt(1000)
    need = shared._scheduler.footprint(shared.prepare(p, params(50)).answers[0])
    for enough, name in ((need.live + need.sealed, "device_memory"), (need.host, "host_memory")):
        with LLM(engine_dir, threads=1, **{name: enough - 1}) as llm:
            with pytest.raises(CapacityError, match=f"bytes of {name[:-7]} memory; expected at most"):
                llm.generate(p, params(50))
            with pytest.raises(CapacityError, match="prompt 1 of 2"):
                llm.generate([[1], p], params(50))
            assert_drained(llm)
            assert len(ids(one(llm, prompt(900), params(50)))) == 50
        with LLM(engine_dir, threads=1, **{name: enough}) as llm:
            peak = 0
            handles = [llm.generate_async(p, params(50)) for _ in range(3)]
            while not all(h.finished for h in handles):
                peak = max(peak, len([a for h in handles for a in h.answers if a.slot is not None]))
                time.sleep(0.001)
            assert peak == 1
            assert len({tuple(ids(h.result())) for h in handles}) == 1
            assert_drained(llm)


def test_a_full_queue_refuses_a_batch_as_a_whole(engine_dir: Path) -> None:
    with LLM(engine_dir, threads=1, max_queue=6) as llm:
        with pytest.raises(RequestError, match="at most 6 waiting"):
            llm.generate([[1]] * 7, params(2))
        with pytest.raises(RequestError, match="at most 6 waiting"):
            llm.generate([1], params(2, n=7))
        assert_drained(llm)
        busy = [llm.generate_async(prompt(10), params(3000)) for _ in range(4)]
        wait_until(lambda: all(a.slot is not None for h in busy for a in h.answers), "four rows run")
        waiting = [llm.generate_async(prompt(10), params(3)) for _ in range(6)]
        with pytest.raises(RequestError, match="6 answers wait and 1 more"):
            llm.generate_async([1], params(2))
        for handle in busy:
            handle.abort()
        assert all(len(ids(h.result())) == 3 for h in waiting)
        assert_drained(llm)


# --- aborts -------------------------------------------------------------------------------------------------------


def _at_once(handle: RequestHandle) -> None:
    pass


def _in_prefill(handle: RequestHandle) -> None:
    wait_until(lambda: handle.answers[0].prefilled > 0, "the prompt is being read")


def _running(handle: RequestHandle) -> None:
    wait_until(lambda: len(handle.answers[0].output_ids) > 2, "tokens came")


def _finished(handle: RequestHandle) -> None:
    handle.result()


def test_aborts_at_any_moment_leave_neighbours_and_memory_as_they_were(engine_dir: Path) -> None:
    """50 rounds under load: four rows, more requests than rows, one victim after the other."""
    rng = random.Random(0)
    neighbours = [prompt(n) for n in (5, 90, 300, 700)]
    settings = [params(40, **SAMPLED, seed=i) for i in range(4)]
    with LLM(engine_dir, threads=1, max_stretch=64) as llm:
        alone = [ids(one(llm, p, s)) for p, s in zip(neighbours, settings, strict=True)]
        moments = [_at_once, _in_prefill, _running, _finished, None]
        seen: dict[str, int] = {}
        for round_ in range(50):
            moment = moments[round_ % len(moments)]
            load = [llm.generate_async(p, s) for p, s in zip(neighbours, settings, strict=True)]
            short = moment is _finished
            victim = llm.generate_async(
                prompt(30 if short else 1500), params(2 if short else 400, n=rng.choice([1, 2]))
            )
            if moment is None:
                time.sleep(rng.random() * 0.2)
            else:
                moment(victim)
            victim.abort()
            if rng.random() < 0.5:
                victim.abort()
            reasons = {o.finish_reason for o in victim.result(timeout=30).outputs}
            assert reasons == {"length"} if short else reasons <= {"cancelled"}
            seen[reasons.pop()] = seen.get("cancelled", 0) + 1
            assert [ids(h.result(timeout=30)) for h in load] == alone, f"round {round_}"
            victim.abort()
            assert_drained(llm)
        assert set(seen) == {"cancelled", "length"}


def test_a_waiting_request_can_be_aborted(llm: LLM) -> None:
    busy = [llm.generate_async(prompt(10), params(3000)) for _ in range(4)]
    waiting = [llm.generate_async(prompt(10), params(5)) for _ in range(3)]
    waiting[1].abort()
    cancelled = waiting[1].result(timeout=20).outputs[0]
    assert (cancelled.finish_reason, cancelled.token_ids, cancelled.text) == ("cancelled", [], "")
    assert cancelled.statistics.queue_time is None
    for handle in busy:
        handle.abort()
    assert all(h.result(timeout=20).outputs[0].finish_reason == "length" for h in (waiting[0], waiting[2]))


def test_an_aborted_answer_keeps_what_it_had(llm: LLM) -> None:
    handle = llm.generate_async(prompt(10), params(3000))
    _running(handle)
    handle.abort()
    answer = handle.result().outputs[0]
    assert 2 < len(answer.token_ids) < 3000
    deltas = list(handle)
    assert [t for d in deltas for t in d.token_ids] == answer.token_ids
    assert "".join(d.text for d in deltas) == answer.text
    assert deltas[-1].finish_reason == "cancelled"


def test_a_request_whose_handle_is_gone_is_aborted(llm: LLM) -> None:
    handle = llm.generate_async(prompt(10), params(5000))
    _running(handle)
    answer = handle.answers[0]
    del handle
    gc.collect()
    wait_until(lambda: answer.finish_reason == "cancelled", "the request is aborted")


# --- failures -----------------------------------------------------------------------------------------------------


def test_nan_logits_fail_their_own_request_alone(llm: LLM) -> None:
    good, bad = prompt(300), [*prompt(299), NAN_TOKEN]
    alone = ids(one(llm, good, params(12)))
    with pytest.raises(GenerationError, match="NaN logits") as error:
        llm.generate([good, bad, good, [NAN_TOKEN]], params(12))
    outputs = error.value.outputs
    assert [o is None for o in outputs] == [False, True, False, True]
    assert [ids(o) for o in outputs if o is not None] == [alone, alone]
    with pytest.raises(GenerationError, match="NaN logits"):
        list(llm.generate_stream(bad, params(4)))
    assert_drained(llm)
    assert ids(one(llm, good, params(12))) == alone


class Fails:
    """Lets a method fail the nth time it is called, once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, count: int, error: BaseException
    ) -> None:
        original = getattr(target, name)
        self.left = count

        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, call)


@pytest.mark.parametrize(
    ("name", "count", "failed"),
    [
        ("allocate", 2, 1),
        ("begin_pass", 2, 1),  # in the second prompt's first stretch, or in a pass over the first row alone
        ("seal_prompt", 1, 1),
        ("seal_prompt", 2, 1),
        ("step_prologue", 6, 3),
        ("sparse_attention", 3, 1),
        ("key_reconstruct", 60, 3),
    ],
)
def test_a_fault_ends_the_sequences_of_its_pass_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, count: int, failed: int
) -> None:
    prompts = [prompt(n) for n in (300, 20, 700)]
    alone = [ids(one(llm, p, params(30))) for p in prompts]
    state = llm._scheduler.executor.state
    with monkeypatch.context() as patch:
        fault = Fails(patch, state, name, count, MemoryError("of the test"))
        with pytest.raises(GenerationError, match="MemoryError: of the test") as error:
            llm.generate(prompts, params(30))
        assert fault.left <= 0
    outputs = error.value.outputs
    assert 1 <= sum(o is None for o in outputs) <= failed
    for output, expected in zip(outputs, alone, strict=True):
        assert output is None or ids(output) == expected
    assert_drained(llm)
    assert [ids(o) for o in batch(llm, prompts, params(30))] == alone


def test_a_fault_of_the_scheduler_itself_leaves_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Fails(patch, llm._scheduler, "_admit", 1, SystemExit("of the test"))
        with pytest.raises(GenerationError, match="SystemExit"):
            llm.generate([[5], [6]], params(3))
    assert_drained(llm)
    assert len(ids(one(llm, [5], params(3)))) == 3


# --- several at once ----------------------------------------------------------------------------------------------


def test_eight_threads_at_once_get_what_each_would_get_alone(llm: LLM) -> None:
    requests = [(prompt(n, seed=n), params(12, **SAMPLED, seed=n)) for n in (1, 9, 64, 300, 301, 500, 33, 700)]
    alone = [ids(one(llm, p, s)) for p, s in requests]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda r: ids(one(llm, *r)), requests)) == alone


def test_llms_in_one_process_do_not_mix(engine_dir: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", "qwen3", head_dim=32, seed=9)
    kv = ShadowKVConfig(chunk_size=16, top_k=4, outliers=2, window=32, dense_limit=64)
    other_dir = build_engine(model, tmp_path / "e", BuildConfig(dtype="float16", max_batch_size=3, shadowkv=kv)).path
    requests = [(prompt(n), params(12)) for n in (1, 70, 300)]
    with LLM(engine_dir, threads=1) as a, LLM(other_dir, threads=2) as b, LLM(engine_dir, threads=1, window=128) as c:
        alone = {llm: [ids(one(llm, *r)) for r in requests] for llm in (a, b, c)}
        assert alone[a] != alone[b]
        with ThreadPoolExecutor(9) as pool:
            jobs = [(llm, r) for _ in range(2) for r in requests for llm in (a, b, c)]
            results = list(pool.map(lambda job: ids(one(job[0], *job[1])), jobs))
        for (llm, r), result in zip(jobs, results, strict=True):
            assert result == alone[llm][requests.index(r)]
        for llm in (a, b, c):
            assert_drained(llm)


# --- ends of an LLM -----------------------------------------------------------------------------------------------


def test_closing_cancels_what_is_under_way(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    handles = [llm.generate_async(prompt(n), params(3000)) for n in (5, 300, 1500, 5, 5, 5)]
    _running(handles[0])
    llm.close()
    llm.close()
    assert all(h.finished for h in handles)
    assert {h.result().outputs[0].finish_reason for h in handles} == {"cancelled"}
    assert_drained(llm)
    assert not llm._worker._thread.is_alive()
    for call in (lambda: llm.generate([5]), lambda: llm.generate_async([5]), lambda: llm.generate_stream([5])):
        with pytest.raises(StateError, match="the LLM is closed"):
            call()
    handles[0].abort()


def test_closing_from_another_thread_ends_a_waiting_generate(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(batch, llm, [prompt(5)] * 6, params(3000))
        wait_until(lambda: llm._scheduler.busy, "it runs")
        llm.close()
        assert {o.outputs[0].finish_reason for o in future.result(timeout=20)} == {"cancelled"}


def test_a_forgotten_llm_ends_its_thread(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    thread, gone = llm._worker._thread, weakref.ref(llm)
    llm.generate([5], params(2))
    handle = llm.generate_async(prompt(5), params(5000))
    del llm
    gc.collect()
    next(iter(handle))  # the handle keeps it open
    assert gone() is not None
    del handle
    gc.collect()
    assert gone() is None
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_an_llm_in_an_expression_lives_as_long_as_its_request(engine_dir: Path) -> None:
    assert LLM(engine_dir, threads=1).generate_async([5, 6], params(30)).result().outputs[0].finish_reason == "length"
    deltas = list(LLM(engine_dir, threads=1).generate_stream([5, 6], params(30)))
    assert deltas[-1].finish_reason == "length"


PROGRAM = """if True:
    import os, sys, threading
    from trtllm_shadowkv import LLM, SamplingParams
    llm = LLM(sys.argv[1], threads=1)
    params = SamplingParams(max_tokens=int(sys.argv[3]), ignore_eos=True)
    what = sys.argv[2]
    print("open", flush=True)
    if what == "idle":
        pass
    elif what == "busy":
        handle = llm.generate_async([5] * 300, params)
        next(iter(handle))
    elif what == "dropped":
        del llm
    elif what == "exit in a thread":
        threading.Thread(target=lambda: llm.generate([5] * 300, SamplingParams(max_tokens=20))).start()
    elif what == "fork":
        pid = os.fork()
        if pid == 0:
            try:
                llm.generate([5], SamplingParams(max_tokens=2))
            except Exception as e:
                print(type(e).__name__, e, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    elif what == "interrupt":
        try:
            llm.generate([[5] * 300] * 6, params)
        except KeyboardInterrupt:
            scheduler = llm._scheduler
            while scheduler.busy:
                pass
            print("interrupted", scheduler.device_used, scheduler.host_used, llm.value_pool.used, flush=True)
            llm.generate([5], SamplingParams(max_tokens=3))
    print("end", flush=True)
"""


@pytest.mark.parametrize("what", ["idle", "busy", "dropped", "exit in a thread", "fork"])
def test_a_program_that_forgets_to_close_ends_by_itself(engine_dir: Path, what: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(engine_dir), what, "5000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "end"
    assert ("StateError the LLM is closed, or was opened by the parent process" in result.stdout) == (what == "fork")


def test_an_interrupt_aborts_generate_and_leaves_the_llm_usable(engine_dir: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(engine_dir), "interrupt", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines() == ["interrupted 0 0 0", "end"]


# --- damaged engines ----------------------------------------------------------------------------------------------


def test_an_altered_engine_does_not_load(engine_dir: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(engine_dir, tmp_path / "copy")
    data = bytearray((copy / "model.onnx.data").read_bytes())
    data[1000] ^= 1
    (copy / "model.onnx.data").write_bytes(data)
    with pytest.raises(EngineError, match=r"model\.onnx\.data was altered"):
        LLM(copy)
    manifest = json.loads((engine_dir / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "schema": 7}))
    with pytest.raises(EngineError, match="schema 7; expected schema 1"):
        LLM(copy)
    for path in (tmp_path / "nowhere", tmp_path, None, 5):
        with pytest.raises(EngineError):
            LLM(path)  # type: ignore[arg-type]
    with LLM(os.path.relpath(engine_dir)) as llm:
        assert len(ids(one(llm, [5], params(2)))) == 2
