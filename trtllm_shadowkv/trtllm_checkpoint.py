"""TensorRT-LLM's checkpoint format: config.json and rank0.safetensors, rank1.safetensors, ... in one directory.

Matrices are (out, in) as in a Hugging Face model. A rank's ``attention.qkv`` holds its rows of Q, then K, then V;
``mlp.fc`` is Hugging Face's gate_proj, ``mlp.gate`` its up_proj, ``mlp.proj`` its down_proj. Ranks split rows of qkv,
fc, gate and lm_head and columns of dense and proj, and hold everything else whole. Where there are more ranks than
key/value heads neighbours hold the same head. Rows of zeros fill lm_head up to a multiple of the ranks; it is there
for a tied model too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.build.whole_directory import check_output, real_path, whole_directory
from trtllm_shadowkv.checkpoint import Checkpoint, end_tokens, to_dtype, tokenizer_files
from trtllm_shadowkv.dtypes import NUMPY
from trtllm_shadowkv.errors import CheckpointError, ConfigError
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.safetensors_file import STORAGE, SafetensorsFile
from trtllm_shadowkv.trtllm_config import model_config, pretrained_config, tensor_parallel_size

__all__ = ["ROPE_TABLES", "TrtllmCheckpoint", "write_checkpoint"]

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NAMES = {kind: name for name, kind in _SAFETENSORS.items()}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_TABLES = re.compile(r"(transformer\.)?(embed_positions|rotary_inv_freq|(short|long)_inv_freq)\w*")
"""Tables that convert_checkpoint.py saves beside the weights: they follow from config.json."""
_NAMED_PROBLEMS = 5
_AGAIN = "convert the model again"


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a checkpoint: Hugging Face tensors joined along their first dimension.

    Attributes:
        axis: the dimension that ranks split; None: every rank has it whole.
    """

    name: str
    sources: tuple[str, ...]
    axis: int | None


def _tensors(model: ModelConfig, *, head: bool, embedding_axis: int | None = None) -> Iterator[_Tensor]:
    """Every tensor in file order.

    Args:
        head: whether there is a ``lm_head.weight``; a tied model's is the embedding.
        embedding_axis: as :attr:`_Tensor.axis`, of the embedding.
    """
    yield _Tensor("transformer.vocab_embedding.weight", (_EMBEDDING,), embedding_axis)
    linears = (  # name, Hugging Face's names, the dimension that is split, bias
        ("attention.qkv", tuple(f"self_attn.{p}_proj" for p in "qkv"), 0, model.qkv_bias),
        ("attention.dense", ("self_attn.o_proj",), 1, model.output_bias),
        ("mlp.fc", ("mlp.gate_proj",), 0, model.mlp_bias),
        ("mlp.gate", ("mlp.up_proj",), 0, model.mlp_bias),
        ("mlp.proj", ("mlp.down_proj",), 1, model.mlp_bias),
    )
    norms = [("input_layernorm", "input_layernorm"), ("post_layernorm", "post_attention_layernorm")]
    if model.qk_norm:
        norms += [(f"attention.{p}_layernorm", f"self_attn.{p}_norm") for p in "qk"]
    for i in range(model.num_layers):
        here, there = f"transformer.layers.{i}", f"model.layers.{i}"
        for name, source in norms:
            yield _Tensor(f"{here}.{name}.weight", (f"{there}.{source}.weight",), None)
        for name, sources, axis, bias in linears:
            yield _Tensor(f"{here}.{name}.weight", tuple(f"{there}.{s}.weight" for s in sources), axis)
            if bias:
                yield _Tensor(
                    f"{here}.{name}.bias", tuple(f"{there}.{s}.bias" for s in sources), 0 if axis == 0 else None
                )
    yield _Tensor("transformer.ln_f.weight", ("model.norm.weight",), None)
    if head:
        yield _Tensor("lm_head.weight", (_EMBEDDING if model.tied else _HEAD,), 0)


