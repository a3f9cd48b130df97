"""Who is admitted, whose prompt advances, who gets a token; and that the books balance whatever goes wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_shadowkv.errors import CapacityError, GenerationError, RequestError, StateError
from trtllm_shadowkv.runtime.sampling import Sampler
from trtllm_shadowkv.runtime.scheduler import Limits, Pool, Scheduler, stretches
from trtllm_shadowkv.runtime.sequence import Answer
from trtllm_shadowkv.runtime.state import Footprint, RowStatistics
from trtllm_shadowkv.runtime.worker import Worker
from trtllm_shadowkv.sampling_params import SamplingParams

VOCABULARY = 50
LIMIT = 40
"""Tokens after which the scripted state wants a row sealed."""
KEPT = 3
"""Live bytes that a sealed row keeps."""


class Fault(RuntimeError):
    pass


@dataclass
class ScriptedState:
    """Keeps the contract of ``State`` and nothing else: what is called out of order fails the test."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    fail: set[str] = field(default_factory=set)

    def _maybe_fail(self, what: str) -> None:
        if what in self.fail:
            raise Fault(what)

    def allocate(self, slot: int, *, prompt_tokens: int, total_tokens: int, top_k: int, dense: bool) -> None:
        self._maybe_fail("allocate")
        assert slot not in self.rows
        limit = float("inf") if dense else LIMIT
        self.rows[slot] = {"length": 0, "prompt": prompt_tokens, "total": total_tokens, "limit": limit, "sealed": False}

    def release(self, slot: int) -> None:
        del self.rows[slot]
        self._maybe_fail("release")

    def length(self, slot: int) -> int:
        return int(self.rows[slot]["length"])

    def is_sealed(self, slot: int) -> bool:
        return bool(self.rows[slot]["sealed"])

    def must_seal(self, slot: int) -> bool:
        row = self.rows[slot]
        return not row["sealed"] and row["length"] + 1 > row["limit"]

    def seal_prompt(self, slot: int) -> None:
        self._maybe_fail("seal")
        assert self.must_seal(slot)
        self.rows[slot]["sealed"] = True

    def statistics(self, slot: int) -> RowStatistics:
        self._maybe_fail("statistics")
        return RowStatistics(sealed_tokens=self.rows[slot]["length"] * self.rows[slot]["sealed"])


