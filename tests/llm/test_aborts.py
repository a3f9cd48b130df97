"""Aborts, failures and too little memory: a clean state afterwards, and neighbours that notice nothing."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llm import NAN_TOKEN, SAMPLED, assert_drained, batch, ids, one, params, prompt, running, wait_until
from trtllm_shadowkv import LLM
from trtllm_shadowkv.errors import CapacityError, GenerationError, RequestError
from trtllm_shadowkv.request import RequestHandle

# --- memory and queue ---------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_and_one_that_must_wait_waits(engine_dir: Path, shared: LLM) -> None:
    p = prompt(1000)
    need = shared._scheduler.footprint(shared.prepare(p, params(50)).answers[0])
    device, host = need.live + need.sealed, need.host
    for enough, name in ((device, "device_memory"), (host, "host_memory")):
        less: dict[str, Any] = {name: enough - 1}
        with LLM(engine_dir, threads=1, **less) as llm:
            with pytest.raises(CapacityError, match=f"bytes of {name[:-7]} memory; expected at most"):
                llm.generate(p, params(50))
            with pytest.raises(CapacityError, match="prompt 1 of 2"):
                llm.generate([[1], p], params(50))
            assert_drained(llm)
            assert len(ids(one(llm, prompt(900), params(50)))) == 50
        just: dict[str, Any] = {name: enough}
        with LLM(engine_dir, threads=1, **just) as llm:
            peak = 0
            handles = [llm.generate_async(p, params(50)) for _ in range(3)]
            while not all(h.finished for h in handles):
                peak = max(peak, len([a for h in handles for a in h.answers if a.slot is not None]))
                time.sleep(0.001)
            assert peak == 1
            assert len({tuple(ids(h.result())) for h in handles}) == 1
            assert_drained(llm)


def test_a_full_queue_refuses_a_batch_as_a_whole(engine_dir: Path) -> None:
    with LLM(engine_dir, threads=1, max_queue=6) as llm:
        with pytest.raises(RequestError, match="at most 6 waiting"):
            llm.generate([[1]] * 7, params(2))
        with pytest.raises(RequestError, match="at most 6 waiting"):
            llm.generate([1], params(2, n=7))
        assert_drained(llm)
        busy = [llm.generate_async(prompt(10), params(3000)) for _ in range(4)]
        wait_until(lambda: all(a.slot is not None for h in busy for a in h.answers), "four rows run")
        waiting = [llm.generate_async(prompt(10), params(3)) for _ in range(6)]
        with pytest.raises(RequestError, match="6 answers wait and 1 more"):
            llm.generate_async([1], params(2))
        for handle in busy:
            handle.abort()
        assert all(len(ids(h.result())) == 3 for h in waiting)
        assert_drained(llm)


# --- aborts -------------------------------------------------------------------------------------------------------


def _at_once(handle: RequestHandle) -> None:
    pass


def _in_prefill(handle: RequestHandle) -> None:
    wait_until(lambda: handle.answers[0].prefilled > 0, "the prompt is being read")


def _finished(handle: RequestHandle) -> None:
    handle.result()


def test_aborts_at_any_moment_leave_neighbours_and_memory_as_they_were(engine_dir: Path) -> None:
    """50 rounds under load: four rows, more requests than rows, one victim after the other."""
    rng = random.Random(0)
    neighbours = [prompt(n) for n in (5, 90, 300, 700)]
    settings = [params(24, **SAMPLED, seed=i) for i in range(4)]
    with LLM(engine_dir, threads=1, max_stretch=64) as llm:
        alone = [ids(one(llm, p, s)) for p, s in zip(neighbours, settings, strict=True)]
        moments = [_at_once, _in_prefill, running, _finished, None]
        seen: dict[str, int] = {}
        for round_ in range(50):
            moment = moments[round_ % len(moments)]
            load = [llm.generate_async(p, s) for p, s in zip(neighbours, settings, strict=True)]
            short = moment is _finished
            victim = llm.generate_async(
                prompt(30 if short else 1500), params(2 if short else 4000, n=rng.choice([1, 2]))
            )
            if moment is None:
                time.sleep(rng.random() * 0.2)
            else:
                moment(victim)
            victim.abort()
            if rng.random() < 0.5:
                victim.abort()
            reasons = {o.finish_reason for o in victim.result(timeout=180).outputs}
            assert reasons == {"length"} if short else reasons <= {"cancelled"}
            seen[reasons.pop()] = seen.get("cancelled", 0) + 1
            assert [ids(h.result(timeout=180)) for h in load] == alone, f"round {round_}"
            victim.abort()
            assert_drained(llm)
        assert set(seen) == {"cancelled", "length"}


def test_a_waiting_request_can_be_aborted(llm: LLM) -> None:
    busy = [llm.generate_async(prompt(10), params(3000)) for _ in range(4)]
    waiting = [llm.generate_async(prompt(10), params(5)) for _ in range(3)]
    waiting[1].abort()
    cancelled = waiting[1].result(timeout=180).outputs[0]
    assert (cancelled.finish_reason, cancelled.token_ids, cancelled.text) == ("cancelled", [], "")
    assert cancelled.statistics.queue_time is None
    for handle in busy:
        handle.abort()
    assert all(h.result(timeout=180).outputs[0].finish_reason == "length" for h in (waiting[0], waiting[2]))


def test_an_aborted_answer_keeps_what_it_had(llm: LLM) -> None:
    handle = llm.generate_async(prompt(10), params(3000))
    running(handle)
    handle.abort()
    answer = handle.result().outputs[0]
    assert 2 < len(answer.token_ids) < 3000
    deltas = list(handle)
    assert [t for d in deltas for t in d.token_ids] == answer.token_ids
    assert "".join(d.text for d in deltas) == answer.text
    assert deltas[-1].finish_reason == "cancelled"


def test_a_request_whose_handle_is_gone_is_aborted(llm: LLM) -> None:
    handle = llm.generate_async(prompt(10), params(5000))
    running(handle)
    answer = handle.answers[0]
    del handle
    gc.collect()
    wait_until(lambda: answer.finish_reason == "cancelled", "the request is aborted")


# --- failures -----------------------------------------------------------------------------------------------------


def test_nan_logits_fail_their_own_request_alone(llm: LLM) -> None:
    good, bad = prompt(300), [*prompt(299), NAN_TOKEN]
    alone = ids(one(llm, good, params(12)))
    with pytest.raises(GenerationError, match="NaN logits") as error:
        llm.generate([good, bad, good, [NAN_TOKEN]], params(12))
    outputs = error.value.outputs
    assert [o is None for o in outputs] == [False, True, False, True]
    assert [ids(o) for o in outputs if o is not None] == [alone, alone]
    with pytest.raises(GenerationError, match="NaN logits"):
        list(llm.generate_stream(bad, params(4)))
    assert_drained(llm)
    assert ids(one(llm, good, params(12))) == alone


class Fails:
    """Lets a method fail the nth time it is called, once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, count: int, error: BaseException
    ) -> None:
        original = getattr(target, name)
        self.left = count

        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, call)


