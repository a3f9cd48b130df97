"""``LLM``: a loaded engine that answers requests, many at a time."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from trtllm_shadowkv.config import RuntimeConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import (
    ConfigError,
    EngineError,
    GenerationError,
    MissingDependencyError,
    RequestError,
    nearest,
    require,
)
from trtllm_shadowkv.machine import memory
from trtllm_shadowkv.request import AttentionParams, RequestHandle, RequestOutput, StreamDelta
from trtllm_shadowkv.sampling_params import SamplingParams
from trtllm_shadowkv.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]
_CPU_STRETCH = 1024
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


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
        for module in ("numpy", "torch", "onnx", "onnxruntime", "onnxruntime_extensions"):
            require(module, "cpu")
        from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
        from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor
        from trtllm_shadowkv.runtime.scheduler import Limits, Scheduler
        from trtllm_shadowkv.runtime.value_pool import ValuePool
        from trtllm_shadowkv.runtime.worker import Worker

        self.engine = EngineDirectory.open(engine_dir)
        self.runtime, self.config = _settings(self.engine, runtime or RuntimeConfig(), settings)
        _check_executor(executor, self.engine)
        self.tokenizer = _tokenizer(self.engine, tokenizer)
        device, host = _memory(self.runtime)
        self.value_pool = ValuePool(host)
        state = CpuState(self.engine.model, self.config, self.value_pool)
        runner = OnnxCpuExecutor(self.engine, state, self.runtime.threads)
        longest = self.engine.build.max_num_tokens
        stretch = self.runtime.max_stretch or min(longest, _CPU_STRETCH)
        limits = Limits(self.engine.build.max_batch_size, stretch, device, host)
        self._scheduler = Scheduler(runner, limits, state.footprint)
        self._worker = Worker(self._scheduler, self.runtime.max_queue)
        self._close = weakref.finalize(self, self._worker.stop)
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
        prompts: Sequence[Prompt] | Sequence[int],
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
            prompts: a text or a list of token ids (one result), or a list of those (a list of results).
            sampling_params: one for all, or one for each prompt; None: greedy, 32 tokens.
            attention: one for all, or one for each prompt.
            progress: show a progress bar.

        Raises:
            RequestError: a request that is refused; none of them was started then.
            GenerationError: requests that failed while they ran; the others' results are in its ``outputs``.
        """
        single = isinstance(prompts, str) or _is_ids(prompts)
        batch: list[Any] = [prompts] if single else list(prompts)
        params = _each(sampling_params or SamplingParams(), len(batch), "sampling_params", SamplingParams)
        attentions = _each(attention or AttentionParams(), len(batch), "attention", AttentionParams)
        handles = [self._prepare(*request) for request in zip(batch, params, attentions, strict=True)]
        self._worker.submit([a for h in handles for a in h.answers])
        outputs = _wait(handles, progress)
        return outputs[0] if single else outputs

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        attention: AttentionParams | None = None,
    ) -> RequestHandle:
        """Start one request and return at once.

        Raises:
            RequestError: the request is refused.
        """
        handle = self._prepare(prompt, sampling_params or SamplingParams(), attention or AttentionParams())
        self._worker.submit(handle.answers)
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
            GenerationError: the request failed while it ran.
        """
        return self.generate_async(self.chat_ids(messages), sampling_params, attention=attention).result()

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for :meth:`generate`."""
        return self._need_tokenizer("a chat").chat(messages)

    # --- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker; unfinished requests end as cancelled. Harmless when repeated."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _prepare(self, prompt: Any, params: SamplingParams, attention: AttentionParams) -> RequestHandle:
        """Check a request and make its answers, without starting anything."""
        from trtllm_shadowkv.runtime.detokenize import Detokenizer
        from trtllm_shadowkv.runtime.sampling import Sampler, bad_word_ids
        from trtllm_shadowkv.runtime.sequence import Answer

        text, ids = self._prompt_ids(prompt)
        if params.stop_strings or params.bad_strings:
            self._need_tokenizer("a stop or bad string")
        top_k, dense = self._attention(attention)
        words = bad_word_ids(params.bad_strings, lambda w: self.tokenizer.encode(w, special=False)) if self.tokenizer else []
        end_ids = frozenset(() if params.ignore_eos else self.engine.model.eos_token_ids)
        ends = end_ids | frozenset(params.stop_token_ids or ())
        seed = secrets.randbits(63) if params.seed is None else params.seed
        handle = RequestHandle(next(self._ids), text, ids, self._worker.cancel, params.logprobs is not None)
        answers = []
        for index in range(params.n):
            stops = (params.stop_strings, params.include_stop_str_in_output, ids)
            answer = Answer(
                prompt_ids=ids,
                max_tokens=min(params.max_tokens, self.engine.max_seq_len - len(ids) + 1),
                top_k=top_k,
                dense=dense,
                sampler=Sampler(
                    params, self.engine.model.vocab_size, seed, index, end_ids=end_ids, bad_words=words
                ),
                detokenizer=Detokenizer(self.tokenizer, *stops) if self.tokenizer else None,
                end_ids=ends,
                on_delta=handle.on_delta,
            )
            self._scheduler.check_fits(answer)
            answers.append(answer)
        handle.expect(answers)
        return handle

    def _prompt_ids(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            text, ids = prompt, self._need_tokenizer("a text prompt").encode(prompt)
        elif _is_ids(prompt):
            text, ids = None, [int(i) for i in prompt]
        else:
            raise RequestError(f"a prompt of type {type(prompt).__name__}", "a text or a list of token ids")
        vocabulary = self.engine.model.vocab_size
        if not ids:
            raise RequestError("the prompt is empty", "one token or more")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = next(i for i in ids if not 0 <= i < vocabulary)
            raise RequestError(f"the prompt holds token id {wrong}", f"0 to {vocabulary - 1}")
        if len(ids) > self.engine.max_seq_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens", f"at most max_seq_len = {self.engine.max_seq_len}", "shorten it"
            )
        return text, ids

    def _attention(self, attention: AttentionParams) -> tuple[int, bool]:
        """Chunks to select and whether to be dense, within what was built."""
        built = self.config
        if built.dense and (attention.mode == "shadowkv" or attention.top_k is not None):
            raise RequestError("ShadowKV attention was asked for", "dense attention: this engine was built dense")
        if attention.mode == "dense" and attention.top_k is not None:
            raise RequestError("dense attention with a top_k", "one of them")
        top_k = attention.top_k or built.top_k
        if top_k > built.top_k:
            raise RequestError(f"attention top_k is {top_k}", f"at most {built.top_k}, as the engine was built")
        return top_k, built.dense or attention.mode == "dense"

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this engine has none", todo="pass LLM(…, tokenizer=…) or token ids"
            )
        return self.tokenizer


