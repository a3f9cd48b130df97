"""``trtllm-shadowkv convert-checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_shadowkv.cli.build import progress_bar
from trtllm_shadowkv.errors import require


def convert_checkpoint(
    model_dir: Annotated[Path, typer.Option(help="Hugging Face directory: config.json and safetensors.")],
    output_dir: Annotated[Path, typer.Option(help="New or empty directory, or a checkpoint to replace.")],
    tp_size: Annotated[int, typer.Option(help="Ranks (GPUs) to split the weights over.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16; auto: the model's, and float16 for a float32 model.")
    ] = "auto",
) -> None:
    """Write a model as a checkpoint of TensorRT-LLM's format, for trtllm-build or build --checkpoint-dir."""
    require("numpy", "cpu")
    from trtllm_shadowkv.trtllm_checkpoint import write_checkpoint

    with progress_bar("weights", unit="B") as progress:
        path = write_checkpoint(model_dir, output_dir, tp_size=tp_size, dtype=dtype, progress=progress)
    ranks = "rank0.safetensors" if tp_size == 1 else f"rank0.safetensors to rank{tp_size - 1}.safetensors"
    size = sum(file.stat().st_size for file in path.glob("rank*.safetensors"))
    typer.echo(f"{path}: config.json and {ranks}, {size:,} bytes")
