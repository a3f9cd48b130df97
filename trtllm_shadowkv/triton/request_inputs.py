"""What the inputs of a Triton request mean, under the names of TensorRT-LLM's ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_shadowkv.errors import RequestError, nearest
from trtllm_shadowkv.request import AttentionParams
from trtllm_shadowkv.sampling_params import SamplingParams

Inputs = Mapping[str, Sequence[Any]]
"""Elements of each tensor that came, without its shape."""

_SAMPLING = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "random_seed": "seed",
    "ignore_eos": "ignore_eos",
}
"""Inputs of one element, by the field of SamplingParams that they set."""
_STRINGS = {"stop_words": "stop", "bad_words": "bad"}
_FIXED = {
    "beam_width": (1, "there is no beam search"),
    "num_return_sequences": (1, "send a request for each answer, with a seed of its own"),
    "exclude_input_in_output": (True, "the prompt is never part of the output"),
}
"""Inputs that clients of TensorRT-LLM send whose only value here is what they send by default."""
_OTHERS = (
    "text_input",
    "input_ids",
    "stream",
    "stop",
    "stop_token_ids",
    "end_id",
    "pad_id",
    "return_log_probs",
    "attention_mode",
    "attention_top_k",
)
NAMES = (*_SAMPLING, *_STRINGS, *_FIXED, *_OTHERS)
_PARAMETERS = ("id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end")
"""Of a request, as Triton's own clients set them; they mean nothing here."""


@dataclass(frozen=True)
class Asked:
    """A request: see :meth:`trtllm_shadowkv.LLM.prepare`; stream: pieces as they come; log_probs: with the last one."""

    prompt: str | list[int]
    sampling: SamplingParams
    attention: AttentionParams
    stream: bool
    log_probs: bool


def is_stop(inputs: Inputs) -> bool:
    """Whether the request only ends those that have its id.

    Raises:
        RequestError: ``stop`` has another number of elements than one.
    """
    return bool(_single(inputs, "stop"))


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters, which are what Triton makes of JSON keys that are no inputs: they would be ignored.

    Raises:
        RequestError: there are some.
    """
    for name in parameters:
        if name not in _PARAMETERS:
            raise RequestError(f"unknown input {name[:64]!r}{nearest(name[:64], NAMES)}", f"one of {', '.join(NAMES)}")


def asked(inputs: Inputs, max_seq_len: int) -> Asked:
    """Read a request.

    Args:
        max_seq_len: of the engine; more tokens than this are refused, which LLM would end there.

    Raises:
        RequestError: an input that is unknown, missing, in conflict with another, or has a value that is refused.
    """
    for name in inputs:
        if name not in NAMES:
            raise RequestError(f"unknown input {name!r}", f"one of {', '.join(NAMES)}")
    for name, (only, why) in _FIXED.items():
        value = _single(inputs, name)
        if value is not None and value != only:
            raise RequestError(f"{name} is {value}", str(only).lower(), why)
    log_probs = bool(_single(inputs, "return_log_probs"))
    end_id = _single(inputs, "end_id")
    settings: dict[str, Any] = {"logprobs": 0} if log_probs else {}
    for name, field in _SAMPLING.items():
        value = _single(inputs, name)
        if value is None:
            continue
        if field in settings and settings[field] != value:
            raise RequestError(f"{name} is {value} and {field} is {settings[field]}", "one of them")
        settings[field] = value
    for name, field in _STRINGS.items():
        settings[field] = _words(inputs, name)
    stop_ids = list(inputs.get("stop_token_ids", ()))
    if end_id is not None:  # in the place of the model's own; -1: none at all
        settings["ignore_eos"] = True
        stop_ids += [end_id] if end_id != -1 else []
    if end_id is not None and end_id < -1:
        raise RequestError(f"end_id is {end_id}", "a token id, or -1 for none")
    try:
        sampling = SamplingParams(**settings, stop_token_ids=stop_ids)
    except RequestError as e:  # it names its own fields
        for name, field in {**_SAMPLING, **_STRINGS}.items():
            if name in inputs and str(e).startswith(f"{field} "):
                raise RequestError(name + str(e).removeprefix(field)) from None
        raise
    if sampling.max_tokens > max_seq_len:
        raise RequestError(f"max_tokens is {sampling.max_tokens}", f"at most the engine's max_seq_len, {max_seq_len}")
    return Asked(
        prompt=_prompt(inputs),
        sampling=sampling,
        attention=AttentionParams(_single(inputs, "attention_mode"), _single(inputs, "attention_top_k")),
        stream=bool(_single(inputs, "stream")),
        log_probs=log_probs,
    )


def _prompt(inputs: Inputs) -> str | list[int]:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise RequestError(
            "text_input and input_ids" if "input_ids" in inputs else "neither text_input nor input_ids", "one of them"
        )
    if "input_ids" in inputs:
        return list(inputs["input_ids"])
    text = _single(inputs, "text_input")
    if not text:
        raise RequestError("text_input is empty", "one character or more")
    return _utf8("text_input", text)


def _words(inputs: Inputs, name: str) -> list[str]:
    words = list(inputs.get(name, ()))
    if words == [""]:  # what clients of TensorRT-LLM send for none
        return []
    return [_utf8(name, word) for word in words]


def _utf8(name: str, text: str) -> str:
    if any("\udc80" <= c <= "\udcff" for c in text):
        raise RequestError(f"{name} holds bytes that are no UTF-8", "UTF-8")
    return text


def _single(inputs: Inputs, name: str) -> Any:
    if name not in inputs:
        return None
    values = inputs[name]
    if len(values) != 1:
        raise RequestError(f"{name} has {len(values)} elements", "one")
    return values[0]
