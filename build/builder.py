"""``trtllm-shadowkv build``: a Hugging Face directory becomes an engine directory, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest, tensorrt_engine
from trtllm_shadowkv.build.llama_graph import Weight, build_graph, weights
from trtllm_shadowkv.build.whole_directory import whole_directory
from trtllm_shadowkv.checkpoint import Checkpoint, to_dtype, tokenizer_files
from trtllm_shadowkv.config import Backend, BuildConfig
from trtllm_shadowkv.engine_directory import EngineDirectory, engine_config
from trtllm_shadowkv.errors import CheckpointError, ConfigError, EngineError, MissingDependencyError, require
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.models import ModelConfig

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT = 4096  # of a weight in its file: a page, so that it can be mapped
_GRAPH_BYTES = 4 << 20  # more than graph, configuration and manifest take

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def build_engine(
    model_dir: str | Path,
    output_dir: str | Path,
    config: BuildConfig | None = None,
    *,
    engine_only: bool = False,
    progress: Progress | None = None,
    compiling: Progress | None = None,
    verbose: bool = False,
) -> EngineDirectory:
    """Write the engine directory of a Hugging Face model.

    Everything is checked before anything is written; the directory appears under its name only when it is whole.

    Args:
        model_dir: config.json, safetensors and tokenizer files.
        output_dir: new or empty directory, or an engine directory to replace (with no other files in it).
        config: settings; None: the defaults.
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
    output = _real_path(output_dir)
    _check_output(output)
    with _open_checkpoint(model_dir) as checkpoint:
        model = replace(checkpoint.config, eos_token_ids=_end_tokens(checkpoint.directory, checkpoint.config))
        build = _resolved(model, config)
        checkpoint.check()
        copied = tokenizer_files(checkpoint.directory)
        target = tensorrt_engine.prepare(build)
        needed = _bytes_needed(model, build.dtype) * (1 if target is None else 2)
        needed += sum(file.stat().st_size for file in copied)
        with whole_directory(output, needed) as partial:
            _write_onnx(partial, checkpoint, build, progress)
            _write_config(partial, model, build)
            for file in copied:
                shutil.copyfile(file, partial / file.name)
            _check_graph(partial, model, build.dtype)
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
    path = _real_path(engine_dir)
    engine = _with_onnx(EngineDirectory.open(engine_dir))
    _check_output(path)
    build = _rebuilt(engine.build, backend, compute_capabilities)
    target = tensorrt_engine.prepare(build)
    needed = _GRAPH_BYTES if target is None else _bytes_needed(engine.model, build.dtype)
    with whole_directory(path, needed) as partial:
        engine = _with_onnx(EngineDirectory.open(path, whole=True))
        build = replace(engine.build, backend=build.backend, compute_capabilities=build.compute_capabilities)
        _check_graph(path, engine.model, engine.build.dtype)
        for name in engine.files:
            if name != names.ENGINE_FILE:
                os.link(path / name, partial / name)  # the weights' bytes stay where they are
        graph = build_graph(engine.model, engine.build.shadowkv, engine.build.dtype)
        _write_graph(partial, graph, engine.model, engine.build.dtype)
        _write_config(partial, engine.model, build)
        _check_graph(partial, engine.model, engine.build.dtype)
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
        _check_graph(engine.path, engine.model, engine.build.dtype)
    return engine


def _open_checkpoint(model_dir: str | Path) -> Checkpoint:
    try:
        return Checkpoint.open(model_dir)
    except (OSError, TypeError) as e:
        raise CheckpointError(f"{model_dir!r} cannot be read: {e}", "a Hugging Face model directory") from e


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


def _real_path(path: str | Path) -> Path:
    """Where a directory is, or will be; a link to it stays what it is when the directory is replaced.

    Raises:
        EngineError: no path at all.
    """
    try:
        return Path(os.path.realpath(path))
    except (TypeError, ValueError) as e:
        raise EngineError(f"{path!r} is no path: {e}", "the path of a directory") from e


