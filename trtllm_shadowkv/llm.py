"""``LLM``: a loaded engine that answers requests, many at a time."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from trtllm_shadowkv.config import RuntimeConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import GenerationError, RequestError, require
from trtllm_shadowkv.llm_settings import merged_settings
from trtllm_shadowkv.request import AttentionParams, RequestHandle, RequestOutput, StreamDelta
from trtllm_shadowkv.request_inputs import (
    Array,
    Prompt,
    check_length,
    checked_ids,
    granted,
    one,
    one_for_each,
    prompt_batch,
    token_ids,
)
from trtllm_shadowkv.sampling_params import SamplingParams
from trtllm_shadowkv.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from trtllm_shadowkv.runtime.scheduler import Usage


class LLM:
    """An engine in memory, with its own worker thread; safe to use from several threads.

    Args:
        engine_dir: written by ``trtllm-shadowkv build``.
        tokenizer: a transformers tokenizer or a directory of one; None: the engine's own. Without any, prompts and
            answers are token ids.
        executor: ``onnx_cpu``, ``tensorrt``, or None: TensorRT where the directory holds an engine, else the CPU.
        runtime: settings; keyword arguments are fields of :class:`RuntimeConfig`, or run-time fields of
            :class:`ShadowKVConfig` such as ``dense_limit`` or ``window``.

    Raises:
        EngineError: the directory cannot be used.
        ConfigError: an unknown setting, or one that is fixed when an engine is built.
        MissingDependencyError: a package the executor needs is not installed.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        tokenizer: Any = None,
        *,
        executor: Literal["onnx_cpu", "tensorrt"] | None = None,
        runtime: RuntimeConfig | None = None,
        **settings: Any,
    ) -> None:
        for module in ("numpy", "torch"):
            require(module, "cpu")
        from trtllm_shadowkv.runtime.executors.opening import chosen, open_executor
        from trtllm_shadowkv.runtime.scheduler import Scheduler
        from trtllm_shadowkv.runtime.worker import Worker

        self.engine, self.runtime, self.config = merged_settings(
            EngineDirectory.open(engine_dir), RuntimeConfig() if runtime is None else runtime, settings
        )
        which = chosen(executor, self.engine)
        self.tokenizer = Tokenizer.of(self.engine, tokenizer)
        opened = open_executor(self.engine, self.runtime, self.config, which)
        self.value_pool = opened.values
        self._scheduler = Scheduler(opened.executor, opened.limits, opened.reserve)
        self._worker = Worker(self._scheduler, self.runtime.max_queue)
        weakref.finalize(self, self._worker.stop, wait=False).atexit = False
        self._ids = itertools.count()

    # --- requests -------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention: AttentionParams | Sequence[AttentionParams] | None = None,
        progress: bool = False,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt] | Sequence[int] | Array,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention: AttentionParams | Sequence[AttentionParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput] | RequestOutput: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention: AttentionParams | Sequence[AttentionParams] | None = None,
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or a batch in which every answer is what it would be alone.

        Args:
            prompts: a text or a list of token ids (one result), or a list of those (a list of results). NumPy and
                torch arrays are lists too.
            sampling_params: one for all, or one for each prompt; None: greedy, 32 tokens. An answer that reaches the
                engine's max_seq_len ends there with ``length``, whatever max_tokens says: a prompt of max_seq_len
                tokens is answered with one.
            attention: one for all, or one for each prompt.
            progress: show a progress bar.

        An interrupt (Ctrl-C) aborts the batch. After :meth:`close` in another thread, answers end as ``cancelled``.

        Raises:
            RequestError: a request that is refused; none of them was started then.
            StateError: the LLM is closed.
            GenerationError: requests that failed while they ran; the others' results are in its ``outputs``.
        """
        batch, single = prompt_batch(prompts)
        params = one_for_each(sampling_params, len(batch), "sampling_params", SamplingParams)
        attentions = one_for_each(attention, len(batch), "attention", AttentionParams)
        if progress:
            require("tqdm", "cpu")
        handles: list[RequestHandle] = []
        for i, request in enumerate(zip(batch, params, attentions, strict=True)):
            try:
                handles.append(self.prepare(*request))
            except RequestError as e:
                raise e if single else type(e)(f"prompt {i} of {len(batch)}: {e}") from e
        outputs = self._run(handles, progress)
        return outputs[0] if single else outputs

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        attention: AttentionParams | None = None,
    ) -> RequestHandle:
        """Start one request and return at once. The handle keeps the LLM open; without it the request is aborted.

        Raises:
            RequestError: the request is refused.
            StateError: the LLM is closed.
        """
        handle = self.prepare(prompt, sampling_params, attention)
        self.submit(handle)
        return handle

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        attention: AttentionParams | None = None,
    ) -> Iterator[StreamDelta]:
        """Answer piece by piece; closing the iterator early aborts the request.

        Raises:
            RequestError: the request is refused (at once, not at the first piece).
            StateError: the LLM is closed.
            GenerationError: it failed while it ran.
        """
        return _stream(self.generate_async(prompt, sampling_params, attention=attention))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        attention: AttentionParams | None = None,
    ) -> RequestOutput:
        """Answer a conversation, a list of {"role": …, "content": …}, through the model's chat template.

        Raises:
            RequestError: no tokenizer, no chat template, or a refused request.
            StateError: the LLM is closed.
            GenerationError: the request failed while it ran.
        """
        return self._run([self.prepare(self.chat_ids(messages), sampling_params, attention)])[0]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for :meth:`generate`."""
        return self._need_tokenizer("a chat").chat(messages)

    def prepare(
        self, prompt: Any, sampling_params: SamplingParams | None = None, attention: AttentionParams | None = None
    ) -> RequestHandle:
        """Check a request and make its answers, without starting anything: that is :meth:`submit`.

        Raises:
            RequestError: the request is refused.
        """
        from trtllm_shadowkv.runtime.detokenize import Detokenizer
        from trtllm_shadowkv.runtime.sampling import Sampler, bad_word_ids
        from trtllm_shadowkv.runtime.sequence import Answer

        params = one(sampling_params, "sampling_params", SamplingParams)
        top_k, dense = granted(one(attention, "attention", AttentionParams), self.config)
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            ids = token_ids(prompt)
        else:
            tokenizer = self._need_tokenizer("a text prompt")
            check_length(text, self.engine.max_seq_len, tokenizer.longest)
            ids = tokenizer.encode(text)
        ids = checked_ids(prompt, ids, self.engine.model.vocab_size, self.engine.max_seq_len)
        words: list[tuple[int, ...]] = []
        if params.stop_strings or params.bad_strings:
            tokenizer = self._need_tokenizer("a stop or bad string")
            words = bad_word_ids(params.bad_strings, lambda word: tokenizer.encode(word, special=False))
        end_ids = frozenset(() if params.ignore_eos else self.engine.model.eos_token_ids)
        ends = end_ids | frozenset(params.stop_token_ids or ())
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = (params.stop_strings, params.include_stop_str_in_output, ids)
        handle = RequestHandle(next(self._ids), text, ids, params.logprobs is not None, owner=self)
        answers = [
            Answer(
                prompt_ids=ids,
                max_tokens=min(params.max_tokens, self.engine.max_seq_len - len(ids) + 1),
                top_k=top_k,
                dense=dense,
                sampler=Sampler(params, self.engine.model.vocab_size, seed, index, end_ids=end_ids, bad_words=words),
                detokenizer=Detokenizer(self.tokenizer, *stops) if self.tokenizer else None,
                end_ids=ends,
                on_delta=handle.listener(),
            )
            for index in range(params.n)
        ]
        self._scheduler.check_fits(answers[0])  # the others are like it
        handle.expect(answers, self._worker.cancel)
        return handle

    def submit(self, *handles: RequestHandle) -> None:
        """Start prepared requests, all or none.

        Raises:
            RequestError: the queue is full.
            StateError: the LLM is closed.
        """
        self._worker.submit([answer for handle in handles for answer in handle.answers])

    def usage(self) -> Usage:
        """Requests that wait and run, and the memory that they hold, at this moment."""
        return self._worker.usage()

    # --- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker and give the executor's memory back; unfinished requests end as cancelled.

        Harmless when repeated.
        """
        self._worker.stop()
        self._scheduler.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _run(self, handles: list[RequestHandle], progress: bool = False) -> list[RequestOutput]:
        """Results in order. An interrupt, or any error in here, aborts what is unfinished."""
        outputs: list[RequestOutput | None] = []
        failed: GenerationError | None = None
        try:
            self.submit(*handles)
            for handle in _bar(handles) if progress else handles:
                try:
                    outputs.append(handle.result())
                except GenerationError as e:
                    outputs.append(None)
                    failed = failed or e
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        if failed is not None:
            failed.outputs = outputs
            raise failed
        return [o for o in outputs if o is not None]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this engine has none", todo="pass LLM(…, tokenizer=…) or token ids"
            )
        return self.tokenizer


def _bar(handles: list[RequestHandle]) -> Iterator[RequestHandle]:
    from tqdm import tqdm

    yield from tqdm(handles, desc="requests", unit="request")


def _stream(handle: RequestHandle) -> Iterator[StreamDelta]:
    try:
        yield from handle
    finally:
        handle.abort()
