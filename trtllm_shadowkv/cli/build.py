"""``trtllm-shadowkv build`` and ``verify``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from trtllm_shadowkv import names
from trtllm_shadowkv.config import load_build_config
from trtllm_shadowkv.errors import require

if TYPE_CHECKING:
    from trtllm_shadowkv.build.builder import Progress
    from trtllm_shadowkv.config import Backend
    from trtllm_shadowkv.engine_directory import EngineDirectory


def build(
    model_dir: Annotated[Path | None, typer.Option(help="Hugging Face directory: config.json and safetensors.")] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Instead: TensorRT-LLM checkpoint, of any tp_size, with tokenizer files beside it."),
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="New or empty directory, or an engine to replace.")] = None,
    refresh: Annotated[
        Path | None, typer.Option(help="Instead: make all but the weights of this engine directory anew.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="onnx (default: for the CPU), tensorrt or tensorrt-rtx (compile for the GPU as well)."),
    ] = None,
    compute_capability: Annotated[
        list[int] | None,
        typer.Option(help="GPU that tensorrt-rtx compiles for: 80, 120; may be repeated. Else this machine's."),
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
    verbose: Annotated[bool, typer.Option("--verbose", help="Show TensorRT's log.")] = False,
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
        others = {
            **settings,
            "model_dir": model_dir,
            "checkpoint_dir": checkpoint_dir,
            "output_dir": output_dir,
            "config": config,
        }
        given = [name for name, value in others.items() if value is not None] + ["engine_only"] * engine_only
        if given:
            raise typer.BadParameter(f"--refresh ENGINE keeps its settings: it stands without {', '.join(given)}")
        with progress_bar("TensorRT", hidden=verbose) as compiling:
            engine = refresh_engine(
                refresh,
                backend=cast("Backend | None", backend),
                compute_capabilities=compute_capability or None,
                compiling=compiling,
                verbose=verbose,
            )
        _report(engine)
        return
    if model_dir is not None and checkpoint_dir is not None:
        raise typer.BadParameter("--model-dir and --checkpoint-dir exclude each other")
    source = model_dir or checkpoint_dir
    if source is None or output_dir is None:
        raise typer.BadParameter(
            "build needs --model-dir or --checkpoint-dir, and --output-dir; or else --refresh ENGINE"
        )
    if compute_capability:
        settings["compute_capabilities"] = tuple(compute_capability)
    wanted = load_build_config(config, backend=backend, **settings)
    with progress_bar("weights", unit="B") as progress, progress_bar("TensorRT", hidden=verbose) as compiling:
        engine = build_engine(
            source,
            output_dir,
            wanted,
            trtllm_checkpoint=checkpoint_dir is not None,
            engine_only=engine_only,
            progress=progress,
            compiling=compiling,
            verbose=verbose,
        )
    _report(engine)


def verify(engine_dir: Annotated[Path, typer.Argument(help="Engine directory.")]) -> None:
    """Compare every byte of an engine directory with its manifest, and check its graph."""
    from trtllm_shadowkv.build.builder import verify_engine

    engine = verify_engine(engine_dir)
    graph = ", graph accepted" if engine.has_onnx else ""
    typer.echo(f"{engine.path}: {len(engine.files)} files as their manifest says{graph}")


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
        return
    from trtllm_shadowkv.build import manifest

    made = manifest.read(engine.path)
    typer.echo(
        f"engine: {made['backend']} {made['tensorrt_version']} for compute capability {made['gpu_architecture']}, "
        f"{(engine.path / names.ENGINE_FILE).stat().st_size:,} bytes"
    )


@contextmanager
def progress_bar(what: str, *, unit: str = "", hidden: bool = False) -> Iterator[Progress | None]:
    """A progress bar on a terminal, where tqdm is installed; it is seen from the first progress on."""
    import sys
    from importlib.util import find_spec

    if hidden or not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm

    form = {} if unit else {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"}
    bars: list[Any] = []

    def progress(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(desc=what, unit=unit, unit_scale=True, total=total, miniters=1, **form))
        bars[0].update(done - bars[0].n)
        if done >= total:
            bars[0].close()

    try:
        yield progress
    finally:
        for bar in bars:
            bar.close()
