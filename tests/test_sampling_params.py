"""What SamplingParams takes, and what it says about the rest."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trtllm_shadowkv.errors import RequestError
from trtllm_shadowkv.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_tensorrt_llms() -> None:
    p = SamplingParams()
    assert (p.max_tokens, p.n, p.temperature, p.top_k, p.top_p, p.seed, p.logprobs) == (
        32,
        1,
        None,
        None,
        None,
        None,
        None,
    )
    assert not p.include_stop_str_in_output
    assert not p.ignore_eos
    assert p.stop_strings == p.bad_strings == ()
    assert p.stop_token_ids == p.bad_token_ids == ()


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, True),
        ({"min_p": 0.1, "seed": 3}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_k": 50}, True),
        ({"top_k": 1, "temperature": 2.0}, True),
        ({"top_p": 0, "temperature": 2.0}, True),
        ({"temperature": 1e-9}, False),
        ({"top_k": 0}, False),
        ({"top_k": 2}, False),
        ({"top_p": 1.0}, False),
    ],
)
def test_greedy_by_tensorrt_llms_rule(settings: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**settings).greedy is greedy


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 2**31 - 1, np.int64(5)], [0, -1, 2**31, 10**5000, 1.0, "5", True, np.True_, None, [3]]),
        ("min_tokens", [None, 0, 32], [-1, 33, 1.5, False]),
        ("n", [1, 128, np.uint8(3)], [0, 129, -1, 2.0, True, None]),
        ("temperature", [None, 0, 1e-320, 1e300, np.float32(0.5), 2], [-0.1, NAN, INF, 10**400, "1", True]),
        ("top_k", [None, 0, 2**31 - 1], [-1, 2**31, 5.0, True]),
        ("top_p", [None, 0, 1, 0.5, Fraction(1, 3)], [-1e-9, 1.0000001, NAN, -INF, "x", Decimal("0.5"), 1j]),
        ("min_p", [None, 0, 1.0], [-0.1, 1.1, NAN, False]),
        ("repetition_penalty", [None, 0.001, 1000], [0, 1e-300, -1, 1000.1, NAN, INF, True]),
        ("presence_penalty", [None, -1000, 1000.0], [1001, -1001, NAN, "0"]),
        ("frequency_penalty", [None, -2, 2], [1e9, -INF, [1]]),
        ("seed", [None, 0, 2**64 - 1, np.uint64(2**64 - 1)], [-1, 2**64, 1.0, True, "7"]),
        ("stop", [None, "x", ["a", "b"], (), "\0", "é" * 4096],
         ["", ["a", ""], [1], 5, b"x", {"a"}, "x" * 4097, ["a"] * 1025, "\ud800"]),
        ("bad", ["x", ["a", " b"]], ["", [None], 1.5, "x" * 4097, "a\udfff"]),
        ("stop_token_ids", [None, [], [0, 5], (1,), {2}, range(3), np.array([1, 2])],
         ["12", b"12", 5, [1.0], [True], [-1], [2**31], [[1]], [None],
          np.array([0.5]), np.array(3), {1: 2}, range(2**40)]),
        ("bad_token_ids", [np.array([], np.int32), [2**31 - 1]], [object(), ["a"], iter([1])]),
        ("include_stop_str_in_output", [True, False], [1, 0, None, "true"]),
        ("ignore_eos", [True, False], [1, None, np.True_]),
        ("logprobs", [None, 0, 1024], [-1, 1025, True, 2.0]),
    ],
)  # fmt: skip
def test_values(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError, match=name) as e:
            SamplingParams(**{name: value})
        assert "expected" in str(e.value)
        assert len(str(e.value)) < 300


def test_numbers_become_pythons_own() -> None:
    values: dict[str, Any] = {
        "max_tokens": np.int32(7),
        "temperature": np.float32(0.5),
        "top_p": 1,
        "seed": np.uint64(9),
        "stop_token_ids": np.array([3, 3, 1]),
    }
    p = SamplingParams(**values)
    assert (type(p.max_tokens), type(p.temperature), type(p.top_p), type(p.seed)) == (int, float, float, int)
    assert p.stop_token_ids == (3, 1)
    assert all(type(i) is int for i in p.stop_token_ids)


def test_lists_are_copied_and_lose_duplicates() -> None:
    stop = ["b", "a", "b"]
    p = SamplingParams(stop=stop, bad="x")
    stop.append("c")
    assert p.stop_strings == ("b", "a")
    assert p.bad_strings == ("x",)
    assert p == SamplingParams(stop=("b", "a"), bad=["x"])
    assert hash(p) == hash(SamplingParams(stop=["b", "a"], bad="x"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("use_beam_search", "use_beam_search is not supported by this engine; use n"),
        ("embedding_bias", "embedding_bias is not supported by this engine"),
        ("guided_decoding", "guided_decoding is not supported by this engine; leave it out"),
        ("max_new_tokens", "max_new_tokens is not supported by this engine; use max_tokens"),
        ("temprature", "unknown parameter 'temprature' (did you mean 'temperature'?)"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("zzzzqq", "unknown parameter 'zzzzqq'; expected one of max_tokens, "),
        ("x" * 10_000, "unknown parameter 'xxx"),
    ],
)
def test_other_keywords_are_refused_by_name(name: str, message: str) -> None:
    keywords: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError) as by_keyword:
        SamplingParams(**keywords)
    with pytest.raises(RequestError) as by_dict:
        SamplingParams.from_dict({name: None}, "the body")
    for text in (str(by_keyword.value), str(by_dict.value)):
        assert message in text
        assert len(text) < 600
    assert str(by_dict.value).startswith("the body: ")


def test_every_keyword_of_tensorrt_llm_is_known() -> None:
    """The fields of its SamplingParams: each is either taken or refused as unsupported, never called unknown."""
    theirs = """end_id pad_id max_tokens bad bad_token_ids stop stop_token_ids include_stop_str_in_output embedding_bias
    logits_processor apply_batched_logits_processor n best_of use_beam_search top_k top_p top_p_min top_p_reset_ids
    top_p_decay seed temperature min_tokens beam_search_diversity_rate repetition_penalty presence_penalty
    frequency_penalty length_penalty early_stopping no_repeat_ngram_size min_p beam_width_array logprobs prompt_logprobs
    return_context_logits return_generation_logits exclude_input_from_output return_encoder_output return_perf_metrics
    additional_model_outputs lookahead_config guided_decoding ignore_eos detokenize add_special_tokens
    truncate_prompt_tokens skip_special_tokens spaces_between_special_tokens""".split()  # noqa: SIM905 (a list of 46 would be 46 lines)
    ours = {f.name for f in dataclasses.fields(SamplingParams)}
    assert ours <= set(theirs)
    for name in set(theirs) - ours:
        with pytest.raises(RequestError, match=f"{name} is not supported"):
            SamplingParams(**{name: None})  # type: ignore[arg-type]


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(RequestError, match="32 by position; expected keywords"):
        SamplingParams(32)  # type: ignore[call-arg]


def test_from_dict() -> None:
    p = SamplingParams.from_dict({"max_tokens": 5, "temperature": None, "n": None, "stop": ["a"]})
    assert p == SamplingParams(max_tokens=5, stop=["a"])
    for wrong in ([], None, "x", 5, [("n", 1)]):
        with pytest.raises(RequestError, match=r"sampling parameters: found .* expected a mapping"):
            SamplingParams.from_dict(wrong)
    for key in (1, None, ("n",)):
        with pytest.raises(RequestError, match="unknown parameter"):
            SamplingParams.from_dict({key: 1})


def test_frozen_yet_copied_replaced_and_pickled() -> None:
    p = SamplingParams(temperature=0.5, stop="x", stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
    assert dataclasses.replace(p, n=2).n == 2
    with pytest.raises(RequestError, match="n is 0"):
        dataclasses.replace(p, n=0)
    assert SamplingParams.from_dict(dataclasses.asdict(p)) == p


def test_a_hostile_value_cannot_break_the_message() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(RequestError, match="max_tokens is a value of type Rude"):
        SamplingParams(max_tokens=Rude())  # type: ignore[arg-type]


def test_import_needs_neither_numpy_nor_torch() -> None:
    code = "import sys, trtllm_shadowkv.sampling_params; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
