"""A Hugging Face model directory as named, memory-mapped weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.dtypes import to_dtype
from trtllm_shadowkv.errors import CheckpointError, ConfigError
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.safetensors_file import STORAGE, SafetensorsFile

__all__ = ["Checkpoint", "end_tokens", "to_dtype", "tokenizer_files"]

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HARMLESS = ".rotary_emb.inv_freq"
"""End of the names of the RoPE tables that old versions of transformers saved: they follow from config.json."""
_NAMED_PROBLEMS = 5
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)


def tokenizer_files(model_dir: str | Path) -> list[Path]:
    """Those files of a model directory that a tokenizer or a generation default is read from."""
    return [p for name in _TOKENIZER_FILES if (p := Path(model_dir) / name).is_file()]


def end_tokens(model_dir: Path, model: ModelConfig) -> tuple[int, ...]:
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


class Checkpoint:
    """Weights of one model. Nothing is read before :meth:`read`, one tensor at a time.

    Attributes:
        directory: where the model lies.
        config: its shape.
    """

    def __init__(self, directory: Path, config: ModelConfig, files: Mapping[str, SafetensorsFile]) -> None:
        self.directory = directory
        self.config = config
        self._files = files

    @classmethod
    def open(cls, model_dir: str | Path) -> Checkpoint:
        """Read config.json and the headers of the weight files.

        Raises:
            CheckpointError: a file is missing, cut short or damaged, or the shards' index contradicts them.
            ConfigError: config.json describes a model that is not supported.
        """
        directory = Path(model_dir)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory", "a Hugging Face model directory")
        path = directory / "config.json"
        config = ModelConfig.from_hf(_read_json(path), str(path))
        return cls(directory, config, _open_files(directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; arrays that :meth:`read` returned stay valid."""
        _close(self._files)

    def check(self) -> None:
        """Compare the tensors with what the configuration asks for.

        Raises:
            CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype; the first few are named.
        """
        expected = self.config.weight_shapes()
        problems = [f"{name} is missing" for name in expected if name not in self._files]
        for name, file in self._files.items():
            entry = file.entries[name]
            if name in expected:
                if entry.shape != expected[name]:
                    problems.append(f"{name} has shape {list(entry.shape)}, expected {list(expected[name])}")
                if entry.dtype not in STORAGE:
                    problems.append(f"{name} has dtype {entry.dtype}, expected one of {', '.join(STORAGE)}")
            elif name == "lm_head.weight" and self.config.tied:
                if not self._repeats_embedding(name):
                    problems.append(f"{name} differs from model.embed_tokens.weight, but tie_word_embeddings is true")
            elif not name.endswith(_HARMLESS):
                problems.append(f"{name} is unknown")
        if problems:
            more = len(problems) - _NAMED_PROBLEMS
            text = "; ".join(problems[:_NAMED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise CheckpointError(
                f"{self.directory} does not hold the weights of its config.json: {text}",
                todo="download the model again, or correct its config.json",
            )

    def read(self, name: str) -> tuple[NDArray[Any], str]:
        """One tensor and its dtype's name.

        Returns:
            A read-only view into the file (shape as :meth:`ModelConfig.weight_shapes` says once :meth:`check` has
            passed; bfloat16 as uint16 bits), and ``float32``, ``float16`` or ``bfloat16``.

        Raises:
            CheckpointError: no such tensor, or a dtype that is none of the three.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        dtype = file.entries[name].dtype
        if dtype not in STORAGE:
            raise CheckpointError(f"{self.directory}: {name} has dtype {dtype}", f"one of {', '.join(STORAGE)}")
        return file.read(name), _DTYPE_NAMES[dtype]

    def _repeats_embedding(self, name: str) -> bool:
        embedding = "model.embed_tokens.weight"
        pair = [self._files[n].entries[n] for n in (name, embedding) if n in self._files]
        if len(pair) < 2 or (pair[0].dtype, pair[0].shape) != (pair[1].dtype, pair[1].shape):
            return False
        if pair[0].dtype not in STORAGE:
            return True  # reported as the embedding's dtype
        # Compared as bits, a row range at a time: NaN equals itself, and no second copy of an embedding is made.
        one, two = (self._files[n].read(n) for n in (name, embedding))
        bits = np.dtype(f"u{one.itemsize}")
        return all(
            np.array_equal(one[i : i + 1024].view(bits), two[i : i + 1024].view(bits)) for i in range(0, len(one), 1024)
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}", "a Hugging Face model directory") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is no JSON: {e}", todo="download the model again") from e


def _close(files: Mapping[str, SafetensorsFile]) -> None:
    for file in {id(f): f for f in files.values()}.values():
        file.close()


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Every tensor's name with the file it lies in: model.safetensors, or the shards that an index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.entries, file)
    if not index.exists():
        others = sorted(p.name for p in directory.glob("*.bin"))
        raise CheckpointError(
            f"{directory} has no model.safetensors and no {index.name}" + (f", only {others[0]}" if others else ""),
            "weights in the safetensors format",
            "convert them with transformers: model.save_pretrained(...)" if others else "download the model again",
        )
    places = _weight_map(index)
    files: dict[str, SafetensorsFile] = {}
    try:
        for shard in sorted(set(places.values())):
            file = SafetensorsFile(directory / shard)
            twice = [name for name in file.entries if name in files]
            files |= dict.fromkeys(file.entries, file)
            if twice:
                raise CheckpointError(f"{directory}: {twice[0]} lies in two shards", "one", "download the model again")
            for name in [n for n, s in places.items() if s == shard and n not in file.entries]:
                raise CheckpointError(
                    f"{directory / shard} has no tensor {name}", f"it, because {index.name} says so", "download again"
                )
    except BaseException:
        _close(files)
        raise
    return files


def _weight_map(index: Path) -> dict[str, str]:
    data = _read_json(index)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(s, str) for s in places.values()):
        raise CheckpointError(f"{index} has no usable weight_map", "a JSON object of tensor names and shard names")
    for shard in places.values():
        # Only the name is judged: shards are often links into a download cache, and that is fine.
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the shard {shard!r}", "the name of a .safetensors file beside it")
    return places