def _check_output(output: Path) -> None:
    """Refuse to replace what cannot be renamed, and anything but an engine: all that it holds is deleted."""
    try:
        held = sorted(os.listdir(output))
    except FileNotFoundError:
        return
    except OSError as e:
        raise EngineError(f"{output} is no directory to write: {e}", "a new one, an empty one or an engine") from e
    for what, it_is in (("the working directory", _is_here(output)), ("a mount point", os.path.ismount(output))):
        if it_is:
            raise EngineError(f"{output} is {what}", "a directory that can be replaced", "choose one below it")
    foreign = [name for name in held if name not in manifest.owned(output)]
    if foreign:
        raise EngineError(
            f"{output} holds {foreign[0]!r}, which belongs to no engine",
            "a new or empty directory, or an engine to replace",
            "move it away: the whole directory is replaced",
        )


def _is_here(directory: Path) -> bool:
    try:
        return directory.samefile(os.curdir)
    except FileNotFoundError:  # the working directory was removed
        return False


def _end_tokens(model_dir: Path, model: ModelConfig) -> tuple[int, ...]:
    """End tokens of config.json, and those that only generation_config.json lists (many models' end of a turn).

    Raises:
        CheckpointError: a file that is no JSON.
        ConfigError: an end token that is none.
    """
    path = model_dir / "generation_config.json"
    ids = list(model.eos_token_ids)
    if path.exists():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}", "JSON", "download the model again") from e
        ids += JsonReader(data, str(path)).token_ids("eos_token_id", None)
    for token in ids:
        if token >= model.vocab_size:
            raise ConfigError(
                f"{model_dir}: eos_token_id {token}", f"at most {model.vocab_size - 1}, by its vocab_size"
            )
    return tuple(dict.fromkeys(ids))


def _layout(model: ModelConfig, dtype: str) -> Iterator[tuple[Weight, int, int]]:
    """Each weight with its offset and size in the weights file, in bytes."""
    offset = 0
    for weight in weights(model):
        size = prod(weight.shape) * ITEM_BYTES[dtype]
        yield weight, offset, size
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT


def _place(offset: int, size: int) -> dict[str, str]:
    """A tensor's bytes, in the words of ONNX's external data."""
    return {"location": names.WEIGHTS_FILE, "offset": str(offset), "length": str(size)}


def _bytes_needed(model: ModelConfig, dtype: str) -> int:
    return sum(size + _ALIGNMENT for _, _, size in _layout(model, dtype)) + _GRAPH_BYTES


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
    # It may be a link to the file of the engine that is refreshed.
    (directory / names.CONFIG_FILE).unlink(missing_ok=True)
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
        for key, value in _place(offset, size).items():
            tensor.external_data.add(key=key, value=value)
    (directory / names.ONNX_FILE).unlink(missing_ok=True)
    (directory / names.ONNX_FILE).write_bytes(graph.SerializeToString())


def _check_graph(directory: Path, model: ModelConfig, dtype: str) -> None:
    """Compare where the graph finds its weights with where they lie, and have ``onnx.checker`` look at the rest.

    The checker would refuse the directory for its weights where they have a second name, as in a refresh or a backup
    of hard links: it is given the graph alone.
    """
    import onnx

    path = directory / names.ONNX_FILE
    try:
        proto = onnx.load(str(path), load_external_data=False)
        weights_here = [t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        where = [(t.name, {e.key: e.value for e in t.external_data}) for t in weights_here]
        for tensor in weights_here:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            proto.graph.initializer.remove(tensor)
        onnx.checker.check_model(proto, full_check=True)
    except Exception as e:  # neither protobuf nor the checker has an error class to name
        reason = " ".join(str(e).split())[:400]
        raise EngineError(f"onnx.checker refuses {path}: {reason}", todo="build the engine again") from e
    if where != [(w.name, _place(offset, size)) for w, offset, size in _layout(model, dtype)]:
        raise EngineError(
            f"{path} does not hold the weights of this model as this version lays them out",
            todo="build the engine again",
        )
