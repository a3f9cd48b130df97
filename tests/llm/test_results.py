"""Answers: what they are, when they end, and that company changes nothing."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_llm import SAMPLED, assert_drained, batch, ids, one, params, prompt
from tests.tiny_models import write_tiny
from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig

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
    assert without.outputs[0].logprobs is None
    assert without.outputs[0].cumulative_logprob is None
    answer = with_them.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    assert answer.cumulative_logprob == pytest.approx(
        sum(step[t] for step, t in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert all(max(step, key=step.__getitem__) == t for step, t in zip(answer.logprobs, answer.token_ids, strict=True))


def test_a_progress_bar_counts_requests(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    outputs = batch(llm, [prompt(5)] * 3, params(2), progress=True)
    assert len(outputs) == 3
    assert "3/3" in capfd.readouterr().err


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
    assert handle.result(timeout=180).outputs[0].finish_reason == "cancelled"


def test_a_stream_that_is_closed_or_dropped_ends_its_request(llm: LLM) -> None:
    def fresh(stream: Any) -> Any:
        return stream

    def started(stream: Any) -> Any:
        next(stream)
        return stream

    for begin in (fresh, started):
        begin(llm.generate_stream(prompt(20), params(5000))).close()
        assert_drained(llm)
        stream = begin(llm.generate_stream(prompt(20), params(5000)))
        del stream
        gc.collect()
        assert_drained(llm)


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
