"""A pass phrase hidden in a long real text, and asked for at its end (the needle-in-a-haystack task of the paper)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from trtllm_shadowkv.errors import RequestError
from trtllm_shadowkv.eval.prose import python_reference
from trtllm_shadowkv.tokenizer import Tokenizer

_KEYS = ("harbour", "lantern", "orchard", "meadow", "granite", "violin", "compass", "pepper", "willow", "copper")


@dataclass(frozen=True)
class Passphrase:
    """A prompt and the number its answer must contain.

    Attributes:
        prompt_ids: token ids of the whole conversation, ready for the model's answer.
        number: the hidden number, seven digits.
    """

    prompt_ids: list[int]
    number: str

    def found(self, answer: str) -> bool:
        return self.number in re.sub(r"[ ,]", "", answer)


def passphrase(tokenizer: Tokenizer, tokens: int, depth: float, seed: int = 0) -> Passphrase:
    """Hide a number in ``tokens`` tokens of prose, at a fraction ``depth`` of it (0: start, 1: end).

    Raises:
        RequestError: too few tokens for the question, or a depth outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise RequestError(f"depth is {depth}", "0 to 1")
    choose = random.Random(seed)
    key, number = choose.choice(_KEYS), str(choose.randrange(10**6, 10**7))
    needle = f" One of the special magic numbers for {key} is: {number}. "
    question = f"What is the special magic number for {key} mentioned in the text above?"
    lead = f"The special magic number for {key} mentioned in the text above is"
    intro = (
        "A special magic number is hidden in the following text. Memorize it: I will ask you about it afterwards.\n\n"
    )

    def conversation(text: str) -> list[int]:
        ids = tokenizer.chat([{"role": "user", "content": f"{intro}{text}\n\n{question}"}])
        return ids + tokenizer.encode(lead, special=False)

    room = tokens - len(conversation(needle))
    if room < 1:
        raise RequestError(f"{tokens} tokens", f"more than {tokens - room}, which the question alone takes")
    words = python_reference()[: 8 * room]  # more text than tokens, at well under 8 characters a token
    words = tokenizer.decode(tokenizer.encode(words, special=False)[:room])
    at = int(len(words) * depth)
    at = words.rfind(". ", 0, at) + 2 if depth > 0 and ". " in words[:at] else 0  # between two sentences
    return Passphrase(conversation(words[:at] + needle + words[at:]), number)
