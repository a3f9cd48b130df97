"""Handles on an event loop: ``await``, ``async for`` and cancelled tasks."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.tiny_llm import NAN_TOKEN, SAMPLED, assert_drained, ids, one, params, prompt
from trtllm_shadowkv import LLM, RequestOutput
from trtllm_shadowkv.errors import GenerationError
from trtllm_shadowkv.request import RequestHandle


async def whole(handle: RequestHandle) -> RequestOutput:
    return await handle


async def streamed(handle: RequestHandle) -> list[int]:
    return [t async for delta in handle for t in delta.token_ids]


def test_many_requests_are_awaited_at_once_without_a_thread_each(llm: LLM) -> None:
    requests = [(prompt(n, seed=n), params(10, **SAMPLED, seed=n)) for n in range(1, 41)]
    alone = [ids(one(llm, *r)) for r in requests]

    async def main() -> list[list[int]]:
        before = threading.active_count()
        handles = [llm.generate_async(*r) for r in requests]
        half = [asyncio.create_task(streamed(h)) for h in handles[::2]]
        outputs = await asyncio.gather(*handles[1::2])
        results = {i * 2 + 1: ids(o) for i, o in enumerate(outputs)}
        results |= {i * 2: await task for i, task in enumerate(half)}
        assert threading.active_count() == before
        return [results[i] for i in range(len(requests))]

    assert asyncio.run(main()) == alone


def test_the_loop_is_free_meanwhile(llm: LLM) -> None:
    async def main() -> int:
        task = asyncio.create_task(whole(llm.generate_async(prompt(3000), params(20))))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        await task
        return turns

    assert asyncio.run(main()) > 10


@pytest.mark.parametrize("consume", [whole, streamed])
@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_cancelling_the_task_aborts_the_request(llm: LLM, consume: object, delay: float) -> None:
    async def main() -> RequestHandle:
        handle = llm.generate_async(prompt(20), params(5000))
        task = asyncio.create_task(consume(handle))  # type: ignore[operator]
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    handle = asyncio.run(main())
    if delay or handle.finished:  # a task that never started has waited for nothing
        assert handle.result(timeout=180).outputs[0].finish_reason == "cancelled"
    handle.abort()
    handle.result(timeout=180)


def test_a_time_limit_aborts_and_a_shield_does_not(llm: LLM) -> None:
    async def main() -> None:
        handle = llm.generate_async(prompt(20), params(5000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(whole(handle), 0.05)
        assert (await handle).outputs[0].finish_reason == "cancelled"
        handle = llm.generate_async(prompt(20), params(300))
        task = asyncio.create_task(whole(handle))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.01)
        assert (await task).outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_a_stream_can_be_left_and_taken_up_again(llm: LLM) -> None:
    async def main() -> list[int]:
        handle = llm.generate_async(prompt(20), params(50))
        tokens: list[int] = []
        async for delta in handle:
            tokens += delta.token_ids
            if len(tokens) >= 10:
                break
        tokens += await streamed(handle)
        assert await streamed(handle) == []
        assert ids(await handle) == tokens
        return tokens

    assert len(asyncio.run(main())) == 50


def test_a_failure_is_raised_where_it_is_awaited(llm: LLM) -> None:
    async def main() -> None:
        bad = [NAN_TOKEN, 5]
        good, *failed = await asyncio.gather(
            whole(llm.generate_async(prompt(20), params(20))),
            whole(llm.generate_async(bad, params(20))),
            streamed(llm.generate_async(bad, params(20))),
            return_exceptions=True,
        )
        assert isinstance(good, RequestOutput)
        assert all(isinstance(f, GenerationError) and "NaN logits" in str(f) for f in failed)

    asyncio.run(main())


def test_a_loop_that_ends_before_the_request_does_no_harm(llm: LLM) -> None:
    async def main() -> RequestHandle:
        handle = llm.generate_async(prompt(20), params(400))
        iterator = handle.__aiter__()
        await anext(iterator)
        waiting = asyncio.ensure_future(anext(iterator))
        await asyncio.sleep(0)
        waiting.add_done_callback(lambda _: None)
        return handle

    handle = asyncio.run(main())  # cancels what still waits, and with it the request
    assert handle.result(timeout=180).outputs[0].finish_reason in ("cancelled", "length")
    assert_drained(llm)
    other = llm.generate_async(prompt(20), params(400))

    async def leave() -> None:
        other._wakers.append(lambda: time.sleep(0))
        await anext(other.__aiter__())

    asyncio.run(leave())
    assert len(ids(other.result(timeout=180))) == 400
