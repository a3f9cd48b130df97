"""``LLM.usage()``: what an engine is busy with."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_llm import assert_drained, params, prompt, running, wait_until
from trtllm_shadowkv import LLM
from trtllm_shadowkv.runtime.scheduler import Usage


def idle(llm: LLM) -> Usage:
    there = {name: 0 for name in ("device", "host")}
    for pool in llm._scheduler.limits.pools:
        there[pool.name] += pool.capacity
    return Usage(0, 0, device_used=0, device_memory=there["device"], host_used=0, host_memory=there["host"])


def test_nothing_at_rest(llm: LLM) -> None:
    usage = llm.usage()
    assert usage == idle(llm)
    assert usage.device_memory > 0
    assert usage.host_memory > 0


def test_rows_and_their_memory(llm: LLM) -> None:
    handles = [llm.generate_async(prompt(n), params(3000)) for n in (10, 300, 700)]
    for handle in handles:
        running(handle)
    usage = llm.usage()
    assert (usage.waiting, usage.running) == (0, 3)
    held = [llm._scheduler._held[slot] for slot in list(llm._scheduler._held)]
    assert usage.device_used == sum(f.live + f.sealed for f in held)
    assert usage.host_used == sum(f.host for f in held)
    assert 0 < usage.device_used <= usage.device_memory
    assert 0 < usage.host_used <= usage.host_memory
    handles[2].abort()
    handles[2].result()
    fewer = llm.usage()
    assert (fewer.waiting, fewer.running) == (0, 2)
    assert 0 < fewer.device_used < usage.device_used
    for handle in handles:
        handle.abort()
        handle.result()
    wait_until(lambda: llm.usage() == idle(llm), "all is given back")


def test_the_queue(engine_dir: Path) -> None:
    with LLM(engine_dir, threads=1, max_batch_size=2, max_queue=50) as llm:
        busy = [llm.generate_async(prompt(10), params(3000)) for _ in range(2)]
        for handle in busy:
            running(handle)
        waiting = [llm.generate_async(prompt(10), params(3, n=2)) for _ in range(3)]
        assert (llm.usage().waiting, llm.usage().running) == (6, 2)  # answers, also those that the thread did not see
        waiting[0].abort()
        waiting[0].result()
        assert (llm.usage().waiting, llm.usage().running) == (4, 2)
        for handle in busy:
            handle.abort()
        for handle in waiting:
            handle.result()
        assert_drained(llm)
        assert llm.usage() == idle(llm)


def test_memory_is_what_was_given(engine_dir: Path) -> None:
    with LLM(engine_dir, threads=1, host_memory=50_000_000, device_memory=60_000_000) as llm:
        assert (llm.usage().host_memory, llm.usage().device_memory) == (50_000_000, 60_000_000)
        handle = llm.generate_async(prompt(10), params(3000))
        running(handle)
        llm.close()
        assert llm.usage() == idle(llm)
