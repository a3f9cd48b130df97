"""Next-token distributions of an engine along a given text (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.request import AttentionParams, RequestStatistics, statistics
from trtllm_shadowkv.runtime.sampling import Sampled
from trtllm_shadowkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trtllm_shadowkv.llm import LLM

Floats = NDArray[np.float32]


@dataclass
class _Forced:
    """Takes the place of a sampler: the next token is given, its logits are kept."""

    tokens: Sequence[int]
    logits: list[Floats] = field(default_factory=list)

    def sample(self, logits: Floats, prompt_ids: Any, output_ids: Sequence[int], position: int) -> Sampled:
        self.logits.append(logits.copy())
        return Sampled(self.tokens[len(output_ids)], None, [])


def forced_logits(
    llm: LLM, prompt_ids: Sequence[int], tokens: Sequence[int], attention: AttentionParams | None = None
) -> tuple[Floats, RequestStatistics]:
    """Logits before each of ``tokens``, which follow the prompt one step at a time.

    Returns:
        logits [len(tokens), vocab] float32, and the figures of the run.

    Raises:
        RequestError: the request is refused.
        GenerationError: it failed while it ran.
    """
    params = SamplingParams(max_tokens=len(tokens), ignore_eos=True)
    handle = llm.prepare(list(prompt_ids), params, attention or AttentionParams())
    (answer,) = handle.answers
    answer.sampler = forced = _Forced(tokens)
    llm.submit(handle)
    handle.result()
    return np.stack(forced.logits), statistics(answer)


@dataclass(frozen=True)
class Agreement:
    """How close one model's next-token distributions are to another's.

    Attributes:
        positions: distributions compared.
        top1: share of positions with the same most probable token.
        kl: mean Kullback–Leibler divergence of the second from the first, in nats.
    """

    positions: int
    top1: float
    kl: float


def agreement(exact: Floats, approximate: Floats) -> Agreement:
    """Compare logits [n, vocab]: KL(exact ‖ approximate) and the most probable tokens."""
    p, q = _log_softmax(exact), _log_softmax(approximate)
    kl = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    return Agreement(len(p), float((p.argmax(axis=1) == q.argmax(axis=1)).mean()), kl)


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]
