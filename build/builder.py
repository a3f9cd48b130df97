"""``trtllm-shadowkv build``: a Hugging Face directory becomes an engine directory, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.build.llama_graph import Weight, build_graph, weights
from trtllm_shadowkv.checkpoint import Checkpoint, to_dtype, tokenizer_files
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.engine_directory import EngineDirectory, engine_config
from trtllm_shadowkv.errors import ConfigError, EngineError, MissingDependencyError, require
from trtllm_shadowkv.models import ModelConfig

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT = 4096  # of a weight in its file: a page, so that it can be mapped

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def build_engine(
    model_dir: str | Path,
    output_dir: str | Path,
    config: BuildConfig | None = None,
    *,
    engine_only: bool = False,
    progress: Progress | None = None,
) -> EngineDirectory:
    """Write the engine directory of a Hugging Face model.

    Everything is checked before anything is written; the directory appears under its name only when it is whole.

    Args:
        model_dir: config.json, safetensors and tokenizer files.
        output_dir: new or empty directory, or an engine directory to replace.
        config: settings; None: the defaults.
        engine_only: keep only the compiled TensorRT engine, without the ONNX file and its weights.

    Raises:
        CheckpointError, ConfigError: the model or the settings cannot be used.
        EngineError: the output directory cannot be written.
        MissingDependencyError: ``engine_only`` where no TensorRT engine can be compiled.
    """
    require("onnx", "cpu")
    if engine_only:
        raise MissingDependencyError(
            "engine_only keeps nothing but a compiled TensorRT engine, and this version compiles none",
            todo="build without it: the CPU executor runs the ONNX graph",
        )
    output = Path(output_dir)
    _check_output(output)
    with Checkpoint.open(model_dir) as checkpoint:
        model = checkpoint.config
        build = _resolved(model, config or BuildConfig())
        checkpoint.check()
        with _whole_directory(output, _bytes_needed(model, build.dtype)) as partial:
            _write_onnx(partial, checkpoint, build, progress)
            _write_config(partial, model, build)
            for file in tokenizer_files(Path(model_dir)):
                shutil.copyfile(file, partial / file.name)
            _check_onnx(partial)
            manifest.write(partial)
    return EngineDirectory.open(output)


def refresh_engine(engine_dir: str | Path) -> EngineDirectory:
    """Make everything but the weights and the tokenizer of an engine directory anew with this version.

    The weights' bytes are compared with the manifest first and are not copied.

    Raises:
        EngineError: a damaged directory, or one without an ONNX file.
    """
    engine = EngineDirectory.open(engine_dir, whole=True)
    if not engine.has_onnx:
        raise EngineError(f"{engine.path} has no {names.ONNX_FILE}", "an engine built without --engine-only")
    with _whole_directory(engine.path, 64 << 20) as partial:
        for name in engine.files:
            os.link(engine.path / name, partial / name)  # the weights' bytes stay where they are
        if [w.name for w in weights(engine.model)] != _external_names(partial):
            raise EngineError(f"{engine.path / names.ONNX_FILE} does not hold the weights of this model")
        graph = build_graph(engine.model, engine.build.shadowkv, engine.build.dtype)
        _write_graph(partial, graph, engine.model, engine.build.dtype)
        _write_config(partial, engine.model, engine.build)
        _check_onnx(partial)
        manifest.write(partial)
    return EngineDirectory.open(engine.path)


def verify_engine(engine_dir: str | Path) -> EngineDirectory:
    """Hash every byte of an engine directory and check its graph.

    Raises:
        EngineError: a missing or altered file, or a graph that ``onnx.checker`` refuses.
    """
    engine = EngineDirectory.open(engine_dir, whole=True)
    if engine.has_onnx:
        require("onnx", "cpu")
        _check_onnx(engine.path)
    return engine


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


def _check_output(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise EngineError(f"{output} exists and is no directory", "a new or empty directory, or an engine to replace")
    if any(output.iterdir()) and not (output / names.MANIFEST_FILE).is_file():
        raise EngineError(
            f"{output} holds files that are no engine", "a new or empty directory, or an engine to replace"
        )


def _layout(model: ModelConfig, dtype: str) -> Iterator[tuple[Weight, int, int]]:
    """Each weight with its offset and size in the weights file, in bytes."""
    offset = 0
    for weight in weights(model):
        size = prod(weight.shape) * ITEM_BYTES[dtype]
        yield weight, offset, size
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_needed(model: ModelConfig, dtype: str) -> int:
    return sum(size + _ALIGNMENT for _, _, size in _layout(model, dtype)) + (64 << 20)  # graph and tokenizer


def _write_onnx(directory: Path, checkpoint: Checkpoint, build: BuildConfig, progress: Progress | None) -> None:
    total = sum(size for _, _, size in _layout(checkpoint.config, build.dtype))
    done = 0
    with (directory / names.WEIGHTS_FILE).open("wb") as file:
        for weight, offset, size in _layout(checkpoint.config, build.dtype):
            file.seek(offset)
            for source in weight.sources:  # one tensor at a time is in memory
                array, dtype = checkpoint.read(source)
                to_dtype(array, dtype, build.dtype, source).tofile(file)
            assert file.tell() == offset + size
            done += size
            if progress is not None:
                progress(done, total)
    graph = build_graph(checkpoint.config, build.shadowkv, build.dtype)
    _write_graph(directory, graph, checkpoint.config, build.dtype)


def _write_config(directory: Path, model: ModelConfig, build: BuildConfig) -> None:
    (directory / names.CONFIG_FILE).unlink(missing_ok=True)  # it may be a link to the file of the engine being refreshed
    text = json.dumps(engine_config(model, build), indent=2)
    (directory / names.CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _write_graph(directory: Path, graph: object, model: ModelConfig, dtype: str) -> None:
    """Point the graph's initializers into the weights file and write it."""
    from onnx import ModelProto, TensorProto

    assert isinstance(graph, ModelProto)
    tensors = {t.name: t for t in graph.graph.initializer}
    for weight, offset, size in _layout(model, dtype):
        tensor = tensors[weight.name]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", names.WEIGHTS_FILE), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
    (directory / names.ONNX_FILE).unlink(missing_ok=True)
    (directory / names.ONNX_FILE).write_bytes(graph.SerializeToString())


def _external_names(directory: Path) -> list[str]:
    import onnx

    graph = onnx.load(str(directory / names.ONNX_FILE), load_external_data=False).graph
    return [t.name for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]


def _check_onnx(directory: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(directory / names.ONNX_FILE), full_check=True)
    except Exception as e:  # the checker has no common base class
        raise EngineError(f"onnx.checker refuses {names.ONNX_FILE}: {' '.join(str(e).split())[:400]}") from e


@contextlib.contextmanager
def _whole_directory(output: Path, needed: int) -> Iterator[Path]:
    """A hidden sibling that takes the output's name when the block ends, and disappears when it fails."""
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent, output.name)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise EngineError(f"{parent} has {free:,} bytes free", f"{needed:,} for this engine")
        partial = parent / f".{output.name}.partial-{os.getpid()}"
        partial.mkdir()
    except OSError as e:
        raise EngineError(f"cannot write beside {output}: {e}") from e
    replaced = parent / f".{output.name}.replaced-{os.getpid()}"
    try:
        yield partial
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    except OSError as e:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        raise EngineError(f"writing {output} failed: {e}", todo="nothing was changed; free space and build again") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _remove_leftovers(parent: Path, name: str) -> None:
    """Remove partial directories of builds that were killed."""
    for leftover in parent.glob(f".{name}.partial-*"):
        process = leftover.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
