"""``trtllm-shadowkv build`` and ``verify``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_shadowkv.config import load_build_config
from trtllm_shadowkv.errors import require

if TYPE_CHECKING:
    from trtllm_shadowkv.build.builder import Progress
    from trtllm_shadowkv.engine_directory import EngineDirectory


def build(
    model_dir: Annotated[Path | None, typer.Option(help="Hugging Face directory: config.json and safetensors.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="New or empty directory, or an engine to replace.")] = None,
    refresh: Annotated[
        Path | None, typer.Option(help="Instead: make all but the weights of this engine directory anew.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), float16 or bfloat16.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of build settings; options win over it.")] = None,
    attention: Annotated[str | None, typer.Option(help="shadowkv (default) or dense.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences at a time; else 32.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence; else the model's longest.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt in one pass; else 8192.")] = None,
    engine_only: Annotated[
        bool, typer.Option("--engine-only", help="Keep the TensorRT engine without the ONNX file.")
    ] = False,
) -> None:
    """Compile a Llama-type model into an engine directory, whole or not at all."""
    require("onnx", "cpu")
    require("numpy", "cpu")
    from trtllm_shadowkv.build.builder import build_engine, refresh_engine

    settings: dict[str, Any] = {
        "dtype": dtype,
        "attention": attention,
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
    }
    if refresh is not None:
        others = {**settings, "model_dir": model_dir, "output_dir": output_dir, "config": config}
        given = [name for name, value in others.items() if value is not None] + ["engine_only"] * engine_only
        if given:
            raise typer.BadParameter(f"--refresh ENGINE stands alone, without {', '.join(given)}")
        _report(refresh_engine(refresh))
        return
    if model_dir is None or output_dir is None:
        raise typer.BadParameter("build needs --model-dir and --output-dir, or --refresh ENGINE")
    wanted = load_build_config(config, **settings)
    with _bar("weights") as progress:
        engine = build_engine(model_dir, output_dir, wanted, engine_only=engine_only, progress=progress)
    _report(engine)


def verify(engine_dir: Annotated[Path, typer.Argument(help="Engine directory.")]) -> None:
    """Compare every byte of an engine directory with its manifest, and check its graph."""
    from trtllm_shadowkv.build.builder import verify_engine

    engine = verify_engine(engine_dir)
    typer.echo(f"{engine.path}: {len(engine.files)} files as their manifest says, graph accepted")


def _report(engine: EngineDirectory) -> None:
    kv, b = engine.build.shadowkv, engine.build
    limits = f"up to {b.max_batch_size} x {engine.max_seq_len} tokens"
    typer.echo(f"{engine.path}: {engine.model.architecture}, {b.dtype}, {limits}")
    if kv.dense:
        typer.echo("attention: dense")
    else:
        typer.echo(
            f"attention: shadowkv, {kv.top_k} chunks of {kv.chunk_size} tokens, rank {kv.rank}, {kv.outliers} outlier "
            f"chunks, window {kv.window}, dense up to {kv.dense_limit} tokens"
        )
    if not engine.has_engine:
        typer.echo("no TensorRT engine inside: it runs on the CPU executor")


@contextmanager
def _bar(what: str) -> Iterator[Progress | None]:
    """A progress bar in bytes on a terminal, where tqdm is installed."""
    import sys
    from importlib.util import find_spec

    if not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
