"""What goes into a request beside its prompt and sampling, and what comes out."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trtllm_shadowkv.errors import GenerationError, RequestError
from trtllm_shadowkv.runtime.sequence import Answer, FinishReason


@dataclass(frozen=True)
class AttentionParams:
    """A request's own share of what the engine was built for.

    Attributes:
        mode: ``dense`` keeps every key and value of this request and attends to all of them.
        top_k: chunks selected a KV head and step; None: what the engine was built with, which is also the most.
    """

    mode: Literal["shadowkv", "dense"] | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, "shadowkv", "dense"):
            raise RequestError(f"attention mode is {self.mode!r}", "'shadowkv' or 'dense'")
        top_k = self.top_k
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise RequestError(f"attention top_k is {top_k!r}", "a whole number of chunks, 1 or more")


@dataclass(frozen=True)
class RequestStatistics:
    """Figures of one answer; None where there is nothing to measure yet.

    Attributes:
        queue_time, time_to_first_token, time_per_token: seconds; the first two from the request's arrival, the last
            the mean over the tokens after the first.
        hit_rate: share of the selected chunks that were in the chunk cache.
        bytes_fetched: bytes of values copied from host memory.
        sealed_tokens: tokens in sealed chunks; ``generated_sealed``: those sealed by projection after the prompt.
        residual: ‖K − A·B‖/‖K‖ of the keys sealed by projection: how far the prompt's subspace still serves.
        device_bytes: keys, values and sealed state kept hot at the end; host_bytes: values in host memory.
    """

    prompt_tokens: int
    generated_tokens: int
    queue_time: float | None
    time_to_first_token: float | None
    time_per_token: float | None
    hit_rate: float | None
    bytes_fetched: int
    sealed_tokens: int
    generated_sealed: int
    residual: float | None
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's n answers.

    Attributes:
        text: empty where the engine has no tokenizer.
        token_ids: generated tokens, the end token included.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``; stop_reason: the stop string or token id met.
        logprobs: where asked for, for each token {token id: natural log of its probability}, the sampled one included.
        cumulative_logprob: sum over the sampled tokens, where logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float | None
    statistics: RequestStatistics


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True)
class StreamDelta:
    """What is new in one answer; ``finish_reason`` is set in the last one of each index."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


class RequestHandle:
    """A request under way: wait for it, iterate over it (also with ``await`` and ``async for``), or abort it.

    It keeps its LLM open. A request whose handle is gone has nobody to answer and is aborted; so is one whose
    awaiting task is cancelled.

    Args:
        logprobs: whether logprobs go into the output.
        owner: what has to live as long as the handle does.
    """

    def __init__(self, request_id: int, prompt: str | None, prompt_ids: list[int], logprobs: bool, owner: Any) -> None:
        self.request_id, self.prompt, self.prompt_ids = request_id, prompt, prompt_ids
        self.answers: list[Answer] = []
        self._logprobs = logprobs
        self._owner = owner
        self._deltas: queue.SimpleQueue[StreamDelta] = queue.SimpleQueue()
        self._running = self._unread = 0  # answers that go on; answers whose last delta was not taken yet
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def expect(self, answers: list[Answer], cancel: Callable[[Sequence[Answer]], None]) -> None:
        """Name the answers, and what ends them, before they are submitted."""
        self.answers, self._running, self._unread = answers, len(answers), len(answers)
        self._end = partial(_cancel, cancel, answers)
        weakref.finalize(self, self._end).atexit = False

    def listener(self) -> Callable[[Answer, str, list[int]], None]:
        """What the worker's thread calls with new tokens. It does not keep the handle alive."""
        method = weakref.WeakMethod(self._on_delta)

        def listen(answer: Answer, text: str, tokens: list[int]) -> None:
            on_delta = method()
            if on_delta is not None:
                on_delta(answer, text, tokens)

        return listen

    def _on_delta(self, answer: Answer, text: str, tokens: list[int]) -> None:
        finished = answer.finish_reason if answer.times.finished is not None else None
        index = next(i for i, a in enumerate(self.answers) if a is answer)
        self._deltas.put(StreamDelta(index, text, tokens, finished))
        if finished is not None:
            self._running -= 1
            if self._running == 0:
                self._done.set()
        with self._lock:
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    @property
    def finished(self) -> bool:
        return self._done.is_set()

    def abort(self) -> None:
        """End the request as soon as the step that runs is over; harmless when it is finished."""
        self._end()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole request.

        Raises:
            TimeoutError: not finished within ``timeout`` seconds; it goes on.
            GenerationError: an answer failed while it ran.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        self._raise_errors()
        outputs = [_completion(i, a, self._logprobs) for i, a in enumerate(self.answers)]
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, outputs)

    def _raise_errors(self) -> None:
        for answer in self.answers:
            if answer.error is not None:
                raise GenerationError(f"request {self.request_id}: {answer.error}") from answer.error

    def __iter__(self) -> Iterator[StreamDelta]:
        """Deltas of all answers as they come, each delta once; one consumer only.

        Raises:
            GenerationError: an answer failed while it ran.
        """
        while self._unread:
            yield self._counted(self._deltas.get())
        self._raise_errors()

    async def __aiter__(self) -> AsyncIterator[StreamDelta]:
        while self._unread:
            await self._until(lambda: not self._deltas.empty())
            yield self._counted(self._deltas.get_nowait())
        self._raise_errors()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._awaited().__await__()

    async def _awaited(self) -> RequestOutput:
        await self._until(self._done.is_set)
        return self.result()

    def _counted(self, delta: StreamDelta) -> StreamDelta:
        self._unread -= delta.finish_reason is not None
        return delta

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait on the running event loop, without a thread."""
        loop = asyncio.get_running_loop()
        try:
            while not ready():
                changed = loop.create_future()
                with self._lock:
                    self._wakers.append(lambda future=changed: _wake(loop, future))  # type: ignore[misc]
                if not ready():  # it may have become so before the waker was there
                    await changed
        except asyncio.CancelledError:
            self.abort()
            raise


def _cancel(cancel: Callable[[Sequence[Answer]], None], answers: list[Answer]) -> None:
    if any(answer.times.finished is None for answer in answers):
        cancel(answers)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """From the worker's thread; the loop may be closed by now."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


def _completion(index: int, answer: Answer, logprobs: bool) -> CompletionOutput:
    by_token = [{**dict(s.top), s.token_id: s.logprob} for s in answer.sampled if s.logprob is not None]
    own = [s.logprob for s in answer.sampled if s.logprob is not None]
    assert answer.finish_reason is not None
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=list(answer.output_ids),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        logprobs=by_token if logprobs else None,
        cumulative_logprob=sum(own) if logprobs else None,
        statistics=statistics(answer),
    )


def statistics(answer: Answer) -> RequestStatistics:
    times, row = answer.times, answer.statistics
    later = len(answer.output_ids) - 1
    per_token = None
    if times.first_token is not None and times.finished is not None and later > 0:
        per_token = (times.finished - times.first_token) / later
    return RequestStatistics(
        prompt_tokens=len(answer.prompt_ids),
        generated_tokens=len(answer.output_ids),
        queue_time=None if times.admitted is None else times.admitted - times.arrived,
        time_to_first_token=None if times.first_token is None else times.first_token - times.arrived,
        time_per_token=per_token,
        hit_rate=row.hit_rate,
        bytes_fetched=row.bytes_fetched,
        sealed_tokens=row.sealed_tokens,
        generated_sealed=row.generated_sealed,
        residual=row.residual,
        device_bytes=answer.held.live + answer.held.sealed,
        host_bytes=answer.held.host,
    )
