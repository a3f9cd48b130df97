"""Choosing one sequence's next token from its logits, on the CPU.

A step, in this order, on the model's logits (float32, one a token of the vocabulary):

1. Repetition penalty over prompt and output: a positive logit is divided by it, a negative one multiplied
   (CTRL, arXiv 1909.05858, section 4.1, with the sign handled as transformers and TensorRT-LLM do). Then presence and
   frequency penalties over the output alone: z - presence·[c > 0] - frequency·c, c occurrences of the token.
2. Forbidden tokens become -inf: bad token ids; the last token of a bad word whose other tokens were just generated
   (or end the prompt); end and stop token ids until min_tokens are there.
3. Greedy: the largest logit, ties to the lower id. Otherwise temperature, top_k, min_p (relative to the most probable
   token) and top_p on what is left, renormalised; then one uniform number through the inverse of the cumulative
   distribution, tokens in descending order of logit, ties by lower id.

The uniform number comes from a counter-based generator (Philox 4x64-10, Salmon et al., SC 2011): the key is (seed,
index of the answer), the counter the position. A token therefore depends on nothing but its own logits, history, seed
and position: not on neighbours, batch order or how often a step was repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.errors import GenerationError, RequestError, StateError
from trtllm_shadowkv.sampling_params import SamplingParams

Ids: TypeAlias = Sequence[int] | NDArray[np.integer]
Floats: TypeAlias = NDArray[np.float32]
_F32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One generated token.

    Attributes:
        token_id: its id.
        logprob: natural log of its probability under the model's raw logits, before penalties, temperature or any
            cut; -inf is possible only for a logit of -inf, which is never chosen. None unless logprobs were asked for.
        top: the most probable tokens of the same distribution with their logprobs, most probable first, ties by lower
            id; at most params.logprobs of them, the generated one included where it ranks so high, those of
            probability 0 left out.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Token sequences that spell ``words``, alone and after a space (most tokenizers tell them apart).

    ``encode`` adds no special tokens. Only the tokenizer's own splits are found: a model may spell a word in others.
    """
    spelled = (tuple(map(int, encode(form))) for word in words for form in (word, " " + word))
    return list(dict.fromkeys(ids for ids in spelled if ids))


