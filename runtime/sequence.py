"""One answer in the making: its tokens, its text, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.errors import GenerationError
from trtllm_shadowkv.runtime.detokenize import Detokenizer
from trtllm_shadowkv.runtime.sampling import Sampled
from trtllm_shadowkv.runtime.state import Footprint, RowStatistics

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TokenChooser(Protocol):
    """What the scheduler asks of ``sampling.Sampler`` (or of anything that knows the next token)."""

    def sample(
        self, logits: NDArray[np.float32], prompt_ids: Sequence[int], output_ids: Sequence[int], position: int
    ) -> Sampled: ...


@dataclass
class SequenceTimes:
    """Moments on ``time.perf_counter``'s clock, seconds."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
class Answer:
    """One of a request's answers.

    Attributes:
        prompt_ids: the prompt, at least one token.
        max_tokens: tokens it may generate.
        top_k, dense: its share of the ShadowKV budget, see ``State.allocate``.
        sampler, detokenizer: detokenizer is None where there is no tokenizer.
        end_ids: tokens that end it (never part of the text).
        on_delta: called on the worker's thread with the new text and tokens, and a last time when it is finished. It
            raises nothing.
        slot: its row while it runs.
        prefilled: prompt tokens fed so far.
        held: memory it held when it ended; ``live`` is 0 once it was sealed.
    """

    prompt_ids: list[int]
    max_tokens: int
    top_k: int
    dense: bool
    sampler: TokenChooser
    detokenizer: Detokenizer | None
    end_ids: frozenset[int]
    on_delta: Callable[[Answer, str, list[int]], None]
    slot: int | None = None
    prefilled: int = 0
    output_ids: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: GenerationError | None = None
    statistics: RowStatistics = field(default_factory=RowStatistics)
    held: Footprint = field(default_factory=Footprint)
    times: SequenceTimes = field(default_factory=SequenceTimes)
    cancelled: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens it will hold at most; the last generated one is never fed back."""
        return len(self.prompt_ids) + self.max_tokens - 1

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < len(self.prompt_ids)

    @property
    def text(self) -> str:
        return self.detokenizer.text if self.detokenizer else ""

    def take(self, logits: NDArray[np.float32]) -> str:
        """Choose the next token from its logits [vocab] and decide whether it is the last (``finish_reason``).

        Returns:
            Text that is safe to show.

        Raises:
            GenerationError: logits without a token to choose.
        """
        position = len(self.prompt_ids) + len(self.output_ids)
        chosen = self.sampler.sample(logits, self.prompt_ids, self.output_ids, position)
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        self.output_ids.append(chosen.token_id)
        self.sampled.append(chosen)
        delta = ""
        if chosen.token_id in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", chosen.token_id
        elif self.detokenizer is not None:
            delta = self.detokenizer.push(chosen.token_id)
            if self.detokenizer.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped
        if self.finish_reason is None and len(self.output_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return delta

    def finish(
        self,
        reason: FinishReason,
        delta: str = "",
        tokens: list[int] | None = None,
        error: GenerationError | None = None,
    ) -> None:
        """End it; its listener hears of it exactly once. Text that cannot be decoded makes it an error."""
        if self.times.finished is not None:
            return
        self.finish_reason, self.error = reason, error
        if self.detokenizer is not None and reason != "error":
            try:
                delta += self.detokenizer.finish()
            except Exception as e:  # a tokenizer that the caller brought may raise anything
                self.finish_reason, self.stop_reason, self.error = "error", None, as_generation_error(e)
            else:
                if self.detokenizer.stopped is not None and reason == "length":
                    self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped
        self.times.finished = time.perf_counter()
        self.on_delta(self, delta, tokens or [])


def as_generation_error(error: BaseException) -> GenerationError:
    """What ends an answer, from whatever went wrong."""
    if isinstance(error, GenerationError):
        return error
    wrapped = GenerationError(f"the request failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
