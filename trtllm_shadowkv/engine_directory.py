"""An engine directory: what ``build`` writes and the runtime loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_shadowkv import __version__, names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, EngineError
from trtllm_shadowkv.models import ModelConfig


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
    def has_onnx(self) -> bool:
        return names.ONNX_FILE in self.files

    @property
    def has_engine(self) -> bool:
        return names.ENGINE_FILE in self.files

    @classmethod
    def open(cls, path: str | Path, *, whole: bool = False) -> EngineDirectory:
        """Check a directory against its manifest and read its configuration.

        Args:
            whole: hash every byte, as ``verify`` does.

        Raises:
            EngineError: no engine directory, another schema, a missing or altered file.
        """
        try:
            path = Path(path)
        except TypeError as e:
            raise EngineError(f"an engine directory of type {type(path).__name__}", "a path, as str or Path") from e
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