def _settings(
    engine: EngineDirectory, runtime: RuntimeConfig, settings: dict[str, Any]
) -> tuple[RuntimeConfig, ShadowKVConfig]:
    """Merge keyword settings into the runtime's, and both into what the engine was built with."""
    known = [*RuntimeConfig.names(), *ShadowKVConfig.names()]
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}", f"one of {', '.join(known)}")
    overrides = {k: v for k, v in settings.items() if k in ShadowKVConfig.names()}
    runtime = replace(runtime, **{k: v for k, v in settings.items() if k not in overrides})
    longest = engine.build.max_num_tokens
    if runtime.max_stretch is not None and runtime.max_stretch > longest:
        raise ConfigError(f"max_stretch is {runtime.max_stretch}", f"at most the engine's max_num_tokens, {longest}")
    return runtime, engine.build.shadowkv.overridden({**runtime.shadowkv, **overrides})


def _check_executor(executor: str | None, engine: EngineDirectory) -> None:
    """No quiet fallback: an engine that cannot be used is an error, not a reason to take the CPU."""
    if executor not in (None, "onnx_cpu", "tensorrt"):
        raise ConfigError(f"executor is {executor!r}", "'onnx_cpu' or 'tensorrt'")
    if executor == "tensorrt" or (executor is None and engine.has_engine):
        raise MissingDependencyError(
            "this version has no TensorRT executor", todo="use LLM(…, executor='onnx_cpu') to run the ONNX graph"
        )


def _tokenizer(engine: EngineDirectory, given: Any) -> Tokenizer | None:
    if given is not None:
        return Tokenizer.load(given)
    return Tokenizer.load(engine.path) if any(f in engine.files for f in _TOKENIZER_FILES) else None


def _memory(runtime: RuntimeConfig) -> tuple[int, int]:
    """Bytes for device and host memory; on a CPU both are the machine's."""
    free = memory().pinnable
    if free is None and (runtime.device_memory is None or runtime.host_memory is None):
        raise EngineError("this system does not say how much memory is free", todo="set device_memory and host_memory")
    return runtime.device_memory or (free or 0) // 2, runtime.host_memory or (free or 0) // 4


def _is_ids(prompt: Any) -> bool:
    """A sequence (or array) of whole numbers; an empty one counts."""
    if isinstance(prompt, str | bytes) or not hasattr(prompt, "__len__") or not hasattr(prompt, "__getitem__"):
        return False
    try:
        return all(isinstance(i, int) and not isinstance(i, bool) for i in getattr(prompt, "tolist", lambda: prompt)())
    except TypeError:
        return False


def _each(value: Any, count: int, name: str, kind: type) -> list[Any]:
    values = [value] * count if isinstance(value, kind) else value
    if not isinstance(values, list | tuple) or any(not isinstance(v, kind) for v in values):
        raise RequestError(f"{name} is {type(value).__name__}", f"{kind.__name__}, or a list of them")
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts", "one for all, or one for each")
    return list(values)


def _wait(handles: list[RequestHandle], progress: bool) -> list[RequestOutput]:
    """Results in order. An interrupt, or any error in here, aborts what is unfinished."""
    outputs: list[RequestOutput | None] = []
    failed: GenerationError | None = None
    try:
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


def _bar(handles: list[RequestHandle]) -> Iterator[RequestHandle]:
    from tqdm import tqdm

    yield from tqdm(handles, desc="requests", unit="request")


def _stream(handle: RequestHandle) -> Iterator[StreamDelta]:
    try:
        yield from handle
    finally:
        handle.abort()
