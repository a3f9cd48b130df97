"""What callers pass to :class:`~trtllm_shadowkv.llm.LLM` as prompts and parameters, told apart and checked."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol, TypeVar

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import RequestError
from trtllm_shadowkv.request import AttentionParams


class Array(Protocol):
    """NumPy's and torch's arrays."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Array
_Kind = TypeVar("_Kind")
_EXPECTED = "a text or a list of token ids"


def prompt_batch(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts of a call: texts, lists of token ids, and whatever else there is, which :func:`checked_ids` refuses.

    Returns:
        prompts, and whether they are one prompt that stood by itself.

    Raises:
        RequestError: neither a prompt nor a collection of prompts.
    """
    if isinstance(prompts, str) or token_ids(prompts) is not None:
        return [prompts], True
    if isinstance(prompts, dict | set | frozenset | bytes | bytearray):
        raise RequestError(f"prompts of type {type(prompts).__name__}", f"{_EXPECTED}, or a list of those")
    try:
        return list(prompts), False
    except TypeError as e:  # no iterable, or an array without dimensions
        raise RequestError(f"prompts of type {type(prompts).__name__}", f"{_EXPECTED}, or a list of those") from e


def token_ids(prompt: Any) -> list[int] | None:
    """The whole numbers of a sequence or a one-dimensional array (none are whole numbers too); else None.

    Booleans are no token ids, and neither are numbers with a fraction's type.
    """
    if hasattr(prompt, "tolist"):  # NumPy and torch arrays
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return None
    if all(type(i) is int or (isinstance(i, Integral) and not isinstance(i, bool)) for i in prompt):
        return [int(i) for i in prompt]
    return None


def checked_ids(prompt: Any, ids: list[int] | None, vocab_size: int, max_seq_len: int) -> list[int]:
    """The token ids of a prompt (None where it is none), if they can be fed to the model.

    Raises:
        RequestError: no prompt, an empty or too long one, or a token id that the model does not have.
    """
    if ids is None:
        held = f" of {type(prompt[0]).__name__}" if isinstance(prompt, list | tuple) and prompt else ""
        raise RequestError(f"a prompt of type {type(prompt).__name__}{held}", _EXPECTED)
    if not ids:
        raise RequestError("the prompt is empty", "one token or more")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"the prompt holds token id {wrong}", f"0 to {vocab_size - 1}")
    if len(ids) > max_seq_len:
        raise RequestError(f"the prompt has {len(ids)} tokens", f"at most max_seq_len = {max_seq_len}", "shorten it")
    return ids


def check_length(text: str, max_seq_len: int, longest: int | None) -> None:
    """Refuse a text that cannot fit, before it is tokenized, which takes a second for some 100,000 tokens.

    Args:
        longest: characters of the tokenizer's longest token, or None.

    Raises:
        RequestError: it has over four times as many characters as max_seq_len of the longest tokens (Unicode's
            normalization makes up to three characters one).
    """
    if longest is not None and len(text) > (most := 4 * longest * max_seq_len):
        raise RequestError(
            f"the prompt has {len(text):,} characters", f"at most {most:,} for this engine", "shorten it"
        )


def granted(attention: AttentionParams, built: ShadowKVConfig) -> tuple[int, bool]:
    """Chunks to select and whether to be dense, within what was built.

    Raises:
        RequestError: more, or something else, than was built.
    """
    if built.dense and (attention.mode == "shadowkv" or attention.top_k is not None):
        raise RequestError("ShadowKV attention was asked for", "dense attention: this engine was built dense")
    if attention.mode == "dense" and attention.top_k is not None:
        raise RequestError("dense attention with a top_k", "one of them")
    top_k = attention.top_k or built.top_k
    if top_k > built.top_k:
        raise RequestError(f"attention top_k is {top_k}", f"at most {built.top_k}, as the engine was built")
    return top_k, built.dense or attention.mode == "dense"


def one(value: Any, name: str, kind: type[_Kind]) -> _Kind:
    """``value``, or the default of its kind for None.

    Raises:
        RequestError: something else.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {type(value).__name__}", kind.__name__)
    return value


def one_for_each(value: Any, count: int, name: str, kind: type[_Kind]) -> list[_Kind]:
    """``count`` values from one for all, one for each, or None.

    Raises:
        RequestError: something else, or another number of them.
    """
    if value is None or isinstance(value, kind):
        return [one(value, name, kind)] * count
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {type(value).__name__}", f"{kind.__name__}, or a list of them")
    if len(value) != count:
        raise RequestError(f"{len(value)} {name} for {count} prompts", "one for all, or one for each")
    return [one(v, f"{name}[{i}]", kind) for i, v in enumerate(value)]
