"""``ModelRunner``: an engine behind the calls of TensorRT-LLM's ModelRunner, for scripts that are written for those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from trtllm_shadowkv.errors import ConfigError, RequestError, StateError
from trtllm_shadowkv.llm import LLM
from trtllm_shadowkv.request import AttentionParams, RequestHandle
from trtllm_shadowkv.request_inputs import prompt_batch
from trtllm_shadowkv.runtime.detokenize import Detokenizer
from trtllm_shadowkv.runtime.executors.opening import chosen
from trtllm_shadowkv.runtime.model_runner_arguments import (
    OTHERS,
    REFUSED_BY_FROM_DIR,
    REFUSED_BY_GENERATE,
    SAMPLING,
    fields_of,
    refuse,
    sampling_params,
    shown,
    whole,
)
from trtllm_shadowkv.runtime.sampling import Sampler
from trtllm_shadowkv.runtime.sequence import Answer
from trtllm_shadowkv.sampling_params import SamplingParams

Output = Tensor | dict[str, Tensor]
"""What ``generate`` returns, or yields: output_ids, or a dict that holds them."""


class ModelRunner:
    """An engine in memory, token ids in and out: :class:`~trtllm_shadowkv.llm.LLM` in another shape.

    Made by :meth:`from_dir`; close it, or use it as a context manager.

    Attributes:
        llm: what runs the requests.
        device: where outputs are: the GPU that runs the engine, or the CPU with the CPU executor.
        max_input_len, max_output_len: most tokens of a prompt, and of an answer.
    """

    max_beam_width = 1
    remove_input_padding = True
    gather_context_logits = False
    gather_generation_logits = False

    def __init__(self, llm: LLM, device: torch.device, max_input_len: int, max_output_len: int) -> None:
        self.llm, self.device = llm, device
        self.max_input_len, self.max_output_len = max_input_len, max_output_len

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        *,
        max_batch_size: int | None = None,
        max_input_len: int | None = None,
        max_output_len: int | None = None,
        **settings: Any,
    ) -> Self:
        """Load an engine.

        Args:
            engine_dir: as :class:`LLM` takes it.
            max_batch_size: rows at once, at most what the engine was built for. Prompts beyond it wait their turn.
            max_input_len, max_output_len: most tokens of a prompt, and of an answer; where both are given, their sum
                is max_seq_len, for which memory is laid out.
            settings: of :class:`LLM` (device_memory, host_memory, dense_limit, window, value_dtype, executor, …).
                Other arguments of TensorRT-LLM's from_dir (rank, lora_dir, max_beam_width, …) may be there with
                values that ask for nothing.

        Raises:
            ConfigError: an argument that this engine cannot honour, an unknown one or a bad value.
            EngineError, MissingDependencyError: as :class:`LLM` raises them.
        """
        for name in [n for n in settings if n in REFUSED_BY_FROM_DIR]:
            refuse("from_dir", name, settings.pop(name), REFUSED_BY_FROM_DIR, ConfigError)
        for name, value in (("max_input_len", max_input_len), ("max_output_len", max_output_len)):
            if value is not None:
                whole(name, value, 1, 2**31 - 1, ConfigError)
        if max_batch_size is not None:
            settings["max_batch_size"] = max_batch_size
        if max_input_len is not None and max_output_len is not None:
            if settings.get("max_seq_len") is not None:
                raise ConfigError("max_seq_len beside max_input_len and max_output_len", "it, or both of them")
            settings["max_seq_len"] = max_input_len + max_output_len
        llm = LLM(engine_dir, **settings)
        on_gpu = chosen(settings.get("executor"), llm.engine) == "tensorrt"
        most = llm.engine.max_seq_len
        return cls(
            llm,
            torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
            min(max_input_len or most, most),
            min(max_output_len or most, most),
        )

    # --- requests -------------------------------------------------------------------------------------------------

    def generate(
        self,
        batch_input_ids: Sequence[Tensor] | Tensor | Sequence[Sequence[int]],
        *,
        sampling_config: Any = None,
        max_new_tokens: int | None = None,
        end_id: int | None = None,
        pad_id: int | None = None,
        bad_words_list: Any = None,
        stop_words_list: Any = None,
        return_dict: bool | None = None,
        output_sequence_lengths: bool | None = None,
        output_log_probs: bool | None = None,
        streaming: bool = False,
        attention: AttentionParams | None = None,
        **sampling: Any,
    ) -> Output | Iterator[Output]:
        """Answer a batch of prompts.

        Args:
            batch_input_ids: prompts: 1-D integer tensors (lists do too) of any lengths; as many as you like.
            sampling_config: a mapping or dataclass (such as TensorRT-LLM's SamplingConfig) of arguments below, which
                count where they are not given here.
            max_new_tokens: tokens of an answer at most; None: 1. With the prompt, no more than max_seq_len.
            end_id: the token that ends an answer, instead of the model's own end tokens; -1: none. None: the model's
                own. It is not part of the answer: neither sequence_lengths nor log_probs count it.
            pad_id: fills what follows an answer; None: end_id, or the model's first end token.
            bad_words_list, stop_words_list: for each prompt a list of words (or None), each a list of token ids. A
                bad word is never completed. A stop word ends the answer and is part of it. Both may begin in the
                prompt, and neither is subject to min_tokens.
            return_dict, output_sequence_lengths, output_log_probs: see below; None: False.
            streaming: return an iterator instead. Each time answers have grown it yields all there is so far; closing
                it early aborts the requests.
            attention: of all prompts, see :class:`AttentionParams`.
            sampling: num_return_sequences (n below), temperature, top_k, top_p, min_p, repetition_penalty,
                presence_penalty, frequency_penalty, min_tokens, random_seed: as in :class:`SamplingParams`, where some
                have other names, but a top_p of 0 beside a top_k over 0 cuts nothing. Other arguments of TensorRT-LLM's
                generate may be there with values that ask for nothing.

        Returns:
            output_ids: [batch, n, longest prompt + max_new_tokens] int32 on :attr:`device`; prompt, answer, padding.
            With return_dict a dict of ``output_ids`` and, where asked for,
            ``sequence_lengths``: [batch, n] int32, tokens of prompt and answer, and
            ``log_probs``: [batch, n, max_new_tokens] float32, natural logs of the probabilities of an answer's tokens
            under the model's raw logits, then zeros.

        Raises:
            RequestError: a request that is refused, also for an argument that this engine cannot honour; none of the
                batch was started then.
            StateError: the runner is closed, or was closed meanwhile.
            GenerationError: a request failed while it ran; the others are aborted.
        """
        here = (max_new_tokens, end_id, pad_id, bad_words_list, stop_words_list, return_dict, output_sequence_lengths)
        given = {**dict(zip(OTHERS, (*here, output_log_probs), strict=True)), **sampling}
        asked = fields_of(sampling_config) | {name: value for name, value in given.items() if value is not None}
        for name in asked:
            if name not in OTHERS and name not in SAMPLING:
                refuse("generate", name, asked[name], REFUSED_BY_GENERATE, RequestError)
        batch = self._prompts(batch_input_ids)
        new = whole("max_new_tokens", asked.get("max_new_tokens", 1), 1, self.max_output_len)
        end, pad = self._end_and_pad(asked.get("end_id"), asked.get("pad_id"))
        params = sampling_params(asked, new, end)
        bad, stop = (self._words(name, asked.get(name), len(batch)) for name in ("bad_words_list", "stop_words_list"))
        handles: list[RequestHandle] = []
        for i, prompt in enumerate(batch):
            try:
                handles.append(self._prepared(prompt, params, attention, bad[i], stop[i]))
            except RequestError as e:
                raise type(e)(f"prompt {i} of {len(batch)}: {e}") from e
        rows = _Rows(handles, new, pad)
        names = ["output_ids"]
        names += ["sequence_lengths"] if asked.get("output_sequence_lengths") else []
        names += ["log_probs"] if asked.get("output_log_probs") else []

        def output() -> Output:
            rows.update()
            found = {name: getattr(rows, name).to(self.device, copy=True) for name in names}
            return found if asked.get("return_dict") else found["output_ids"]

        if streaming:
            arrived: SimpleQueue[bool] = SimpleQueue()
            for answer in rows.answers:
                answer.on_delta = _announced(answer.on_delta, arrived)
            self.llm.submit(*handles)
            return _stream(handles, arrived, output)
        self.llm.submit(*handles)
        _wait(handles)
        return output()

    def _prompts(self, batch_input_ids: Any) -> list[Any]:
        """Prompts of a batch, none of which is a text."""
        batch, single = prompt_batch(batch_input_ids)
        if single or any(isinstance(prompt, str) for prompt in batch):
            what = "a text" if any(isinstance(p, str) for p in batch) else "one prompt, or none"
            raise RequestError(f"batch_input_ids is {what}", "a list of 1-D integer tensors, one a prompt")
        if not batch:
            raise RequestError("batch_input_ids is empty", "a list of 1-D integer tensors, one a prompt")
        return batch

    def _end_and_pad(self, end: Any, pad: Any) -> tuple[int | None, int]:
        if end is not None:
            end = whole("end_id", end, -1, self.vocab_size - 1)
        if pad is not None:
            return end, whole("pad_id", pad, -(2**31), 2**31 - 1)
        own = self.llm.engine.model.eos_token_ids
        if end is None and not own:
            raise RequestError("neither end_id nor pad_id, and the model names no end token", todo="pass a pad_id")
        return end, own[0] if end is None else end

    def _words(self, name: str, value: Any, count: int) -> list[list[tuple[int, ...]]]:
        """Words for each prompt, as tuples of token ids."""
        expected = "for each prompt a list of words (or None), each a list of token ids"
        if value is None:
            return [[]] * count
        if not isinstance(value, list | tuple):
            raise RequestError(f"{name} is {type(value).__name__}", expected)
        if len(value) != count:
            raise RequestError(f"{name} has {len(value)} entries for {count} prompts", expected)
        found: list[list[tuple[int, ...]]] = []
        for i, words in enumerate(value):
            words = [] if words is None else words
            if not isinstance(words, list | tuple) or not all(isinstance(w, list | tuple) and w for w in words):
                raise RequestError(f"{name}[{i}] is {shown(words)}", "words, each a list of one token id or more")
            ids = f"a token id in {name}[{i}]"
            found.append([tuple(whole(ids, t, 0, self.vocab_size - 1) for t in word) for word in words])
        return found

    def _prepared(
        self,
        prompt: Any,
        params: SamplingParams,
        attention: AttentionParams | None,
        bad: list[tuple[int, ...]],
        stop: list[tuple[int, ...]],
    ) -> RequestHandle:
        """A request with words of tokens, which :class:`SamplingParams` cannot say, and without text."""
        handle = self.llm.prepare(prompt, params, attention)
        length, most = len(handle.prompt_ids), self.llm.engine.max_seq_len
        if length > self.max_input_len:
            raise RequestError(f"it has {length} tokens", f"at most max_input_len = {self.max_input_len}")
        if length + params.max_tokens > most:
            raise RequestError(
                f"its {length} tokens and max_new_tokens = {params.max_tokens} are {length + params.max_tokens}",
                f"at most max_seq_len = {most}",
            )
        assert params.seed is not None
        for index, answer in enumerate(handle.answers):
            answer.detokenizer = _StopWords(stop, handle.prompt_ids) if stop else None
            if bad:
                answer.sampler = Sampler(
                    params, self.vocab_size, params.seed, index, end_ids=answer.end_ids, bad_words=bad
                )
        return handle

    # --- what the engine is ---------------------------------------------------------------------------------------

    @property
    def max_batch_size(self) -> int:
        return self.llm.engine.build.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.llm.engine.max_seq_len

    @property
    def max_sequence_length(self) -> int:
        return self.max_seq_len

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.llm.engine.model.hidden_size

    @property
    def num_heads(self) -> int:
        return self.llm.engine.model.num_heads

    @property
    def num_layers(self) -> int:
        return self.llm.engine.model.num_layers

    @property
    def dtype(self) -> torch.dtype:
        """Type the engine was built with."""
        dtype: torch.dtype = getattr(torch, self.llm.engine.build.dtype)
        return dtype

    # --- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the engine's memory back; harmless when repeated."""
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Rows:
    """Tensors on the CPU that grow with the answers of a batch.

    Attributes:
        answers: of all prompts, those of one prompt side by side.
        output_ids, sequence_lengths, log_probs: as :meth:`ModelRunner.generate` describes them.
    """

    def __init__(self, handles: list[RequestHandle], max_new_tokens: int, pad_id: int) -> None:
        self.answers = [answer for handle in handles for answer in handle.answers]
        shape = (len(handles), len(handles[0].answers))
        longest = max(len(handle.prompt_ids) for handle in handles)
        self.output_ids = torch.full((*shape, longest + max_new_tokens), pad_id, dtype=torch.int32)
        self.log_probs = torch.zeros((*shape, max_new_tokens), dtype=torch.float32)
        for rows, handle in zip(self.output_ids, handles, strict=True):
            rows[:, : len(handle.prompt_ids)] = torch.tensor(handle.prompt_ids, dtype=torch.int32)
        self.sequence_lengths = torch.tensor([len(a.prompt_ids) for a in self.answers], dtype=torch.int32).view(shape)
        self._taken = [0] * len(self.answers)  # generated tokens that are in the tensors

    def update(self) -> None:
        """Take the tokens that have come since, an end token apart: that is always the last."""
        ids, log_probs, lengths = self.output_ids.flatten(0, 1), self.log_probs.flatten(0, 1), self.sequence_lengths
        for i, answer in enumerate(self.answers):
            new = answer.sampled[self._taken[i] :]  # a copy: the worker's thread may be adding to it
            if new and new[-1].token_id in answer.end_ids:
                new.pop()
            if not new:
                continue
            start, end = self._taken[i], self._taken[i] + len(new)
            prompt = len(answer.prompt_ids)
            ids[i, prompt + start : prompt + end] = torch.tensor([s.token_id for s in new], dtype=torch.int32)
            if new[0].logprob is not None:
                log_probs[i, start:end] = torch.tensor([s.logprob for s in new])
            lengths.view(-1)[i] = prompt + end
            self._taken[i] = end


class _StopWords(Detokenizer):
    """In the place of an answer's text: ends it when its tokens, and the prompt's before them, end with a word."""

    def __init__(self, words: list[tuple[int, ...]], prompt_ids: Sequence[int]) -> None:
        self._words = words
        self._longest = max(map(len, words))
        self._tail = tuple(prompt_ids[-self._longest :])
        self._met: str | None = None

    @property
    def text(self) -> str:
        return ""

    @property
    def stopped(self) -> str | None:
        return self._met

    def push(self, token_id: int) -> str:
        self._tail = (*self._tail, token_id)[-self._longest :]
        self._met = next((str(w) for w in self._words if self._tail[-len(w) :] == w), None)
        return ""

    def finish(self) -> str:
        return ""


def _announced(
    forward: Callable[[Answer, str, list[int]], None], arrived: SimpleQueue[bool]
) -> Callable[[Answer, str, list[int]], None]:
    """A listener that passes everything on, and says that there is something, and whether it is an answer's last."""

    def listen(answer: Answer, text: str, tokens: list[int]) -> None:
        forward(answer, text, tokens)
        arrived.put(answer.times.finished is not None)

    return listen


def _stream(handles: list[RequestHandle], arrived: SimpleQueue[bool], output: Callable[[], Output]) -> Iterator[Output]:
    unfinished = sum(len(handle.answers) for handle in handles)
    try:
        while unfinished:
            unfinished -= arrived.get()
            while not arrived.empty():
                unfinished -= arrived.get()
            yield output()
        _wait(handles)
    finally:
        for handle in handles:
            handle.abort()


def _wait(handles: list[RequestHandle]) -> None:
    """Until all are finished; whatever ends the wait early aborts those that are not."""
    try:
        for handle in handles:
            if any(answer.finish_reason == "cancelled" for answer in handle.result().outputs):
                raise StateError("the runner was closed while it generated", todo="open another one")
    finally:
        for handle in handles:
            handle.abort()