@pytest.mark.parametrize(
    ("name", "count", "failed"),
    [
        ("allocate", 2, 1),
        ("begin_pass", 2, 1),  # in the second prompt's first stretch, or in a pass over the first row alone
        ("seal_prompt", 1, 1),
        ("seal_prompt", 2, 1),
        ("step_prologue", 6, 3),
        ("sparse_attention", 3, 1),
        ("key_reconstruct", 60, 3),
    ],
)
def test_a_fault_ends_the_sequences_of_its_pass_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, count: int, failed: int
) -> None:
    prompts = [prompt(n) for n in (300, 20, 700)]
    alone = [ids(one(llm, p, params(30))) for p in prompts]
    state = llm._scheduler.executor.state
    with monkeypatch.context() as patch:
        fault = Fails(patch, state, name, count, MemoryError("of the test"))
        with pytest.raises(GenerationError, match="MemoryError: of the test") as error:
            llm.generate(prompts, params(30))
        assert fault.left <= 0
    outputs = error.value.outputs
    assert 1 <= sum(o is None for o in outputs) <= failed
    for output, expected in zip(outputs, alone, strict=True):
        assert output is None or ids(output) == expected
    assert_drained(llm)
    assert [ids(o) for o in batch(llm, prompts, params(30))] == alone


def test_a_fault_of_the_scheduler_itself_leaves_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Fails(patch, llm._scheduler, "_admit", 1, SystemExit("of the test"))
        with pytest.raises(GenerationError, match="SystemExit"):
            llm.generate([[5], [6]], params(3))
    assert_drained(llm)
    assert len(ids(one(llm, [5], params(3)))) == 3
