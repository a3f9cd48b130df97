"""What a request may ask of sampling, under the names TensorRT-LLM's users know; checked when it is made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from trtllm_shadowkv.errors import RequestError, nearest

MAX_TOKENS = 2**31 - 1
"""Largest count of tokens, and largest token id, that a request may name."""
MAX_STRINGS = 1024
"""Largest number of stop strings, and of bad strings."""
MAX_STRING_CHARS = 4096
"""Largest length of one stop or bad string, in characters."""
MAX_LISTED_IDS = 1 << 18
"""Largest number of stop token ids, and of bad token ids: more than any vocabulary served today."""
MAX_LOGPROBS = 1024
"""Largest number of alternatives a token: they are kept for the whole answer."""
MAX_PENALTY = 1000.0
"""Largest size of a penalty (and of 1 / repetition_penalty): far beyond any useful one."""

# Keywords of TensorRT-LLM's SamplingParams, and of its older generate(), that this engine refuses by name; what to
# do instead where there is something.
_UNSUPPORTED = {
    "add_special_tokens": "encode the prompt yourself and pass token ids",
    "additional_model_outputs": "",
    "apply_batched_logits_processor": "",
    "bad_words_list": "use bad or bad_token_ids",
    "beam_search_diversity_rate": "",
    "beam_width_array": "",
    "best_of": "use n",
    "detokenize": "the text comes with the token ids",
    "early_stopping": "",
    "embedding_bias": "use bad_token_ids to forbid tokens",
    "end_id": "the model's own end token is used; add others with stop_token_ids",
    "exclude_input_from_output": "the prompt is never part of the output",
    "guided_decoding": "",
    "length_penalty": "",
    "logits_processor": "",
    "lookahead_config": "",
    "max_new_tokens": "use max_tokens",
    "min_length": "use min_tokens",
    "no_repeat_ngram_size": "use repetition_penalty, presence_penalty or frequency_penalty",
    "num_beams": "use n for several sampled answers",
    "num_return_sequences": "use n",
    "pad_id": "rows are never padded",
    "prompt_logprobs": "",
    "random_seed": "use seed",
    "return_context_logits": "",
    "return_encoder_output": "",
    "return_generation_logits": "use logprobs",
    "return_perf_metrics": "",
    "skip_special_tokens": "special tokens are never part of the text; the token ids hold them",
    "spaces_between_special_tokens": "",
    "stop_words_list": "use stop or stop_token_ids",
    "top_p_decay": "",
    "top_p_min": "",
    "top_p_reset_ids": "",
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "use_beam_search": "use n for several sampled answers",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when its answers end.

    Decoding is greedy as in TensorRT-LLM: when temperature, top_k and top_p are all None, or temperature is 0, or
    top_k is 1, or top_p is 0. min_p and seed on their own therefore change nothing. Penalties, bad words and
    min_tokens apply to greedy decoding too.

    Values are normalised: whole numbers to int, reals to float, lists (None: an empty one) to tuples without
    duplicates. NumPy scalars and arrays are taken as well.

    Attributes:
        max_tokens: tokens to generate at most, 1 to 2^31 - 1.
        min_tokens: end and stop token ids are forbidden before this many tokens; at most max_tokens.
        n: answers for each prompt, 1 to 128. With greedy decoding they are the same.
        temperature: logits are divided by it; 0 or more. None: 1.
        top_k: keep this many of the most probable tokens; None or 0: all.
        top_p: keep the fewest most probable tokens whose probabilities reach this sum; 0 to 1. None: all.
        min_p: keep tokens at least this probable relative to the most probable one; 0 to 1. None: all.
        repetition_penalty: logits of tokens in the prompt or output are divided (positive ones) or multiplied
            (negative ones) by it; 0.001 to 1,000. None: 1.
        presence_penalty: taken from the logit of each token in the output; -1,000 to 1,000. None: 0.
        frequency_penalty: the same, times how often the token is in the output.
        seed: 0 to 2^64 - 1. None: the engine draws one.
        stop: string or strings that end an answer; up to 1,024 of up to 4,096 characters.
        stop_token_ids: token ids that end an answer.
        bad: string or strings the output must not contain, as the tokens the tokenizer splits them into; limits as
            for stop.
        bad_token_ids: token ids that are never generated.
        include_stop_str_in_output: the text ends after the stop string instead of before it.
        ignore_eos: the model's end token does not end an answer (stop and stop_token_ids still do).
        logprobs: log-probabilities of each generated token and of this many of the most probable ones, 0 to 1,024.
            None: none at all.

    Raises:
        RequestError: an unknown or unsupported keyword, or a value of the wrong type or outside its range.
    """

    max_tokens: int = 32
    min_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    # The generated __init__ would answer an unknown keyword with a TypeError that names no alternative. __new__ sees
    # the same arguments first.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if args:
            raise RequestError(
                f"SamplingParams was given {_show(args[0])} by position", "keywords only, such as max_tokens=32"
            )
        for name in kwargs:
            _check_name(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "max_tokens", _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS))
        put(self, "n", _whole("n", self.n, 1, 128))
        for name, high in (
            ("min_tokens", MAX_TOKENS),
            ("top_k", MAX_TOKENS),
            ("seed", 2**64 - 1),
            ("logprobs", MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            put(self, name, None if value is None else _whole(name, value, 0, high))
        for name, low, top in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1 / MAX_PENALTY, MAX_PENALTY),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
        ):
            value = getattr(self, name)
            put(self, name, None if value is None else _real(name, value, low, top))
        for name in ("stop", "bad"):
            put(self, name, _strings(name, getattr(self, name)))
        for name in ("stop_token_ids", "bad_token_ids"):
            put(self, name, _ids(name, getattr(self, name)))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {_show(getattr(self, name))}", "True or False")
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}", f"at most max_tokens = {self.max_tokens}", "raise max_tokens"
            )

    @classmethod
    def from_dict(cls, data: Any, where: str = "sampling parameters") -> Self:
        """Build from a mapping such as parsed JSON, in which null stands for a field's default.

        Raises:
            RequestError: not a mapping, an unknown or unsupported key, or a bad value.
        """
        if not isinstance(data, Mapping):
            raise RequestError(f"{where}: found {_show(data)}", "a mapping of names to values")
        for key in data:
            _check_name(key, where)
        return cls(**{key: value for key, value in data.items() if value is not None})

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one, so that neither seed nor min_p matters."""
        if self.temperature is None and self.top_k is None and self.top_p is None:
            return True
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as strings without duplicates."""
        return _strings("stop", self.stop)

    @property
    def bad_strings(self) -> tuple[str, ...]:
        """``bad`` as strings without duplicates."""
        return _strings("bad", self.bad)


