"""The tokenizer of an engine: the files that ``build`` copied, read by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError, EngineError, RequestError, require

Message = dict[str, Any]
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LONGEST_REASON = 300


class Tokenizer:
    """What this package asks of a tokenizer, around one of transformers'.

    Args:
        inner: a transformers tokenizer.

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # A tokenizer file may ask for truncation or padding, which transformers turns off at the first call. That
        # changes the tokenizer, and another thread must not be inside it then.
        try:
            self._ids("a")
        except Exception as e:  # whatever calling a stranger's object raises
            raise ConfigError(
                f"a tokenizer of type {type(inner).__name__} that fails: {_reason(e)}",
                "a tokenizer of transformers, or a directory of one",
            ) from e

    @classmethod
    def of(cls, engine: EngineDirectory, given: Any = None) -> Tokenizer | None:
        """``given`` as :meth:`load` takes it, else the engine's own, else None."""
        if given is not None:
            return cls.load(given)
        return cls.load(engine.path) if any(f in engine.files for f in _FILES) else None

    @classmethod
    def load(cls, source: Any) -> Tokenizer:
        """From a directory, or around a tokenizer that is already there.

        Raises:
            EngineError: no such directory, or its files are no tokenizer.
            ConfigError: an object that is no tokenizer.
        """
        if not isinstance(source, str | Path):
            return source if isinstance(source, cls) else cls(source)
        require("transformers", "cpu")
        from transformers import AutoTokenizer

        advice = "pass LLM(…, tokenizer=the model's Hugging Face directory)"
        if not Path(source).is_dir():  # transformers would take it for the name of a model on a hub
            raise EngineError(f"the tokenizer {source} is no directory", "a directory of tokenizer files", advice)
        try:
            return cls(AutoTokenizer.from_pretrained(str(source), local_files_only=True))
        except Exception as e:  # transformers raises whatever the file at fault makes it raise
            raise EngineError(f"the tokenizer in {source} cannot be loaded: {_reason(e)}", todo=advice) from e

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds the tokens the model expects around it (such as a BOS token).

        Raises:
            RequestError: text that the tokenizer refuses, such as half a surrogate pair.
        """
        try:
            return self._ids(text, special)
        except Exception as e:  # tokenizers have no error of their own for this
            raise RequestError(f"the tokenizer refuses the text: {_reason(e)}", "valid Unicode") from e

    @cached_property
    def longest(self) -> int | None:
        """Characters of the longest token, None where the tokenizer does not say.

        No text of more characters than this a token has fewer tokens, but for what a normalizer drops.
        """
        try:
            return max(map(len, self.inner.get_vocab()))
        except Exception:  # a stranger's object
            return None

    def _ids(self, text: str, special: bool = True) -> list[int]:
        return [int(i) for i in self.inner(text, add_special_tokens=special, verbose=False)["input_ids"]]

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that waits for the assistant's answer.

        Raises:
            RequestError: no chat template, messages that are no conversation, or ones that the template refuses.
        """
        if not getattr(self.inner, "chat_template", None):
            raise RequestError("this model has no chat template", todo="use generate() with a text of your own making")
        expected = "a list of {'role': …, 'content': …}"
        if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise RequestError(f"messages are {type(messages).__name__} of something else", expected)
        try:
            encoded = self.inner.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as e:  # templates are programs and raise anything
            raise RequestError(f"the chat template refuses these messages: {_reason(e)}", expected) from e
        return list(encoded["input_ids"])


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON]