@dataclass
class ScriptedExecutor:
    """The token at a position follows from the sequence's length alone; passes are recorded."""

    state: ScriptedState = field(default_factory=ScriptedState)
    passes: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def context(
        self, slot: int, tokens: Sequence[int], start: int, is_last: bool, wanted: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        self.state._maybe_fail("context")
        row = self.state.rows[slot]
        assert start == row["length"]
        row["length"] += len(tokens)
        assert is_last == (row["length"] == row["prompt"])
        self.passes.append(("context", (slot,), len(tokens)))
        return np.stack([_logits(start + i + 1) for i in wanted])

    def generation(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        self.state._maybe_fail("generation")
        assert len(set(slots)) == len(slots) == len(tokens)
        for slot, token in zip(slots, tokens, strict=True):
            row = self.state.rows[slot]
            assert not self.state.must_seal(slot)
            assert row["length"] < row["total"]
            assert token == int(_logits(row["length"]).argmax()) or row["length"] == 0
            row["length"] += 1
        self.passes.append(("generation", tuple(slots), 1))
        return np.stack([_logits(self.state.length(s)) for s in slots])


def _logits(length: int) -> np.ndarray[Any, Any]:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[length * 7 % VOCABULARY] = 1
    return logits


def expected(prompt: int, count: int) -> list[int]:
    return [(prompt + i) * 7 % VOCABULARY for i in range(count)]


def footprint(prompt: int, total: int, dense: bool) -> Footprint:
    """A byte a token: what must be live, and as much again sealed and on the host for rows that will be sealed."""
    sealed = total > LIMIT and not dense
    live = max(prompt, min(total, LIMIT)) if sealed else total
    return Footprint(live, total * sealed, total * sealed, KEPT * sealed)


@dataclass
class Heard:
    deltas: list[tuple[str, list[int]]] = field(default_factory=list)
    ends: int = 0


def answer(prompt: int, count: int, *, dense: bool = False, end_ids: Sequence[int] = ()) -> tuple[Answer, Heard]:
    heard = Heard()

    def listen(who: Answer, text: str, tokens: list[int]) -> None:
        assert not heard.ends, "heard of after its end"
        heard.deltas.append((text, tokens))
        heard.ends += who.times.finished is not None
        if who.times.finished is not None:
            assert who.slot is None, "its slot was not free when its listener heard of its end"

    params = SamplingParams(max_tokens=count)
    made = Answer(
        prompt_ids=[1] * prompt,
        max_tokens=count,
        top_k=4,
        dense=dense,
        sampler=Sampler(params, VOCABULARY, 0),
        detokenizer=None,
        end_ids=frozenset(end_ids),
        on_delta=listen,
    )
    return made, heard


def scheduler(batch: int = 4, stretch: int = 16, device: int = 10_000, host: int = 10_000) -> Scheduler:
    pools = Pool("device", ("live", "sealed"), device), Pool("host", ("host",), host)
    return Scheduler(ScriptedExecutor(), Limits(batch, stretch, pools), footprint)  # type: ignore[arg-type]


def state_of(s: Scheduler) -> ScriptedState:
    return s.executor.state  # type: ignore[return-value]


def passes_of(s: Scheduler) -> list[tuple[str, tuple[int, ...], int]]:
    return s.executor.passes  # type: ignore[attr-defined,no-any-return]


def check_books(s: Scheduler) -> None:
    """What is used is what the active rows hold, and no slot is in two places."""
    assert all(0 <= pool.taken(s.used) <= pool.capacity for pool in s.limits.pools)
    slots = [a.slot for a in s.active if a.slot is not None]
    assert len(slots) == len(s.active)
    assert sorted([*slots, *s._free_slots]) == list(range(s.limits.max_batch_size))
    assert set(state_of(s).rows) == set(slots)
    held = [
        (footprint(len(a.prompt_ids), a.total_tokens, a.dense), state_of(s).is_sealed(a.slot or 0)) for a in s.active
    ]
    assert s.used == sum((f.once_sealed() if sealed else f for f, sealed in held), Footprint())


def drain(s: Scheduler, steps: int = 10_000) -> None:
    for _ in range(steps):
        if not s.busy:
            break
        s.step()
        check_books(s)
    assert not s.busy
    assert (s.used, state_of(s).rows, s._held) == (Footprint(), {}, {})


# --- stretches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 7, 8, 16, 1000, 1024, 8192])
@pytest.mark.parametrize("tokens", [1, 7, 8, 513, 1024, 1025, 16_384, 40_001])
def test_stretches_cover_a_prompt_once_and_in_order(tokens: int, longest: int) -> None:
    schedule = stretches(tokens, longest)
    assert [start for start, _ in schedule] == list(accumulate((n for _, n in schedule[:-1]), initial=0))
    assert sum(n for _, n in schedule) == tokens
    assert all(1 <= n <= longest for _, n in schedule)
    assert all(n >= longest // 8 for _, n in schedule[:-1])
    assert stretches(tokens + 1, longest)[: len(schedule) - 1] == schedule[:-1]


def test_stretches_get_shorter_with_the_prefix_down_to_an_eighth() -> None:
    lengths = [n for _, n in stretches(400_000, 1024)][:-1]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (1024, 128)
    assert stretches(0, 16) == []


# --- order --------------------------------------------------------------------------------------------------------


def test_answers_are_what_they_would_be_alone_and_every_token_is_heard_once() -> None:
    s = scheduler(batch=3)
    made = [answer(p, n) for p, n in ((1, 5), (16, 1), (17, 9), (33, 30), (100, 3), (40, 50))]
    for a, _ in made:
        s.add(a)
    drain(s)
    for a, heard in made:
        assert a.output_ids == expected(len(a.prompt_ids), a.max_tokens)
        assert [t for _, tokens in heard.deltas for t in tokens] == a.output_ids
        assert (heard.ends, a.finish_reason) == (1, "length")


def test_running_rows_get_a_token_between_any_two_stretches_of_a_prompt() -> None:
    s = scheduler(stretch=8)
    (first, _), (long, _) = answer(3, 100, dense=True), answer(200, 2)
    s.add(first)
    s.step()
    s.add(long)
    before = len(passes_of(s))
    while long.in_prefill:
        s.step()
    kinds = [kind for kind, _, _ in passes_of(s)[before:]]
    assert kinds == ["context", "generation"] * 25
    assert len(first.output_ids) == 27
    drain(s)


def test_one_prompt_is_read_at_a_time_in_order_of_arrival() -> None:
    s = scheduler(stretch=8)
    made = [answer(30, 5)[0] for _ in range(3)]
    for a in made:
        s.add(a)
    order = []
    while any(a.in_prefill for a in made):
        s.step()
        order.append([a.prefilled for a in made])
    assert all(b == 0 or a == 30 for row in order for a, b in pairwise(row))
    drain(s)


def test_no_more_rows_than_the_engine_was_built_for() -> None:
    s = scheduler(batch=2)
    for _ in range(7):
        s.add(answer(5, 10)[0])
    most = 0
    while s.busy:
        s.step()
        most = max(most, len(s.active), *(len(slots) for _, slots, _ in passes_of(s)[-2:]))
    assert most == 2


def test_an_end_token_ends_an_answer_and_frees_its_row_in_the_same_step() -> None:
    s = scheduler(batch=1)
    (first, heard), (second, _) = answer(4, 50, end_ids=[expected(4, 3)[-1]]), answer(2, 2)
    s.add(first)
    s.add(second)
    for _ in range(3):
        s.step()
        if first.finish_reason:
            break
    assert (first.finish_reason, first.stop_reason, heard.ends) == ("stop", expected(4, 3)[-1], 1)
    assert first.output_ids == expected(4, 3)
    s.step()
    assert second.slot is not None or second.finish_reason
    drain(s)


# --- memory -------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused() -> None:
    s = scheduler(device=100, host=60)
    s.check_fits(answer(41, 10)[0])  # 41 live and 50 sealed, 50 on the host
    with pytest.raises(CapacityError, match="device memory"):
        s.check_fits(answer(46, 10)[0])
    with pytest.raises(CapacityError, match="device memory"):
        s.check_fits(answer(90, 20, dense=True)[0])
    with pytest.raises(CapacityError, match="host memory"):
        scheduler(device=10_000, host=49).check_fits(answer(41, 10)[0])
    s.check_fits(answer(90, 11, dense=True)[0])


def test_the_first_that_does_not_fit_holds_back_those_behind_it() -> None:
    s = scheduler(device=100)
    (a, _), (b, _), (c, _) = answer(20, 20), answer(60, 10, dense=True), answer(1, 2)
    for x in (a, b, c):
        s.add(x)
    while a.finish_reason is None:
        s.step()
        check_books(s)
        if a.finish_reason is None:
            assert b.slot is None or len(s.active) == 2
            assert c.slot is None or b.slot is not None
    drain(s)
    assert b.times.admitted is not None
    assert c.times.admitted is not None
    assert b.times.admitted <= c.times.admitted


def test_live_memory_is_free_for_others_once_a_row_is_sealed() -> None:
    s = scheduler(device=200, host=1000)
    (long, _), (other, _) = answer(80, 20), answer(50, 1, dense=True)  # 80 live + 99 sealed; 50
    s.add(long)
    s.add(other)
    while not long.output_ids:
        s.step()
        assert other.slot is None
    assert state_of(s).is_sealed(long.slot or 0)  # before its second token
    assert s.used == Footprint(KEPT, 99, 99)
    s.step()
    assert other.slot is not None or other.finish_reason
    drain(s)


def test_pools_of_their_own_for_what_is_live_and_what_is_sealed() -> None:
    s = scheduler()
    pools = Pool("device", ("live",), 90), Pool("device", ("sealed",), 250), Pool("host", ("host",), 1000)
    s.limits = Limits(4, 16, pools)
    (long, _), (second, _), (third, _) = answer(80, 20), answer(80, 20), answer(80, 20)
    for a in (long, second, third):
        s.add(a)
    while not second.output_ids:
        s.step()
        check_books(s)
    assert long.finish_reason is None, "the second was admitted when the first was sealed"
    assert third.slot is None, "sealed memory for two"
    drain(s)
    with pytest.raises(CapacityError, match="need 91 bytes of device memory; expected at most 90"):
        s.check_fits(answer(91, 1, dense=True)[0])


def test_a_sequence_exactly_as_large_as_memory_runs() -> None:
    need = footprint(80, 99, False)
    s = scheduler(device=need.live + need.sealed, host=need.host)
    (a, _) = answer(80, 20)
    s.check_fits(a)
    s.add(a)
    drain(s)
    assert a.output_ids == expected(80, 20)


# --- faults and cancellations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "ended"), [("allocate", [1]), ("context", [1]), ("seal", [0]), ("generation", [0, 2])]
)
def test_a_fault_ends_those_it_belongs_to(fault: str, ended: list[int]) -> None:
    s = scheduler(stretch=100)
    made = [answer(30, 20), answer(10, 20), answer(5, 20)]
    first, second, third = (a for a, _ in made)
    s.add(first)
    s.add(third)
    while len(third.output_ids) < 1:
        s.step()
    assert not state_of(s).is_sealed(first.slot or 0)
    state_of(s).fail = {fault}
    if fault in ("allocate", "context"):
        s.add(second)
    for _ in range(10 if fault == "seal" else 1):  # until the first row outgrows its limit
        s.step()
    state_of(s).fail = set()
    if fault not in ("allocate", "context"):
        s.add(second)
    check_books(s)
    drain(s)
    for i, (a, heard) in enumerate(made):
        assert heard.ends == 1
        if i in ended:
            assert (a.finish_reason, type(a.error)) == ("error", GenerationError)
            assert fault in str(a.error)
            assert isinstance(a.error.__cause__, Fault)  # type: ignore[union-attr]
        else:
            assert a.output_ids == expected(len(a.prompt_ids), a.max_tokens)


@pytest.mark.parametrize("also", [set(), {"release"}])
def test_a_device_that_has_failed_leaves_nobody_waiting(also: set[str]) -> None:
    """Everything that is asked of it fails: the pass, then what is asked when its rows are released."""
    s = scheduler()
    made = [answer(5, 20) for _ in range(6)]
    for a, _ in made:
        s.add(a)
    for _ in range(4):
        s.step()
    made[1][0].cancelled = True
    state_of(s).fail = {"allocate", "context", "generation", "statistics", *also}
    for _ in range(3):
        s.step()
        check_books(s)
    assert [heard.ends for _, heard in made] == [1] * 6
    assert {a.finish_reason for a, _ in made} <= {"error", "cancelled"}
    assert not s.busy


def test_all_fail_though_none_can_be_released() -> None:
    s = scheduler(batch=3)
    made = [answer(5, 20) for _ in range(5)]
    for a, _ in made:
        s.add(a)
    for _ in range(4):
        s.step()
    state_of(s).fail = {"statistics", "release"}
    s.fail_all(Fault("of the test"))
    assert [(a.finish_reason, heard.ends) for a, heard in made] == [("error", 1)] * 5
    assert not s.busy
    check_books(s)


def test_cancellation_at_every_step_of_a_life() -> None:
    for moment in range(40):
        s = scheduler(batch=2, stretch=8)
        made = [answer(30, 10), answer(50, 10), answer(12, 10)]
        for a, _ in made:
            s.add(a)
        victim, heard = made[moment % 3]
        for _ in range(moment):
            s.step()
        victim.cancelled = True
        already = victim.finish_reason
        drain(s)
        assert victim.finish_reason == (already or "cancelled")
        assert heard.ends == 1
        for a, _ in made:
            assert a is victim or a.output_ids == expected(len(a.prompt_ids), 10)


def test_random_lives_leave_balanced_books() -> None:
    """Arrivals, cancellations and faults at random; everybody ends once, and right."""
    for seed in range(60):
        rng = random.Random(seed)
        s = scheduler(rng.randint(1, 5), rng.randint(1, 40), rng.randint(250, 600), rng.randint(150, 400))
        made: list[tuple[Answer, Heard]] = []
        for _ in range(rng.randint(20, 120)):
            if rng.random() < 0.3:
                fresh = answer(rng.randint(1, 90), rng.randint(1, 30), dense=rng.random() < 0.3)
                try:
                    s.check_fits(fresh[0])
                except CapacityError:
                    continue
                made.append(fresh)
                s.add(fresh[0])
            if made and rng.random() < 0.1:
                rng.choice(made)[0].cancelled = True
            state_of(s).fail = (
                {rng.choice(["allocate", "context", "seal", "generation"])} if rng.random() < 0.05 else set()
            )
            s.step()
            check_books(s)
        state_of(s).fail = set()
        drain(s)
        for a, heard in made:
            assert heard.ends == 1
            assert a.finish_reason in ("length", "cancelled", "error")
            assert a.output_ids == expected(len(a.prompt_ids), len(a.output_ids))
            assert (a.finish_reason == "length") == (len(a.output_ids) == a.max_tokens) or a.cancelled or a.error


# --- the thread ---------------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(scheduler(), max_queue=5)
    yield made
    made.stop()
    assert not made._thread.is_alive()


def _finished(answers: list[Answer]) -> bool:
    for _ in range(2000):
        if all(a.times.finished is not None for a in answers):
            return True
        threading.Event().wait(0.005)
    return False


def test_a_worker_serves_what_it_is_given(worker: Worker) -> None:
    made = [answer(p, 5)[0] for p in (3, 50, 7)]
    worker.submit(made)
    assert _finished(made)
    assert [a.output_ids for a in made] == [expected(len(a.prompt_ids), 5) for a in made]
    worker.submit([])
    worker.cancel(made)


FREED_AT_EXIT = """
import time
from tests.runtime.test_scheduler import answer, scheduler
from trtllm_shadowkv.runtime.worker import Worker

class Slow:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

s = scheduler()
s.executor.engine = Slow()
worker = Worker(s, max_queue=5)
worker.submit([answer(3, 5)[0]])
worker.stop(wait=False)  # as a garbage collector does
del s, worker
time.sleep(0.2)
"""


def test_what_a_thread_frees_is_freed_before_the_interpreter_ends() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FREED_AT_EXIT], cwd=root, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed\n", "")


def test_a_queue_takes_all_or_none(worker: Worker) -> None:
    made = [answer(3, 2)[0] for _ in range(6)]
    with pytest.raises(RequestError, match="0 answers wait and 6 more were asked for; expected at most 5"):
        worker.submit(made)
    worker.submit(made[:5])
    assert _finished(made[:5])
    assert made[5].times.finished is None


def test_a_stopped_worker_ends_what_it_had_and_takes_nothing_more(worker: Worker) -> None:
    made = [answer(3, 20_000, dense=True)[0] for _ in range(4)]
    made[3].max_tokens = 1 << 40  # never admitted
    worker.submit(made[:3])
    worker.stop()
    worker.stop()
    assert [a.finish_reason for a in made[:3]] == ["cancelled"] * 3
    with pytest.raises(StateError, match="closed"):
        worker.submit(made[3:])
    worker.cancel(made)