_NAMES = tuple(f.name for f in fields(SamplingParams))


def _show(value: object) -> str:
    """A short repr for messages."""
    try:
        text = repr(value)
    except Exception:  # a stranger's object: an int beyond 4,300 digits raises ValueError, others what they like
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _check_name(name: object, where: str = "SamplingParams") -> None:
    if name in _NAMES:
        return
    if isinstance(name, str) and name in _UNSUPPORTED:
        raise RequestError(
            f"{where}: {name} is not supported by this engine", todo=_UNSUPPORTED[name] or "leave it out"
        )
    # Names of any length may come over the wire, and the search for the nearest is quadratic in it.
    hint = nearest(name, _NAMES) if isinstance(name, str) and len(name) <= 64 else ""
    raise RequestError(f"{where}: unknown parameter {_show(name)}{hint}", f"one of {', '.join(_NAMES)}")


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(f"{name} is {_show(value)}", f"a whole number from {low:,} to {high:,}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float) -> float:
    bounds = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of {low:g} or more"
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond float's range
        number = math.nan
    if not math.isfinite(number) or not low <= number <= high:
        raise RequestError(f"{name} is {_show(value)}", f"a finite number {bounds}")
    return number


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise RequestError(f"{name} is {_show(value)}", "a string or a list of strings")
    if len(items) > MAX_STRINGS:
        raise RequestError(f"{name} holds {len(items):,} strings", f"at most {MAX_STRINGS:,}")
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{name} holds {_show(item)}", "strings of one character or more")
        if len(item) > MAX_STRING_CHARS:
            raise RequestError(f"{name} holds a string of {len(item):,} characters", f"at most {MAX_STRING_CHARS:,}")
        if any("\ud800" <= c <= "\udfff" for c in item):
            raise RequestError(f"{name} holds {_show(item)}", "valid Unicode", "a lone surrogate is no character")
    return tuple(dict.fromkeys(items))


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    items = value.tolist() if hasattr(value, "tolist") else value  # NumPy and torch arrays
    if not isinstance(items, (list, tuple, set, frozenset, range)):
        raise RequestError(f"{name} is {_show(value)}", "a list of token ids")
    if len(items) > MAX_LISTED_IDS:
        raise RequestError(f"{name} holds {len(items):,} token ids", f"at most {MAX_LISTED_IDS:,}")
    return tuple(dict.fromkeys(_whole(f"an entry of {name}", item, 0, MAX_TOKENS) for item in items))
