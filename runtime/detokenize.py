"""Text of one sequence, token by token, and the stop strings in it.

Two things keep text back. A token may end inside a character: a decoder shows the bytes it cannot read yet as U+FFFD,
so a tail of those waits for the next token. And a tail that may be the beginning of a stop string waits until it is
known not to be one. Only a short window of tokens is decoded in each step, never the whole sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from trtllm_shadowkv.errors import StateError

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_UNREADABLE_TAIL = 3
"""Characters of U+FFFD that more bytes can still change: an unfinished character has at most three bytes, shown as one
(byte-level BPE) or as one each (SentencePiece's byte fallback)."""
_CONTEXT = 8
"""Prompt tokens decoded before the first generated one."""
_WINDOW = 32
"""Tokens decoded at once at most (output that is no text keeps the window from moving on by itself)."""
_KEEP = 12
"""Tokens a shortened window keeps: more bytes than an unfinished character has, with room to look for a boundary."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer; transformers' PreTrainedTokenizerFast has it."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class StopScanner:
    """Finds the stop string that ends first in text that comes in pieces; of two that end together, the longer.

    Args:
        stop: strings of one character or more.
        include: released text ends after the stop string instead of before it.

    Attributes:
        found: the stop string that was met, or None.
    """

    def __init__(self, stop: Iterable[str], include: bool) -> None:
        self.found: str | None = None
        self._include = include
        self._sorted = sorted(set(stop))
        self._any = tuple(self._sorted)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can be shown now that ``text`` has come."""
        if not self._any:
            return text
        out: list[str] = []
        for char in text:
            # What is held is the longest end of the text that begins a stop string, so it holds the whole of any stop
            # string that this character completes.
            self._held += char
            if self._held.endswith(self._any):
                self.found = max((s for s in self._any if self._held.endswith(s)), key=len)
                out.append(self._held if self._include else self._held[: len(self._held) - len(self.found)])
                self._held = ""
                break
            drop = 0
            while drop < len(self._held) and not self._begins(self._held[drop:]):
                drop += 1
            out.append(self._held[:drop])
            self._held = self._held[drop:]
        return "".join(out)

    def flush(self) -> str:
        """What is still held: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _begins(self, tail: str) -> bool:
        """Whether some stop string begins with ``tail``: the first one not below it does if any does."""
        at = bisect_left(self._sorted, tail)
        return at < len(self._sorted) and self._sorted[at].startswith(tail)


class Detokenizer:
    """Incremental text of one generated sequence.

    Without a stop string the pieces add up to what ``tokenizer.decode(prompt + output)`` has beyond
    ``tokenizer.decode(prompt)``, special tokens skipped. For byte-level BPE that is ``tokenizer.decode(output)``; for
    tokenizers that strip the first space of a text, the space between prompt and output is kept. Two kinds of text
    cannot be met exactly, since what was shown is never taken back: a byte-fallback run that turns out not to be UTF-8
    after some of its characters were shown (the whole run is then unreadable to ``decode``), and clean-up of spaces
    before punctuation (text is then as without it).

    Args:
        tokenizer: decodes lists of token ids.
        stop: strings that end the text; see :class:`StopScanner`.
        include_stop: the text ends after the stop string instead of before it.
        prompt_ids: the prompt; its last tokens are context, no part of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str] = (), include_stop: bool = False, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._scanner = StopScanner(stop, include_stop)
        self._parts: list[str] = []
        self._finished = False
        context = [int(i) for i in prompt_ids[-_CONTEXT:]]
        shown = self._decode(context)
        if shown.endswith(UNREADABLE):  # the prompt may end inside a character: its bytes are not ours to complete
            context, shown = [], ""
        self._window = context
        self._settled = len(context)  # tokens at the window's head whose text is all shown
        self._shown = shown  # the part of the window's text that is shown
        self._full = shown  # the window's text

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> str | None:
        """The stop string that was met; the text ends there and further tokens are ignored."""
        return self._scanner.found

    def push(self, token_id: int) -> str:
        """Add a token; return the new text that is safe to show, often all of the token's, at times none.

        Raises:
            StateError: the text is finished.
        """
        if self._finished:
            raise StateError("a token came after finish()", todo="make another Detokenizer for another sequence")
        return "" if self.stopped is not None else self._release(self._readable(int(token_id)))

    def finish(self) -> str:
        """End the text; return what was held back (which may complete a stop string, if that has U+FFFD in it)."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        return self._release(self._unshown(0)) + self._release(self._scanner.flush(), scan=False)

    def _release(self, text: str, scan: bool = True) -> str:
        text = self._scanner.feed(text) if scan else text
        if text:
            self._parts.append(text)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _readable(self, token_id: int) -> str:
        """New text of the window, without a tail that the next token can still change."""
        self._window.append(token_id)
        full = self._decode(self._window)
        # Tokens without text (special ones) would fill the window and part the bytes of a character. Doubled, because
        # a lone token that is only a space may also decode to nothing.
        if full == self._full and not self._decode([token_id, token_id]):
            self._window.pop()
            return ""
        self._full = full
        if not full.endswith(UNREADABLE):
            new = self._unshown(0)
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = self._full = self._decode(self._window)
            return new
        tail = min(_UNREADABLE_TAIL, len(full) - len(full.rstrip(UNREADABLE)))
        new = self._unshown(tail) if full.startswith(self._shown) else ""
        self._shown += new
        return new + self._shorten() if len(self._window) > _WINDOW else new

    def _unshown(self, tail: int) -> str:
        """Text of the window that is not shown yet, without its last ``tail`` characters."""
        end = len(self._full) - tail
        if self._full.startswith(self._shown):
            return self._full[len(self._shown) : end]
        # The decoder took back what is shown (clean-up, or an invalid run of fallback bytes): the rest by itself.
        return self._decode(self._window[self._settled :])

    def _shorten(self) -> str:
        """Drop the window's head at a boundary of characters; return text that is given up as unreadable, if any.

        A cut inside a character shows: its two halves decode to more characters than the whole.
        """
        first = len(self._window) - _KEEP
        for cut in range(first, first + 4):  # a character has at most four bytes: one of four cuts is outside any
            head, rest = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + rest == self._full and self._shown.startswith(head):
                self._window, self._settled = self._window[cut:], 0
                self._shown, self._full = self._shown[len(head) :], rest
                return ""
        # No boundary: a decoder of whole runs, in a run that is no text. Show it and start anew.
        new = self._unshown(0)
        self._window, self._settled, self._shown, self._full = [], 0, "", ""
        return new
