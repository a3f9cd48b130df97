"""Continuous batching: who is admitted, whose prompt advances, who gets a token.

One step is at most one stretch of one prompt and one token of every running row. A sequence is admitted only when a
slot and all the memory it can come to need are free, so nothing that was admitted is ever evicted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from trtllm_shadowkv.errors import CapacityError, NoRoomError
from trtllm_shadowkv.runtime.sequence import Answer, as_generation_error
from trtllm_shadowkv.runtime.state import Footprint, Rows

_KNEE = 16_384  # tokens of prefix from which stretches get shorter
_SMALLEST_SHARE = 8

_log = logging.getLogger(__name__)


def stretches(prompt_tokens: int, longest: int) -> list[tuple[int, int]]:
    """The fixed schedule of a prompt: (start, length) of each stretch.

    It depends on the prompt's length alone, so that a row's numbers do not depend on its neighbours. From a prefix of
    16K tokens on, stretches get shorter as attention gets dearer, down to an eighth of the longest.
    """
    schedule, start = [], 0
    while start < prompt_tokens:
        length = max(longest * _KNEE // max(start, _KNEE), longest // _SMALLEST_SHARE, 1)
        length = min(length, prompt_tokens - start)
        schedule.append((start, length))
        start += length
    return schedule


Reserve = Callable[[int, int, bool], Footprint]
"""Bytes a sequence of (prompt_tokens, total_tokens, dense) can come to need."""


class Executor(Protocol):
    """What the scheduler asks of an executor."""

    @property
    def state(self) -> Rows: ...

    def context(
        self, slot: int, tokens: Sequence[int], start: int, is_last: bool, wanted: Sequence[int]
    ) -> NDArray[Any]: ...

    def generation(self, slots: Sequence[int], tokens: Sequence[int]) -> NDArray[Any]: ...

    def close(self) -> None:
        """Give its memory back; no pass may be running."""


@dataclass(frozen=True)
class Pool:
    """Memory that parts of footprints share.

    Args:
        name: of the setting that makes it larger, without ``_memory``.
        parts: attributes of :class:`Footprint`.
        capacity: bytes.
    """

    name: str
    parts: tuple[str, ...]
    capacity: int

    def taken(self, footprint: Footprint) -> int:
        """Bytes that a footprint takes of it."""
        return sum(getattr(footprint, part) for part in self.parts)


@dataclass(frozen=True)
class Limits:
    """Args: max_batch_size: rows; max_stretch: tokens a stretch; pools: all the memory there is for sequences."""

    max_batch_size: int
    max_stretch: int
    pools: tuple[Pool, ...]


@dataclass(frozen=True)
class Usage:
    """What an engine is busy with.

    Attributes:
        waiting: answers without a row yet; running: those that have one.
        device_used, host_used: bytes reserved for those that run; device_memory, host_memory: what there is.
    """

    waiting: int
    running: int
    device_used: int
    device_memory: int
    host_used: int
    host_memory: int


class Scheduler:
    """Owned by one thread; see :mod:`trtllm_shadowkv.runtime.worker`."""

    def __init__(self, executor: Executor, limits: Limits, reserve: Reserve) -> None:
        self.executor, self.limits, self._reserve = executor, limits, reserve
        self.waiting: deque[Answer] = deque()
        self.active: list[Answer] = []
        self.used = Footprint()
        self._free_slots = list(range(limits.max_batch_size))[::-1]
        self._held: dict[int, Footprint] = {}  # by slot

    def footprint(self, answer: Answer) -> Footprint:
        return self._reserve(len(answer.prompt_ids), answer.total_tokens, answer.dense)

    def check_fits(self, answer: Answer) -> None:
        """Refuse what could never run.

        Raises:
            CapacityError: it needs more memory than there is when nothing else runs.
        """
        need = self.footprint(answer)
        for pool in self.limits.pools:
            if pool.taken(need) > pool.capacity:
                raise CapacityError(
                    f"{len(answer.prompt_ids)} prompt and {answer.max_tokens} new tokens need {pool.taken(need):,} "
                    f"bytes of {pool.name} memory",
                    f"at most {pool.capacity:,}",
                    f"raise {pool.name}_memory, or shorten the request",
                )

    def usage(self, arrived: int) -> Usage:
        """A look from any thread; ``arrived``: answers that were not added yet."""
        used = self.used  # replaced as a whole
        taken, there = Counter[str](), Counter[str]()
        for pool in self.limits.pools:
            taken[pool.name] += pool.taken(used)
            there[pool.name] += pool.capacity
        return Usage(
            waiting=len(self.waiting) + arrived,
            running=len(self.active),
            device_used=taken["device"],
            device_memory=there["device"],
            host_used=taken["host"],
            host_memory=there["host"],
        )

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, answer: Answer) -> None:
        self.waiting.append(answer)

    def step(self) -> None:
        """Advance everything by one step. Errors end the sequences they belong to, and no others."""
        self._drop_cancelled()
        self._admit()
        prompt = next((a for a in self.active if a.in_prefill), None)
        if prompt is not None:
            self._context(prompt)
        self._generation([a for a in self.active if not a.in_prefill])

    def fail_all(self, error: BaseException) -> None:
        answers = [*self.waiting, *self.active]
        self.waiting.clear()
        for answer in answers:
            self._end(answer, error)

    def cancel_all(self) -> None:
        for answer in [*self.waiting, *self.active]:
            answer.cancelled = True
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        for answer in [a for a in (*self.active, *self.waiting) if a.cancelled]:
            if answer.slot is None:
                self.waiting.remove(answer)
            try:
                self._release(answer)
            except Exception as e:
                answer.finish("error", error=as_generation_error(e))
            else:
                answer.finish("cancelled")

    def _admit(self) -> None:
        """In order of arrival; the first that does not fit holds back those behind it, so that none starves."""
        while self.waiting and self._free_slots:
            answer = self.waiting[0]
            need = self.footprint(answer)
            if any(pool.taken(self.used + need) > pool.capacity for pool in self.limits.pools):
                return
            self.waiting.popleft()
            slot = self._free_slots.pop()
            try:
                self.executor.state.allocate(
                    slot,
                    prompt_tokens=len(answer.prompt_ids),
                    total_tokens=answer.total_tokens,
                    top_k=answer.top_k,
                    dense=answer.dense,
                )
            except Exception as e:
                self._free_slots.append(slot)
                if isinstance(e, NoRoomError) and self.active:  # room in pieces: it comes together as others end
                    self.waiting.appendleft(answer)
                    return
                answer.finish("error", error=as_generation_error(e))
                continue
            answer.slot, answer.times.admitted = slot, time.perf_counter()
            self._held[slot] = need
            self.used += need
            self.active.append(answer)

    def _context(self, answer: Answer) -> None:
        assert answer.slot is not None
        total = len(answer.prompt_ids)
        schedule = stretches(total, self.limits.max_stretch)
        start, length = next(s for s in schedule if s[0] == answer.prefilled)
        end = start + length
        try:
            tokens = answer.prompt_ids[start:end]
            logits = self.executor.context(answer.slot, tokens, start, end == total, [length - 1])
            answer.prefilled = end
            if end == total:
                self._take(answer, logits[0])
        except Exception as e:
            self._end(answer, e)

    def _generation(self, rows: list[Answer]) -> None:
        ready = [row for row in rows if self._sealed_if_due(row)]
        if not ready:
            return
        slots = [row.slot for row in ready if row.slot is not None]
        try:
            logits = self.executor.generation(slots, [row.output_ids[-1] for row in ready])
        except Exception as e:  # every row of the pass is half advanced: none of them can go on
            for row in ready:
                self._end(row, e)
            return
        for row, row_logits in zip(ready, logits, strict=True):
            try:
                self._take(row, row_logits)
            except Exception as e:
                self._end(row, e)

    def _sealed_if_due(self, answer: Answer) -> bool:
        """Seal a row that its next token would take over its dense limit; false where that failed."""
        slot = answer.slot
        assert slot is not None
        try:
            if self.executor.state.must_seal(slot):
                self.executor.state.seal_prompt(slot)
                sealed = self._held[slot].once_sealed()
                self.used += sealed - self._held[slot]
                self._held[slot] = sealed
        except Exception as e:
            self._end(answer, e)
            return False
        return True

    def _take(self, answer: Answer, logits: NDArray[Any]) -> None:
        delta = answer.take(logits)
        if answer.finish_reason is None:
            answer.on_delta(answer, delta, answer.output_ids[-1:])
        else:
            self._release(answer)  # before its listener hears of it
            answer.finish(answer.finish_reason, delta, answer.output_ids[-1:])

    def _end(self, answer: Answer, error: BaseException) -> None:
        try:
            self._release(answer)
        except Exception as e:
            _log.warning("what a failed answer held was not given back: %s", e)
        answer.finish("error", error=as_generation_error(error))

    def _release(self, answer: Answer) -> None:
        slot = answer.slot
        if slot is None:
            return
        try:
            answer.statistics = self.executor.state.statistics(slot)
        except Exception as e:  # a device that has failed says no more; the row goes all the same
            _log.warning("no statistics of slot %d: %s", slot, e)
        try:
            self.executor.state.release(slot)
        finally:
            answer.held = self._held.pop(slot)
            self.used -= answer.held
            self._free_slots.append(slot)
            self.active.remove(answer)
            answer.slot = None
