"""``trtllm-shadowkv build``: a Hugging Face or TensorRT-LLM model becomes an engine directory, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest, tensorrt_engine
from trtllm_shadowkv.build.engine_files import check_graph, layout, write_config, write_graph
from trtllm_shadowkv.build.whole_directory import check_output, real_path, whole_directory
from trtllm_shadowkv.checkpoint import Checkpoint, end_tokens, to_dtype, tokenizer_files
from trtllm_shadowkv.config import Backend, BuildConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import CheckpointError, ConfigError, EngineError, MissingDependencyError, require
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.trtllm_checkpoint import TrtllmCheckpoint

_GRAPH_BYTES = 4 << 20  # more than graph, configuration and manifest take

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def build_engine(
    model_dir: str | Path,
    output_dir: str | Path,
    config: BuildConfig | None = None,
    *,
    trtllm_checkpoint: bool = False,
    engine_only: bool = False,
    progress: Progress | None = None,
    compiling: Progress | None = None,
    verbose: bool = False,
) -> EngineDirectory:
    """Write the engine directory of a model.

    Everything is checked before anything is written; the directory appears under its name only when it is whole.

    Args:
        model_dir: config.json, safetensors and tokenizer files.
        output_dir: new or empty directory, or an engine directory to replace (with no other files in it).
        config: settings; None: the defaults.
        trtllm_checkpoint: ``model_dir`` is a TensorRT-LLM checkpoint, of any tp_size, and no Hugging Face model.
        engine_only: keep only the compiled TensorRT engine, without the ONNX file and its weights.
        progress: called while the weights are written.
        compiling: called while TensorRT compiles, with parts done and parts in all.
        verbose: write TensorRT's log to standard error.

    Raises:
        CheckpointError, ConfigError: the model or the settings cannot be used.
        EngineError: the output directory cannot be written, holds other files, or is being written by another process;
            or TensorRT failed.
        MissingDependencyError: what ``config.backend`` needs is not here, or ``engine_only`` where it compiles no
            engine.
    """
    require("onnx", "cpu")
    config = config or BuildConfig()
    if engine_only and config.backend == "onnx":
        raise MissingDependencyError(
            "engine_only keeps nothing but a compiled TensorRT engine, and backend 'onnx' compiles none",
            todo="build without it, or with --backend tensorrt",
        )
    output = real_path(output_dir)
    check_output(output, manifest.owned(output), "an engine")
    with _open_checkpoint(model_dir, trtllm_checkpoint) as checkpoint:
        model = replace(checkpoint.config, eos_token_ids=end_tokens(checkpoint.directory, checkpoint.config))
        build = _resolved(model, config)
        checkpoint.check()
        copied = tokenizer_files(checkpoint.directory)
        target = tensorrt_engine.prepare(build)
        needed = _bytes_needed(model, build.dtype) * (1 if target is None else 2)
        needed += sum(file.stat().st_size for file in copied)
        with whole_directory(output, needed) as partial:
            _write_onnx(partial, checkpoint, build, progress)
            write_config(partial, model, build)
            for file in copied:
                shutil.copyfile(file, partial / file.name)
            check_graph(partial, model, build.dtype)
            if target is not None:
                target.compile(partial, build, progress=compiling, verbose=verbose)
            if engine_only:
                for name in (names.ONNX_FILE, names.WEIGHTS_FILE):
                    (partial / name).unlink()
            manifest.write(partial, **({} if target is None else target.record))
    return EngineDirectory.open(output_dir)


def refresh_engine(
    engine_dir: str | Path,
    *,
    backend: Backend | None = None,
    compute_capabilities: Sequence[int] | None = None,
    compiling: Progress | None = None,
    verbose: bool = False,
) -> EngineDirectory:
    """Make everything but the weights and the tokenizer of an engine directory anew with this version.

    The weights' bytes are compared with the manifest first and are not copied. A TensorRT engine is compiled again.

    Args:
        backend, compute_capabilities: instead of those that the directory was built with (see :class:`BuildConfig`):
            so a directory that was written where there is no GPU gets its TensorRT engine where there is one.
        compiling, verbose: as :func:`build_engine`.

    Raises:
        EngineError: a damaged directory, one without an ONNX file or with files that are not its own, or one that
            another process is writing; or TensorRT failed.
        ConfigError, MissingDependencyError: the backend cannot compile here.
    """
    require("onnx", "cpu")
    path = real_path(engine_dir)
    engine = _with_onnx(EngineDirectory.open(engine_dir))
    check_output(path, manifest.owned(path), "an engine")
    build = _rebuilt(engine.build, backend, compute_capabilities)
    target = tensorrt_engine.prepare(build)
    needed = _GRAPH_BYTES if target is None else _bytes_needed(engine.model, build.dtype)
    with whole_directory(path, needed) as partial:
        engine = _with_onnx(EngineDirectory.open(path, whole=True))
        build = replace(engine.build, backend=build.backend, compute_capabilities=build.compute_capabilities)
        check_graph(path, engine.model, engine.build.dtype)
        for name in engine.files:
            if name != names.ENGINE_FILE:
                os.link(path / name, partial / name)  # the weights' bytes stay where they are
        places = layout(engine.model, build.dtype)
        write_graph(partial, engine.model, build, {weight.name: place for weight, place in places})
        write_config(partial, engine.model, build)
        check_graph(partial, engine.model, engine.build.dtype)
        if target is not None:
            target.compile(partial, build, progress=compiling, verbose=verbose)
        manifest.write(partial, **({} if target is None else target.record))
    return EngineDirectory.open(engine_dir)


def _with_onnx(engine: EngineDirectory) -> EngineDirectory:
    if not engine.has_onnx:
        raise EngineError(f"{engine.path} has no {names.ONNX_FILE}", "an engine built without --engine-only")
    return engine


def _rebuilt(build: BuildConfig, backend: Backend | None, capabilities: Sequence[int] | None) -> BuildConfig:
    """With another backend, whose compute capabilities those of the old one are not."""
    if backend is not None and backend != build.backend:
        build = replace(build, backend=backend, compute_capabilities=())
    return build if capabilities is None else replace(build, compute_capabilities=tuple(capabilities))


def verify_engine(engine_dir: str | Path) -> EngineDirectory:
    """Hash every byte of an engine directory and check its graph.

    Raises:
        EngineError: a missing or altered file, or a graph that ``onnx.checker`` refuses.
    """
    engine = EngineDirectory.open(engine_dir, whole=True)
    if engine.has_onnx:
        require("onnx", "cpu")
        check_graph(engine.path, engine.model, engine.build.dtype)
    return engine


def _open_checkpoint(model_dir: str | Path, trtllm_checkpoint: bool) -> Checkpoint | TrtllmCheckpoint:
    try:
        return TrtllmCheckpoint.open(model_dir) if trtllm_checkpoint else Checkpoint.open(model_dir)
    except (OSError, TypeError) as e:
        kind = "TensorRT-LLM checkpoint" if trtllm_checkpoint else "Hugging Face model"
        raise CheckpointError(f"{model_dir!r} cannot be read: {e}", f"a {kind} directory") from e


def _resolved(model: ModelConfig, config: BuildConfig) -> BuildConfig:
    """Fill in what depends on the model."""
    longest = model.max_position_embeddings
    length = config.max_seq_len or longest
    if length > longest:
        raise ConfigError(f"max_seq_len is {length}", f"at most the model's max_position_embeddings, {longest}")
    return replace(
        config,
        max_seq_len=length,
        max_num_tokens=min(config.max_num_tokens, length),
        shadowkv=config.shadowkv.resolved(model.key_width),
    )


def _bytes_needed(model: ModelConfig, dtype: str) -> int:
    return layout(model, dtype)[-1][1].next_offset + _GRAPH_BYTES


def _write_onnx(
    directory: Path, checkpoint: Checkpoint | TrtllmCheckpoint, build: BuildConfig, progress: Progress | None
) -> None:
    places = layout(checkpoint.config, build.dtype)
    total = sum(place.size for _, place in places)
    done = 0
    with (directory / names.WEIGHTS_FILE).open("wb") as file:
        for weight, place in places:
            file.seek(place.offset)
            for source in weight.sources:  # one tensor at a time is in memory
                array, dtype = checkpoint.read(source)
                to_dtype(array, dtype, weight.dtype, source).tofile(file)
            assert file.tell() == place.offset + place.size
            done += place.size
            if progress is not None:
                progress(done, total)
    write_graph(directory, checkpoint.config, build, {weight.name: place for weight, place in places})
