"""A tokenizer for tiny models: a token a byte, so that every token id below 256 is text (or half a character)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tokenizer(directory: Path, *, chat_template: str | None = TEMPLATE, truncation: int | None = None) -> None:
    """Add tokenizer.json and tokenizer_config.json to a directory; the token id of a byte is the byte.

    Args:
        truncation: tokens to which the file asks to cut texts.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {c: b for b, c in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab={c: byte_of[c] for c in characters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_characters() -> dict[int, str]:
    """The characters that stand for bytes in byte-level BPE: printable ones for themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
