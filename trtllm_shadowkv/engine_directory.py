"""An engine directory: what ``build`` writes and the runtime loads."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_shadowkv import __version__, names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, EngineError
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.trtllm_config import model_config, tensor_parallel_size


@dataclass(frozen=True)
class EngineDirectory:
    """A checked engine directory.

    Attributes:
        path: the directory.
        model: shape of the model.
        build: settings it was built with; max_seq_len and shadowkv.rank are filled in.
        files: names of its files.
    """

    path: Path
    model: ModelConfig
    build: BuildConfig
    files: tuple[str, ...]

    @property
    def max_seq_len(self) -> int:
        assert self.build.max_seq_len is not None
        return self.build.max_seq_len

    @property
    def has_manifest(self) -> bool:
        """False where ``trtllm-build`` wrote it."""
        return (self.path / names.MANIFEST_FILE).is_file()

    @property
    def has_onnx(self) -> bool:
        return names.ONNX_FILE in self.files

    @property
    def has_engine(self) -> bool:
        return names.ENGINE_FILE in self.files

    @classmethod
    def open(cls, path: str | Path, *, whole: bool = False) -> EngineDirectory:
        """Check a directory against its manifest and read its configuration.

        What ``trtllm-build`` writes has no manifest: then the configuration is all that is checked.

        Args:
            whole: hash every byte, as ``verify`` does.

        Raises:
            EngineError: no engine directory, another schema, a missing or altered file.
        """
        try:
            path = Path(path)
        except TypeError as e:
            raise EngineError(f"an engine directory of type {type(path).__name__}", "a path, as str or Path") from e
        if _is_of_trtllm_build(path):
            if whole:
                raise EngineError(f"{path} has no {names.MANIFEST_FILE}", "one that trtllm-shadowkv build wrote")
            return _of_trtllm_build(path)
        listed = manifest.check(path, whole=whole)
        config = path / names.CONFIG_FILE
        if names.CONFIG_FILE not in listed["files"]:
            raise EngineError(f"{path} has no {names.CONFIG_FILE}", "an engine directory", "build it again")
        try:
            data = json.loads(config.read_text(encoding="utf-8"))
            model = ModelConfig.from_pretrained_config(data["pretrained_config"], str(config))
            limits = data["build_config"]
            build = BuildConfig(
                dtype=data["pretrained_config"]["dtype"],
                max_batch_size=limits["max_batch_size"],
                max_seq_len=limits["max_seq_len"],
                max_num_tokens=limits["max_num_tokens"],
                backend=limits.get("backend", "onnx"),
                compute_capabilities=limits.get("compute_capabilities", ()),
                shadowkv=ShadowKVConfig.from_dict(data["shadowkv"], f"{config}: shadowkv"),
            )
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as e:  # ConfigError is a ValueError
            what = str(e) if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"
            raise EngineError(f"{config} cannot be used: {what}", todo="build the engine again") from e
        return cls(path, model, build, tuple(listed["files"]))


def engine_config(model: ModelConfig, build: BuildConfig) -> dict[str, Any]:
    """Content of an engine's config.json, in TensorRT-LLM's shape plus a ``shadowkv`` section."""
    return {
        "version": __version__,
        "pretrained_config": model.to_pretrained_config(build.dtype),
        "build_config": {
            "max_input_len": build.max_seq_len,
            "max_seq_len": build.max_seq_len,
            "max_batch_size": build.max_batch_size,
            "max_beam_width": 1,
            "max_num_tokens": build.max_num_tokens,
            "strongly_typed": True,
            "backend": build.backend,
            "compute_capabilities": list(build.compute_capabilities),
        },
        "shadowkv": build.shadowkv.to_dict(),
    }


def _is_of_trtllm_build(path: Path) -> bool:
    return os.path.isfile(path / names.ENGINE_FILE) and not os.path.lexists(path / names.MANIFEST_FILE)


def _of_trtllm_build(path: Path) -> EngineDirectory:
    """Read config.json as TensorRT-LLM 0.15 to 1.2 writes it for the class of ``trtllm_model.py``.

    Raises:
        EngineError: no such file, one of another version or of another class, or an engine that is split over ranks.
    """
    config = path / names.CONFIG_FILE
    again = "build it with trtllm-build and the class file of trtllm-shadowkv model-file (docs/trtllm.md)"
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "builder_config" in data:
            raise EngineError(f"{config} has a builder_config", "build_config, as TensorRT-LLM 0.15 writes it", again)
        pretrained, limits = data["pretrained_config"], JsonReader(data["build_config"], f"{config}: build_config")
        if pretrained.get("shadowkv") is None:
            raise EngineError(f"{config} has no section shadowkv: {path} is another model class's engine", todo=again)
        model = model_config(pretrained, f"{config}: pretrained_config")
        if (ranks := tensor_parallel_size(pretrained, str(config))) != 1:
            raise EngineError(f"{path} is split over {ranks} ranks", "an engine of one", again)
        build = BuildConfig(
            dtype=pretrained["dtype"],
            max_batch_size=limits.integer("max_batch_size"),
            max_seq_len=limits.integer("max_seq_len"),
            max_num_tokens=limits.integer("max_num_tokens"),
            backend="tensorrt",
            shadowkv=ShadowKVConfig.from_dict(pretrained["shadowkv"], f"{config}: shadowkv"),
        )
        files = tuple(sorted(p.name for p in path.iterdir() if p.is_file()))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        if isinstance(e, EngineError):
            raise
        what = str(e) if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"
        raise EngineError(f"{config} cannot be used: {what}", todo=again) from e
    return EngineDirectory(path, model, build, files)
