"""The tokenizer of an engine: the files that ``build`` copied, read by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_shadowkv.errors import EngineError, RequestError, require

Message = dict[str, Any]


class Tokenizer:
    """What this package asks of a tokenizer, around one of transformers'.

    Args:
        inner: a transformers tokenizer.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def load(cls, source: Any) -> Tokenizer:
        """From a directory, or around a tokenizer that is already there.

        Raises:
            EngineError: the directory's files are no tokenizer.
        """
        if not isinstance(source, str | Path):
            return source if isinstance(source, cls) else cls(source)
        require("transformers", "cpu")
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(source), local_files_only=True))
        except Exception as e:  # transformers raises whatever the file at fault makes it raise
            raise EngineError(
                f"the tokenizer in {source} cannot be loaded: {' '.join(str(e).split())[:300]}",
                todo="pass LLM(…, tokenizer=the model's Hugging Face directory)",
            ) from e

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds the tokens the model expects around it (such as a BOS token)."""
        return list(self.inner(text, add_special_tokens=special, verbose=False)["input_ids"])

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that waits for the assistant's answer.

        Raises:
            RequestError: no chat template, or one that refuses these messages.
        """
        if not getattr(self.inner, "chat_template", None):
            raise RequestError("this model has no chat template", todo="use generate() with a text of your own making")
        try:
            encoded = self.inner.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as e:  # templates are programs and raise anything
            raise RequestError(
                f"the chat template refuses these messages: {' '.join(str(e).split())[:300]}",
                "a list of {'role': …, 'content': …}",
            ) from e
        return list(encoded["input_ids"])
