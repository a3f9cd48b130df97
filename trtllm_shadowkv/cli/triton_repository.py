"""``trtllm-shadowkv triton-repository``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from trtllm_shadowkv.cli import options as o


def triton_repository(
    engine_dir: Annotated[Path, typer.Option(help="Engine directory that the model serves.")],
    output_dir: Annotated[Path, typer.Option(help="Model repository, new or with other models in it.")],
    model_name: Annotated[str, typer.Option(help="Folder of the model, and its name in requests.")] = "shadowkv",
    venv: Annotated[
        Path | None, typer.Option(help="Environment for the server's part of the model (NumPy older than 2).")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that this package is installed for; else the one that runs.")
    ] = None,
    executor: o.ExecutorName = None,
    threads: o.Threads = None,
    max_batch_size: o.MaxBatchSize = None,
    max_seq_len: o.MaxSeqLen = None,
    max_stretch: o.MaxStretch = None,
    device_memory: o.DeviceMemory = None,
    host_memory: o.HostMemory = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait; one more is refused.")] = None,
    dense_limit: o.DenseLimit = None,
    window: o.Window = None,
    value_dtype: o.ValueDtype = None,
    landmark_dtype: o.LandmarkDtype = None,
) -> None:
    """Write a model repository for Triton Inference Server, ready to start. See docs/triton.md."""
    from trtllm_shadowkv.triton.repository import write_repository

    settings = {
        "executor": executor,
        "threads": threads,
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_stretch": max_stretch,
        "max_queue": max_queue,
        "dense_limit": dense_limit,
        "window": window,
        "value_dtype": value_dtype,
        "landmark_dtype": landmark_dtype,
        **o.memory_in_bytes(device_memory, host_memory),
    }
    model = write_repository(
        engine_dir,
        output_dir,
        model_name=model_name,
        python=python,
        venv=venv,
        settings={name: value for name, value in settings.items() if value is not None},
    )
    typer.echo(f"{model}: config.pbtxt, 1/model.py, 1/model.yaml")
    options = (f"--model-repository={output_dir}", "--model-control-mode=explicit", f"--load-model={model_name}")
    typer.echo(shlex.join(["tritonserver", *options]))
