"""GPUs and models by name, by numbers and from a directory."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import CheckpointError, ConfigError
from trtllm_shadowkv.footprint import sequence_bytes
from trtllm_shadowkv.hardware import (
    GPUS,
    MODELS,
    ModelShape,
    custom_gpu,
    gpu_by_name,
    model_by_name,
    model_from_directory,
    weight_bytes,
)

LLAMA, H200 = MODELS["llama-3.1-8b"], GPUS["h200"]
SMALL = ModelShape(
    num_layers=3, num_heads=6, num_kv_heads=2, head_size=16, hidden_size=96, intermediate_size=128, vocab_size=100
)


class TestHardware:
    def test_published_sizes(self) -> None:
        billions = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "mistral-7b": 7.25, "yi-9b-200k": 8.83}
        billions |= {"qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "smollm2-135m": 0.1345}
        for name, size in billions.items():
            assert weight_bytes(MODELS[name]) / 2e9 == pytest.approx(size, rel=0.002), name

    def test_model_directory(self, tmp_path: Path) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = model_from_directory(tmp_path)
        assert weight_bytes(found) == weight_bytes(LLAMA)
        assert sequence_bytes(found, ShadowKVConfig(), 50_000) == sequence_bytes(LLAMA, ShadowKVConfig(), 50_000)
        for text in ("{", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(CheckpointError, match=r"config\.json"):
                model_from_directory(tmp_path)
        with pytest.raises(CheckpointError, match="cannot read"):
            model_from_directory(tmp_path / "none")

    def test_names(self) -> None:
        assert gpu_by_name("H200") is H200
        with pytest.raises(ConfigError, match="did you mean 'a100-80gb'"):
            gpu_by_name("a100-80g")
        with pytest.raises(ConfigError, match=re.escape("did you mean 'llama-3.1-8b'")):
            model_by_name("llama3.1-8b")

    def test_custom_gpu(self) -> None:
        altered = custom_gpu("h100", memory=94e9, bandwidth=None)
        assert (altered.memory, altered.bandwidth, altered.source) == (94e9, GPUS["h100"].bandwidth, "given")
        assert custom_gpu("h100", memory=None) is GPUS["h100"]
        with pytest.raises(ConfigError, match="link, tensor is not given"):
            custom_gpu(None, memory=24e9, bandwidth=900e9)

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 5.0, 1e30])
    def test_bad_figures(self, value: float) -> None:
        for key in ("memory", "bandwidth", "link", "tensor"):
            with pytest.raises(ConfigError, match=key):
                custom_gpu("h200", **{key: value})

    @pytest.mark.parametrize(
        "bad", [{"num_layers": 0}, {"head_size": -1}, {"vocab_size": True}, {"num_kv_heads": 5}, {"hidden_size": 1.5}]
    )
    def test_bad_shapes(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            replace(SMALL, **bad)
