"""``trtllm-shadowkv chat``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trtllm_shadowkv.cli import options as o
from trtllm_shadowkv.errors import RequestError


def chat(
    engine_dir: o.EngineDir,
    system: Annotated[str | None, typer.Option(help="Instructions before the conversation.")] = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    attention: o.AttentionMode = None,
    budget: o.Budget = None,
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
    """Talk with the model. A line is a turn; Ctrl-C ends an answer, Ctrl-D or an empty line the conversation."""
    from trtllm_shadowkv.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop or None
    )
    share = o.attention_params(attention, budget)
    messages = [{"role": "system", "content": system}] if system else []
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
        while line := _line():
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                for delta in o.shown(llm.generate_async(llm.chat_ids(messages), params, attention=share)):
                    typer.echo(delta.text, nl=False)
                    answer += delta.text
            except KeyboardInterrupt:
                typer.echo(" …", nl=False)
            typer.echo()
            messages.append({"role": "assistant", "content": answer})


def _line() -> str:
    """The user's next turn; empty at the end."""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False)
    try:
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""
    except UnicodeDecodeError as e:
        raise RequestError(f"the standard input is no UTF-8: {e}", "text") from e