class _Split:
    """Which part of a Hugging Face tensor a rank holds."""

    def __init__(self, model: ModelConfig, tp_size: int) -> None:
        self.model, self.tp_size = model, tp_size
        self.shapes = model.weight_shapes()

    def shape(self, tensor: _Tensor) -> tuple[int, ...]:
        """Shape of a tensor in each rank's file."""
        shape = list(self.shapes[tensor.sources[0]])
        if tensor.axis is not None:
            shape[tensor.axis] = sum(self.part(source, tensor.axis, 0)[1] for source in tensor.sources)
        return tuple(shape)

    def part(self, source: str, axis: int | None, rank: int) -> tuple[int, int]:
        """(first, count) along the axis; a part that reaches over the tensor's end is filled with zeros there."""
        if axis is None:
            return 0, self.shapes[source][0]
        heads, size = self.model.num_kv_heads, self.model.head_size
        if ".k_proj." in source or ".v_proj." in source:
            return rank * heads // self.tp_size * size, max(1, heads // self.tp_size) * size
        count = -(-self.shapes[source][axis] // self.tp_size)
        return rank * count, count


def write_checkpoint(
    model_dir: str | Path,
    output_dir: str | Path,
    *,
    tp_size: int = 1,
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a Hugging Face model as a TensorRT-LLM checkpoint, with its tokenizer files beside it.

    One tensor of one rank at a time is in memory. The directory appears under its name only when it is whole.

    Args:
        model_dir: config.json, safetensors and tokenizer files.
        output_dir: new or empty directory, or a checkpoint to replace.
        tp_size: ranks to split the weights over.
        dtype: float32, float16 or bfloat16; auto: the model's, and float16 for a float32 model as TensorRT-LLM does.
        progress: called with bytes done and bytes in all.

    Returns:
        ``output_dir``.

    Raises:
        CheckpointError, ConfigError: the model cannot be used, or cannot be split so.
        EngineError: the output directory cannot be written, holds other files, or is being written by another process.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ConfigError(f"tp_size is {tp_size!r}", "a whole number of ranks, 1 or more")
    if dtype not in ("auto", *NUMPY):
        raise ConfigError(f"dtype is {dtype!r}", f"one of auto, {', '.join(NUMPY)}")
    output = real_path(output_dir)
    check_output(output, _owned(output), "a checkpoint")
    with Checkpoint.open(model_dir) as source:
        source.check()
        model = replace(source.config, eos_token_ids=end_tokens(source.directory, source.config))
        if dtype == "auto":
            dtype = source.read(_EMBEDDING)[1]
            dtype = "float16" if dtype == "float32" else dtype
        config = pretrained_config(model, dtype, tp_size)
        split, tensors = _Split(model, tp_size), list(_tensors(model, head=True))
        copied = tokenizer_files(source.directory)
        total = tp_size * sum(prod(split.shape(t)) for t in tensors) * NUMPY[dtype].itemsize
        done = 0
        with whole_directory(output, total + (4 << 20) + sum(file.stat().st_size for file in copied)) as partial:
            for rank in range(tp_size):
                with (partial / f"rank{rank}.safetensors").open("wb") as file:
                    file.write(_header([(t.name, split.shape(t)) for t in tensors], dtype))
                    for tensor in tensors:
                        for name in tensor.sources:
                            done += _write_part(file, source, name, dtype, split, tensor.axis, rank)
                        if progress is not None:
                            progress(done, total)
            assert done == total
            (partial / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
            for path in copied:
                shutil.copyfile(path, partial / path.name)
    return Path(output_dir)


def _header(shapes: list[tuple[str, tuple[int, ...]]], dtype: str) -> bytes:
    """Length and header of a safetensors file whose tensors follow in this order."""
    sizes = [prod(shape) * NUMPY[dtype].itemsize for _, shape in shapes]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, shape), size, end in zip(shapes, sizes, accumulate(sizes), strict=True):
        entries[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [end - size, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_part(
    file: BinaryIO, source: Checkpoint, name: str, dtype: str, split: _Split, axis: int | None, rank: int
) -> int:
    """Write a rank's part of a Hugging Face tensor; the bytes written."""
    begin = file.tell()
    array, kind = source.read(name)
    first, count = split.part(name, axis, rank)
    part = array[:, first : first + count] if axis == 1 else array[first : first + count]
    part = np.ascontiguousarray(to_dtype(part, kind, dtype, name))
    part.tofile(file)
    if missing := count - part.shape[axis or 0]:
        np.zeros((missing, *part.shape[1:]), part.dtype).tofile(file)
    return file.tell() - begin


def _owned(output: Path) -> frozenset[str]:
    """Names of the files of a checkpoint that is to be replaced; none where there is none."""
    try:
        if "architecture" not in json.loads((output / "config.json").read_text(encoding="utf-8")):
            return frozenset()
        ranks = [path.name for path in output.iterdir() if re.fullmatch(r"rank\d+\.safetensors", path.name)]
    except (OSError, ValueError, TypeError, RecursionError):
        return frozenset()
    return frozenset(("config.json", *ranks, *(path.name for path in tokenizer_files(output))))


class TrtllmCheckpoint:
    """Weights of a checkpoint under their Hugging Face names, joined over its ranks.

    It stands in for :class:`trtllm_shadowkv.checkpoint.Checkpoint`. Read as well are checkpoints whose embedding is
    split (``use_parallel_embedding``), and tied ones without lm_head.

    Attributes:
        directory: where the checkpoint lies.
        config: its model's shape.
    """

    def __init__(
        self, directory: Path, config: ModelConfig, files: list[SafetensorsFile], embedding_axis: int | None
    ) -> None:
        self.directory = directory
        self.config = config
        self._files = files
        self._split = _Split(config, len(files))
        head = not config.tied or "lm_head.weight" in files[0].entries
        self._tensors = list(_tensors(config, head=head, embedding_axis=embedding_axis))

    @classmethod
    def open(cls, checkpoint_dir: str | Path) -> TrtllmCheckpoint:
        """Read config.json and the headers of the ranks' files.

        Raises:
            CheckpointError: a file is missing, cut short or damaged, or this is no TensorRT-LLM checkpoint.
            ConfigError: config.json describes a model that is not supported.
        """
        directory = Path(checkpoint_dir)
        path = directory / "config.json"
        data = _read_config(path)
        config, tp_size = model_config(data, str(path)), tensor_parallel_size(data, str(path))
        axis = None
        if data.get("use_parallel_embedding"):
            axis = data.get("embedding_sharding_dim", 0)
            if isinstance(axis, bool) or axis not in (0, 1):
                raise ConfigError(f"{path}: embedding_sharding_dim is {axis!r}", "0 or 1")
            if axis == 1 and config.hidden_size % tp_size:
                raise ConfigError(f"{path}: hidden_size {config.hidden_size}", f"a multiple of tp_size, {tp_size}")
        files: list[SafetensorsFile] = []
        try:
            for rank in range(tp_size):
                file = directory / f"rank{rank}.safetensors"
                if not file.is_file():
                    raise CheckpointError(
                        f"{directory} has no {file.name}", f"{tp_size} such files, by its mapping.tp_size", _AGAIN
                    )
                files.append(SafetensorsFile(file))
            said = any(data.get(key) is not None for key in ("tie_word_embeddings", "share_embedding_table"))
            if "lm_head.weight" not in files[0].entries and not said:
                config = replace(config, tied=True)
            return cls(directory, config, files, axis)
        except BaseException:
            for opened in files:
                opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; arrays that :meth:`read` returned stay valid."""
        for file in self._files:
            file.close()

    def check(self) -> None:
        """Compare the ranks' tensors with what config.json asks for, and what they all hold with each other.

        Raises:
            CheckpointError: tensors are missing, unknown, of a wrong shape or dtype, or contradict each other; the
                first few are named.
        """
        problems = [p for file in self._files for p in self._problems(file)] or self._contradictions()
        if problems:
            more = len(problems) - _NAMED_PROBLEMS
            text = "; ".join(problems[:_NAMED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise CheckpointError(f"{self.directory} does not hold the weights of its config.json: {text}", todo=_AGAIN)

    def read(self, name: str) -> tuple[NDArray[Any], str]:
        """One tensor by its Hugging Face name, and its dtype's name; to be called after :meth:`check`.

        Returns:
            An array of the shape that :meth:`ModelConfig.weight_shapes` says (bfloat16 as uint16 bits), read-only where
            it is a view into the file; and ``float32``, ``float16`` or ``bfloat16``.

        Raises:
            CheckpointError: no such tensor.
        """
        tensor = next((t for t in self._tensors if name in t.sources), None)
        if tensor is None or name not in self._split.shapes:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        kind = _NAMES[self._files[0].entries[tensor.name].dtype]
        if tensor.axis is None or len(self._files) == 1:
            return self._part(tensor, name, 0), kind
        result = np.empty(self._split.shapes[name], NUMPY[kind])
        along = result.T if tensor.axis == 1 else result
        for rank in range(len(self._files)):
            part = self._part(tensor, name, rank)
            first, _ = self._split.part(name, tensor.axis, rank)
            target = along[first : first + part.shape[tensor.axis]]
            target[:] = part.T if tensor.axis == 1 else part
        return result, kind

    def _part(self, tensor: _Tensor, source: str, rank: int) -> NDArray[Any]:
        """A rank's part of a Hugging Face tensor, without rows that only fill up."""
        array = self._files[rank].read(tensor.name)
        if tensor.axis is None:
            return array
        before = tensor.sources[: tensor.sources.index(source)]
        start = sum(self._split.part(s, tensor.axis, rank)[1] for s in before)
        first, count = self._split.part(source, tensor.axis, rank)
        count = max(0, min(count, self._split.shapes[source][tensor.axis] - first))
        return array[:, start : start + count] if tensor.axis == 1 else array[start : start + count]

    def _problems(self, file: SafetensorsFile) -> list[str]:
        """What is wrong in one rank's file by its header."""
        problems, expected = [], {tensor.name: self._split.shape(tensor) for tensor in self._tensors}
        for name, shape in expected.items():
            entry, where = file.entries.get(name), f"{name} of {file.path.name}"
            if entry is None:
                problems.append(f"{where} is missing")
                continue
            if entry.shape != shape:
                problems.append(f"{where} has shape {list(entry.shape)}, expected {list(shape)}")
            first = self._files[0].entries.get(name, entry).dtype
            if entry.dtype not in STORAGE or entry.dtype != first:
                wanted = first if first in STORAGE else f"one of {', '.join(STORAGE)}"
                problems.append(f"{where} has dtype {entry.dtype}, expected {wanted}")
        for name in file.entries:
            if name not in expected and not ROPE_TABLES.fullmatch(name):
                problems.append(f"{name} of {file.path.name} is unknown")
        return problems

    def _contradictions(self) -> list[str]:
        """Small tensors of which ranks hold different values, and a tied head that is not the embedding."""
        problems = []
        whole = [t.name for t in self._tensors if t.axis is None and len(self._files[0].entries[t.name].shape) == 1]
        for name in whole:
            first = self._files[0].read(name).tobytes()
            problems += [
                f"{name} of {file.path.name} differs from {self._files[0].path.name}'s"
                for file in self._files[1:]
                if file.read(name).tobytes() != first
            ]
        head = self._tensors[-1]
        if head.name == "lm_head.weight" and self.config.tied:
            embedding, kind = self.read(_EMBEDDING)
            if kind != _NAMES[self._files[0].entries[head.name].dtype] or not all(
                _same_bits(self._part(head, _EMBEDDING, rank), embedding[self._split.part(_EMBEDDING, 0, rank)[0] :])
                for rank in range(len(self._files))
            ):
                problems.append("lm_head.weight differs from transformer.vocab_embedding.weight, but they are tied")
        return problems


def _same_bits(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Whether the rows of one are the first of two; NaN equals itself, and no copy is made."""
    bits = np.dtype(f"u{one.itemsize}")
    return all(
        np.array_equal(one[i : i + 1024].view(bits), two[i : min(i + 1024, len(one))].view(bits))
        for i in range(0, len(one), 1024)
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}", "a TensorRT-LLM checkpoint directory") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is no JSON: {e}", todo=_AGAIN) from e
    if isinstance(data, dict) and "architectures" in data and "architecture" not in data:
        raise CheckpointError(
            f"{path.parent} is a Hugging Face model", "a TensorRT-LLM checkpoint", "give it as --model-dir"
        )
    return JsonReader(data, str(path)).data
