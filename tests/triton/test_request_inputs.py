"""What each input of a Triton request means, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv.errors import RequestError
from trtllm_shadowkv.request import AttentionParams, CompletionOutput, RequestOutput, RequestStatistics
from trtllm_shadowkv.sampling_params import SamplingParams
from trtllm_shadowkv.triton import request_inputs, worker
from trtllm_shadowkv.triton.request_inputs import NAMES, Asked, asked, check_parameters, is_stop

CONFIG = (Path(worker.__file__).parent / "config.pbtxt").read_text()
TEXT = {"text_input": ["Hello"]}
MAX_SEQ_LEN = 1000


def read(**inputs: list[Any]) -> Asked:
    return asked({**TEXT, **inputs}, MAX_SEQ_LEN)


def declared(kind: str) -> dict[str, tuple[str, str]]:
    """Data type and dims of each input or output of config.pbtxt, by name."""
    block = re.search(rf"^{kind} \[\n(.*?)^\]", CONFIG, re.S | re.M)
    assert block is not None
    rows = re.findall(r'name: "(\w+)" data_type: (\w+) dims: \[ 1, (-?\d+) \]', block[1])
    assert len(rows) == block[1].count("name:")
    return {name: (dtype, dims) for name, dtype, dims in rows}


# --- config.pbtxt -------------------------------------------------------------------------------------------------


def test_names_are_the_inputs_of_the_configuration() -> None:
    assert sorted(NAMES) == sorted(declared("input"))
    assert len(set(NAMES)) == len(NAMES)
    assert CONFIG.count("optional: true") == len(NAMES)


def test_only_lists_have_more_than_one_element() -> None:
    lists = {name for name, (_, dims) in declared("input").items() if dims == "-1"}
    assert lists == {"input_ids", "stop_words", "bad_words", "stop_token_ids"}


def test_all_outputs_are_in_the_configuration() -> None:
    statistics = RequestStatistics(5, 2, 0.1, 0.2, 0.3, 0.8, 64, 8, 0, None, 100, 200)
    answer = CompletionOutput(0, "ab", [1, 2], "length", None, [{1: -0.5}, {2: -0.25, 3: -9.0}], -0.75, statistics)
    outputs = worker._summary(RequestOutput(0, "x", [5], [answer]), read(return_log_probs=[True]))
    assert (outputs["cum_log_probs"], outputs["output_log_probs"]) == ([-0.75], [-0.5, -0.25])
    whole = {*outputs, "text_output", "output_ids", "sequence_length"}  # of every answer, see Server._respond
    assert whole == set(declared("output"))
    lists = {name for name, (_, dims) in declared("output").items() if dims == "-1"}
    assert lists == {"output_ids", "output_log_probs"}
    assert not {name for name in worker._summary(RequestOutput(0, "x", [5], [answer]), read()) if "log_probs" in name}


# --- each input to its field --------------------------------------------------------------------------------------


def test_a_text_alone() -> None:
    assert read() == Asked(
        prompt="Hello",
        sampling=SamplingParams(stop=[], bad=[], stop_token_ids=[]),
        attention=AttentionParams(),
        stream=False,
        log_probs=False,
    )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("max_tokens", "max_tokens", 17),
        ("min_tokens", "min_tokens", 3),
        ("min_length", "min_tokens", 3),
        ("temperature", "temperature", 0.5),
        ("top_k", "top_k", 7),
        ("top_p", "top_p", 0.25),
        ("min_p", "min_p", 0.125),
        ("repetition_penalty", "repetition_penalty", 1.5),
        ("presence_penalty", "presence_penalty", 0.5),
        ("frequency_penalty", "frequency_penalty", -0.5),
        ("seed", "seed", 2**64 - 1),
        ("random_seed", "seed", 2**64 - 1),
        ("ignore_eos", "ignore_eos", True),
    ],
)
def test_sampling(name: str, field: str, value: Any) -> None:
    found = read(**{name: [value]}).sampling
    assert getattr(found, field) == value
    plain = read().sampling
    others = set(SamplingParams.__dataclass_fields__) - {field}
    assert all(getattr(found, other) == getattr(plain, other) for other in others)


def test_every_field_of_the_table_is_one_of_sampling() -> None:
    fields = {*request_inputs._SAMPLING.values(), *request_inputs._STRINGS.values()}
    assert fields <= set(SamplingParams.__dataclass_fields__)


def test_words_and_token_ids() -> None:
    found = read(stop_words=["a", "bc"], bad_words=["d"], stop_token_ids=[5, 6]).sampling
    assert (found.stop, found.bad, found.stop_token_ids) == (("a", "bc"), ("d",), (5, 6))
    none = read(stop_words=[""], bad_words=[""]).sampling  # what clients of TensorRT-LLM send
    assert (none.stop, none.bad) == ((), ())
    for words in (["", "a"], ["a", ""], ["", ""]):
        with pytest.raises(RequestError, match="stop_words holds ''"):
            read(stop_words=words)


def test_a_prompt_is_a_text_or_token_ids() -> None:
    assert asked({"input_ids": [1, 2, 3]}, MAX_SEQ_LEN).prompt == [1, 2, 3]
    assert asked({"text_input": ["é🙂"]}, MAX_SEQ_LEN).prompt == "é🙂"
    with pytest.raises(RequestError, match="text_input and input_ids; expected one of them"):
        read(input_ids=[1])
    with pytest.raises(RequestError, match="neither text_input nor input_ids"):
        asked({}, MAX_SEQ_LEN)
    with pytest.raises(RequestError, match="text_input is empty"):
        asked({"text_input": [""]}, MAX_SEQ_LEN)


def test_attention_stream_and_log_probs() -> None:
    assert read(attention_mode=["dense"]).attention == AttentionParams(mode="dense")
    assert read(attention_top_k=[9]).attention == AttentionParams(top_k=9)
    assert read(stream=[True]).stream
    assert not read(stream=[False]).stream
    found = read(return_log_probs=[True])
    assert (found.log_probs, found.sampling.logprobs) == (True, 0)
    found = read(return_log_probs=[False])
    assert (found.log_probs, found.sampling.logprobs) == (False, None)
    assert read(pad_id=[0]) == read()
    with pytest.raises(RequestError, match="attention mode is 'sparse'"):
        read(attention_mode=["sparse"])


@pytest.mark.parametrize(("alias", "name"), [("min_length", "min_tokens"), ("random_seed", "seed")])
def test_an_alias_beside_its_name(alias: str, name: str) -> None:
    assert read(**{alias: [4], name: [4]}).sampling == read(**{name: [4]}).sampling
    with pytest.raises(RequestError, match=f"{alias} is 5 and {name} is 4; expected one of them"):
        read(**{alias: [5], name: [4]})
    with pytest.raises(RequestError, match=f"{alias} is 0 and {name} is 4"):
        read(**{alias: [0], name: [4]})


def test_end_id_is_in_the_place_of_the_models_own() -> None:
    found = read(end_id=[7], stop_token_ids=[5]).sampling
    assert (found.ignore_eos, found.stop_token_ids) == (True, (5, 7))
    found = read(end_id=[0], ignore_eos=[False]).sampling
    assert (found.ignore_eos, found.stop_token_ids) == (True, (0,))
    found = read(end_id=[-1]).sampling  # none at all
    assert (found.ignore_eos, found.stop_token_ids) == (True, ())
    with pytest.raises(RequestError, match="is -2"):
        read(end_id=[-2])


def test_inputs_of_one_value() -> None:
    assert read(beam_width=[1], num_return_sequences=[1], exclude_input_in_output=[True]) == read()
    for name, value, why in (
        ("beam_width", 2, "expected 1; there is no beam search"),
        ("num_return_sequences", 2, "expected 1; send a request for each answer"),
        ("exclude_input_in_output", False, "expected true; the prompt is never part"),
    ):
        with pytest.raises(RequestError, match=f"{name} is {value}; {why}"):
            read(**{name: [value]})


def test_stop_is_a_request_of_its_own() -> None:
    assert is_stop({"stop": [True]})
    assert not is_stop({"stop": [False]})
    assert not is_stop(TEXT)
    assert read(stop=[False]) == read()
    with pytest.raises(RequestError, match="stop has 2 elements"):
        is_stop({"stop": [True, True]})


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"input_ids", "stop_words", "bad_words", "stop_token_ids"}))
def test_another_number_of_elements_than_one(name: str) -> None:
    if name in ("stop", "pad_id"):  # the first is for is_stop, the second means nothing
        return
    for values in ([], [1, 1]):
        with pytest.raises(RequestError, match=f"^{name} has {len(values)} elements; expected one$"):
            read(**{name: values})


def test_an_unknown_input() -> None:
    with pytest.raises(RequestError, match="unknown input 'max_token'; expected one of max_tokens, min_tokens"):
        read(max_token=[1])


def test_parameters_are_misspelt_inputs() -> None:
    check_parameters({})
    check_parameters(dict.fromkeys(("id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"), 1))
    with pytest.raises(RequestError, match=r"unknown input 'max_token' \(did you mean 'max_tokens'\?\); expected"):
        check_parameters({"priority": 1, "max_token": 5})
    with pytest.raises(RequestError, match=r"unknown input 'qqqq'; expected one of max_tokens"):
        check_parameters({"qqqq": 5})
    with pytest.raises(RequestError, match="unknown input"):
        check_parameters({"x" * 1_000_000: 5})


@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words"])
def test_bytes_that_are_no_utf8(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} holds bytes that are no UTF-8"):
        read(**{name: [b"a\xffb".decode("utf-8", "surrogateescape")]})
    for value in ("attention_mode",):
        with pytest.raises(RequestError) as error:
            read(**{value: ["\udcff"]})
        str(error.value).encode()  # the message itself can be sent


def test_more_tokens_than_the_engine_holds() -> None:
    assert read(max_tokens=[MAX_SEQ_LEN]).sampling.max_tokens == MAX_SEQ_LEN
    with pytest.raises(RequestError, match="max_tokens is 1001; expected at most the engine's max_seq_len, 1000"):
        read(max_tokens=[MAX_SEQ_LEN + 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, float("nan")) for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("top_k", -1),
        ("min_tokens", 33),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is"):
        read(**{name: [value]})


def test_settings_that_are_no_token_ids() -> None:
    with pytest.raises(RequestError, match="stop_token_ids is -1"):
        read(stop_token_ids=[5, -1])
