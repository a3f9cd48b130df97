"""What ``generate`` and ``chat`` have in common."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_shadowkv.errors import RequestError
from trtllm_shadowkv.hardware import check_positive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtllm_shadowkv.llm import LLM
    from trtllm_shadowkv.request import AttentionParams, RequestHandle, StreamDelta

_SAMPLING, _ENGINE = "Sampling", "Engine"

EngineDir = Annotated[Path, typer.Argument(help="Engine directory written by build.")]
MaxTokens = Annotated[int, typer.Option(rich_help_panel=_SAMPLING, help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING, help="Without any of these: greedy.")]
TopK = Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING, help="Most probable tokens to choose from.")]
TopP = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING, help="Probability mass to choose from.")]
Seed = Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING, help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(rich_help_panel=_SAMPLING, help="Text that ends the answer.")]
AttentionMode = Annotated[str | None, typer.Option(help="dense, or shadowkv as built.")]
Budget = Annotated[int | None, typer.Option(help="Chunks a KV head selects; else as built.")]
ExecutorName = Annotated[
    str | None, typer.Option("--executor", rich_help_panel=_ENGINE, help="onnx_cpu or tensorrt; else as the engine is.")
]
Threads = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Threads; else one a core.")]
MaxBatchSize = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Rows at a time; else as built.")]
MaxSeqLen = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Tokens of a row; else as built.")]
DeviceMemory = Annotated[
    float | None,
    typer.Option(rich_help_panel=_ENGINE, help="GB (1e9 bytes) for keys and sealed state; else what is free."),
]
HostMemory = Annotated[
    float | None,
    typer.Option(rich_help_panel=_ENGINE, help="GB of host memory for values; else a share of what is free."),
]
ValueDtype = Annotated[
    str | None, typer.Option(rich_help_panel=_ENGINE, help="Values of sealed chunks: auto, or fp8 on a GPU.")
]
LandmarkDtype = Annotated[str | None, typer.Option(rich_help_panel=_ENGINE, help="Landmarks: auto, or fp8 on a GPU.")]
MaxStretch = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Prompt tokens in one pass.")]
DenseLimit = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Tokens up to which a row is dense.")]
Window = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Newest tokens kept exactly.")]


def open_llm(
    engine_dir: Path, *, device_memory: float | None = None, host_memory: float | None = None, **settings: Any
) -> LLM:
    """Load an engine; settings that are None keep their default. Memory is in GB."""
    from trtllm_shadowkv.llm import LLM

    if sys.stderr.isatty():  # which executor runs, and what it has room for
        logging.basicConfig(format="%(message)s")
        logging.getLogger("trtllm_shadowkv").setLevel(logging.INFO)
    settings |= memory_in_bytes(device_memory, host_memory)
    return LLM(engine_dir, **{k: v for k, v in settings.items() if v is not None})


def memory_in_bytes(device_memory: float | None, host_memory: float | None) -> dict[str, int]:
    """The settings of these names, from GB; without those that are None."""
    found = {}
    for name, gigabytes in (("device_memory", device_memory), ("host_memory", host_memory)):
        if gigabytes is not None:
            check_positive(name, gigabytes)
            found[name] = int(gigabytes * 1e9)
    return found


def attention_params(mode: str | None, budget: int | None) -> AttentionParams:
    from trtllm_shadowkv.request import AttentionParams

    if mode not in (None, "dense", "shadowkv"):
        raise RequestError(f"--attention is {mode!r}", "dense or shadowkv")
    return AttentionParams(mode=mode, top_k=budget)  # type: ignore[arg-type]


def shown(handle: RequestHandle) -> Iterator[StreamDelta]:
    """Deltas of a request, with a bar on a terminal while a long prompt is read; stopping early aborts it."""
    try:
        with _reading(handle):
            first = next(iter(handle))
        yield first
        yield from handle
    finally:
        handle.abort()


@contextmanager
def _reading(handle: RequestHandle) -> Iterator[None]:
    import threading

    total = len(handle.prompt_ids)
    if total < 2000 or not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm

    done = threading.Event()

    def watch() -> None:
        with tqdm(desc="prompt", total=total, unit="token", leave=False) as bar:
            while not done.wait(0.2):
                bar.update(handle.answers[0].prefilled - bar.n)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
