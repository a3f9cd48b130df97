"""``trtllm-shadowkv generate``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_shadowkv.cli import options as o
from trtllm_shadowkv.errors import GenerationError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trtllm_shadowkv.llm import LLM
    from trtllm_shadowkv.request import AttentionParams, RequestOutput
    from trtllm_shadowkv.sampling_params import SamplingParams


def generate(
    engine_dir: o.EngineDir,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat it for a batch.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file that is one prompt ('-': standard input); repeat it for a batch.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of the files is a prompt of its own.")] = False,
    max_tokens: o.MaxTokens = 128,
    n: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    attention: o.AttentionMode = None,
    budget: o.Budget = None,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives to show for each token (with --json).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with statistics.")] = False,
    threads: o.Threads = None,
    executor: o.ExecutorName = None,
    max_batch_size: o.MaxBatchSize = None,
    max_seq_len: o.MaxSeqLen = None,
    max_stretch: o.MaxStretch = None,
    device_memory: o.DeviceMemory = None,
    host_memory: o.HostMemory = None,
    dense_limit: o.DenseLimit = None,
    window: o.Window = None,
    value_dtype: o.ValueDtype = None,
    landmark_dtype: o.LandmarkDtype = None,
) -> None:
    """Continue one or more prompts. Without --prompt and --prompt-file the prompt is read from standard input."""
    from trtllm_shadowkv.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or None,
        logprobs=logprobs,
    )
    share = o.attention_params(attention, budget)
    prompts = _prompts(prompt or [], prompt_file or [], lines)
    with o.open_llm(
        engine_dir,
        executor=executor,
        threads=threads,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_stretch=max_stretch,
        device_memory=device_memory,
        host_memory=host_memory,
        dense_limit=dense_limit,
        window=window,
        value_dtype=value_dtype,
        landmark_dtype=landmark_dtype,
    ) as llm:
        if len(prompts) == 1 and n == 1 and not as_json:
            for delta in o.shown(llm.generate_async(prompts[0], params, attention=share)):
                typer.echo(delta.text, nl=False)
            typer.echo()
            return
        _answer_all(llm, prompts, params, share, as_json)


def _answer_all(llm: LLM, prompts: list[str], params: SamplingParams, share: AttentionParams, as_json: bool) -> None:
    failed: GenerationError | None = None
    outputs: Sequence[RequestOutput | None]
    try:
        answered = llm.generate(prompts, params, attention=share, progress=sys.stderr.isatty())
        assert isinstance(answered, list)
        outputs = answered
    except GenerationError as e:  # the others' answers are worth as much as before
        failed, outputs = e, e.outputs
    for output in outputs:
        if output is not None:
            _show(output, as_json)
    if failed is not None:
        raise failed


def _show(output: RequestOutput, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(output), ensure_ascii=False))
    else:
        for answer in output.outputs:
            typer.echo(answer.text)


def _prompts(texts: list[str], files: list[Path], lines: bool) -> list[str]:
    if not texts and not files:
        files = [Path("-")]
    for file in files:
        try:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
            text = data.decode("utf-8")
        except OSError as e:
            raise RequestError(f"cannot read {file}: {e.strerror or e}") from e
        except UnicodeDecodeError as e:
            raise RequestError(f"{file} is no UTF-8 at byte {e.start}", "a text file") from e
        texts = [*texts, *(line for line in text.splitlines() if line.strip())] if lines else [*texts, text]
    if not texts:
        raise RequestError("there is no prompt", "at least one line that is not empty")
    return texts