def uniform(seed: int, index: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2^-53, that belongs to a position of an answer."""
    raw = np.random.Philox(key=seed | index << 64, counter=position).random_raw()
    return (int(raw) >> 11) * 2.0**-53


class _Occurrences:
    """Which tokens a sequence holds, and how often its output does; a step adds only what is new.

    Attributes:
        ids: distinct tokens, in the order they were met. [size]
        counts: occurrences in the output, by token. [vocab_size] int32
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int32)
        self._known = np.zeros(vocab_size, np.bool_)
        self._ids = np.empty(vocab_size, np.int32)
        self._size = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._size]

    def add(self, tokens: Ids, *, output: bool) -> None:
        array = np.asarray(tokens, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self.counts.size:
            raise StateError(
                f"token ids from {array.min()} to {array.max()} in a sequence", f"ids below {self.counts.size}"
            )
        if output:
            np.add.at(self.counts, array, 1)
        fresh = np.unique(array[~self._known[array]])
        self._known[fresh] = True
        self._ids[self._size : self._size + fresh.size] = fresh
        self._size += fresh.size


class Sampler:
    """Chooses the tokens of one answer.

    Args:
        params: what the request asked for.
        vocab_size: logits a step.
        seed: key of the random numbers, 0 to 2^64 - 1; params.seed, or what the engine drew where that is None.
        index: which of the request's n answers this is.
        end_ids: the model's end tokens (they matter to min_tokens alone).
        bad_words: token sequences that must not appear, from :func:`bad_word_ids`; params.bad_token_ids are
            added here.

    Raises:
        RequestError: a token id outside the vocabulary, or every token forbidden from the start.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        seed: int,
        index: int = 0,
        *,
        end_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._seed = seed
        self._index = index
        words = [tuple(word) for word in bad_words]
        banned = [*(params.bad_token_ids or ()), *(word[0] for word in words if len(word) == 1)]
        self._banned = self._inside("bad token", banned)
        self._enders = self._inside("end or stop token", [*end_ids, *(params.stop_token_ids or ())])
        if self._banned.size == vocab_size:
            raise RequestError("every token of the vocabulary is forbidden", todo="shorten bad_token_ids")
        # Longer bad words by the token before their last, so that a step looks only at those that may end now.
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._inside("bad word's token", word)
                self._words.setdefault(word[-2], []).append(word)
        self._longest = max(map(len, words), default=0)
        self._repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._presence = params.presence_penalty or 0.0
        self._frequency = params.frequency_penalty or 0.0
        self._penalised = self._repetition != 1 or self._presence != 0 or self._frequency != 0
        self._occurrences: _Occurrences | None = None
        self._counted = 0

    def sample(self, logits: Floats, prompt_ids: Ids, output_ids: Ids, position: int) -> Sampled:
        """Choose the token at ``position``.

        Args:
            logits: [vocab_size] float32, never written to; -inf forbids a token.
            prompt_ids: the prompt; the same in every call. Token ids below vocab_size.
            output_ids: what was generated so far: the last call's, with more tokens (or fewer: it is then counted
                anew).
            position: counter of the random number; a function of the sequence alone, such as its length.

        Raises:
            GenerationError: NaN or +inf among the logits, or every token is forbidden.
            StateError: logits of another shape or type, or a token id outside the vocabulary.
        """
        if logits.shape != (self.vocab_size,) or logits.dtype != np.float32:
            raise StateError(f"logits are {logits.dtype} {logits.shape}", f"float32 ({self.vocab_size},)")
        best = int(logits.argmax())  # the first NaN where there is one
        if not logits[best] < np.inf:
            what = "NaN" if np.isnan(logits[best]) else "+inf"
            raise GenerationError(
                f"the model produced {what} logits at position {position} (token {best})",
                "numbers or -inf",
                "the weights may be damaged, or an activation overflowed its type",
            )
        edited = self._edit(logits, prompt_ids, output_ids)
        if edited is not logits:
            best = int(edited.argmax())
        if edited[best] == -np.inf:
            raise GenerationError(
                f"every token is forbidden at position {position}",
                "one that may be generated",
                "bad words, min_tokens and the model's own -inf logits leave none: relax the request",
            )
        if not self.params.greedy:
            best = self._draw(edited, uniform(self._seed, self._index, position))
        if self.params.logprobs is None:
            return Sampled(best, None, [])
        return Sampled(best, *_logprobs(logits, best, self.params.logprobs))

    def _inside(self, what: str, ids: Iterable[int]) -> NDArray[np.int64]:
        array = np.unique(np.fromiter(ids, dtype=np.int64))
        if array.size and not 0 <= array[0] <= array[-1] < self.vocab_size:
            wrong = array[0] if array[0] < 0 else array[-1]
            raise RequestError(f"{what} {wrong}", f"token ids from 0 to {self.vocab_size - 1}")
        return array

    def _edit(self, logits: Floats, prompt_ids: Ids, output_ids: Ids) -> Floats:
        """Logits after penalties and with forbidden tokens at -inf; the same array where nothing changes."""
        forbidden = [self._banned] if self._banned.size else []
        if self._enders.size and len(output_ids) < (self.params.min_tokens or 0):
            forbidden.append(self._enders)
        completed = self._completed_words(prompt_ids, output_ids) if self._words else []
        if not (forbidden or completed or self._penalised):
            return logits
        edited = logits.copy()
        if self._penalised:
            self._penalise(edited, prompt_ids, output_ids)
        for ids in forbidden:
            edited[ids] = -np.inf
        edited[completed] = -np.inf
        return edited

    def _completed_words(self, prompt_ids: Ids, output_ids: Ids) -> list[int]:
        """Last tokens of bad words whose other tokens end the sequence."""
        need = self._longest - 1
        recent = [int(t) for t in output_ids[-need:]]
        if len(recent) < need:
            recent = [*(int(t) for t in prompt_ids[max(0, len(prompt_ids) - need + len(recent)) :]), *recent]
        words = self._words.get(recent[-1], []) if recent else []
        return [w[-1] for w in words if len(w) <= len(recent) + 1 and tuple(recent[-(len(w) - 1) :]) == w[:-1]]

    def _penalise(self, edited: Floats, prompt_ids: Ids, output_ids: Ids) -> None:
        if self._occurrences is None or len(output_ids) < self._counted:
            self._occurrences, self._counted = _Occurrences(self.vocab_size), 0
            if self._repetition != 1:
                self._occurrences.add(prompt_ids, output=False)
        self._occurrences.add(output_ids[self._counted :], output=True)
        self._counted = len(output_ids)
        ids = self._occurrences.ids
        z = edited[ids].astype(np.float64)
        z = np.where(z > 0, z / self._repetition, z * self._repetition)
        counts = self._occurrences.counts[ids]
        z -= self._presence * (counts > 0) + self._frequency * counts
        # A finite logit stays finite in float32, whatever the penalty: it must not turn into "forbidden" or NaN.
        edited[ids] = np.where(np.isneginf(z), z, np.clip(z, _F32.min, _F32.max))

    def _draw(self, logits: Floats, u: float) -> int:
        """The token at the fraction ``u`` of the cut and renormalised distribution.

        Values alone are sorted, which is several times faster than sorting ids; the token is then found by its value
        and its rank among equals.
        """
        p = self.params
        drop = max(0, self.vocab_size - (p.top_k or self.vocab_size))
        values = np.sort(np.partition(logits, drop)[drop:] if drop else logits)  # ascending
        temperature = np.float32(np.clip(1.0 if p.temperature is None else p.temperature, _F32.tiny, _F32.max))
        with np.errstate(over="ignore", under="ignore"):
            weights = values[::-1] - values[-1]  # descending, as all below
            weights /= temperature
            np.exp(weights, out=weights)
        if p.min_p:
            weights = weights[: max(1, np.count_nonzero(weights >= np.float32(p.min_p)))]
        mass = weights.astype(np.float64)
        np.cumsum(mass, out=mass)
        last = mass.size - 1
        if p.top_p is not None and p.top_p < 1:
            last = min(last, int(np.searchsorted(mass, p.top_p * mass[-1])))
        # Below the whole mass even where the product rounds up, so that the token found has a weight above zero.
        target = min(u * mass[last], np.nextafter(mass[last], 0))
        rank = int(np.searchsorted(mass[: last + 1], target, side="right"))
        value = values[values.size - 1 - rank]
        larger = values.size - int(np.searchsorted(values, value, side="right"))
        return int(np.flatnonzero(logits == value)[rank - larger])


def _logprobs(logits: Floats, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of raw logits for ``token`` and for the ``count`` most probable tokens."""
    peak = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        norm = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if count:
        edge = max(0, logits.size - count)
        ids = np.flatnonzero(logits >= np.partition(logits, edge)[edge])
        ids = ids[np.argsort(-logits[ids], kind="stable")[:count]]
        top = [(int(i), float(logits[i]) - norm) for i in ids if logits[i] > -np.inf]
    return float(logits[token]) - norm, top
