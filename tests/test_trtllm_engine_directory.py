"""Engine directories that trtllm-build wrote: config.json of TensorRT-LLM, an engine, no manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny
from trtllm_shadowkv.build.builder import refresh_engine, verify_engine
from trtllm_shadowkv.checkpoint import Checkpoint
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError
from trtllm_shadowkv.trtllm_config import pretrained_config

SETTINGS = ShadowKVConfig(rank=16, top_k=32, outliers=4)
# What the two generations write beside what is read: enumerations by name or in lower case, plugins as a section.
OLD = {"kv_cache_type": "DISABLED", "plugin_config": {"dtype": "bfloat16", "gpt_attention_plugin": None}}
NEW = {"kv_cache_type": "disabled", "plugin_config": {"paged_kv_cache": False}, "lora_config": {"lora_dir": []}}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    with Checkpoint.open(write_tiny(tmp_path / "model")) as checkpoint:
        model = checkpoint.config

    def write(extra: dict[str, Any] | None = None, **changes: Any) -> Path:
        pretrained = pretrained_config(model, "bfloat16") | {"shadowkv": SETTINGS.to_dict()}
        limits = {"max_input_len": 1024, "max_seq_len": 2048, "max_batch_size": 4, "max_beam_width": 1}
        limits |= {"max_num_tokens": 512, "strongly_typed": True} | (extra or {})
        data = {"version": "0.15.0", "pretrained_config": pretrained, "build_config": limits}
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                data[section][name] = value  # type: ignore[index]
            else:
                data[key] = value
        engine = tmp_path / "engine"
        engine.mkdir(exist_ok=True)
        (engine / "config.json").write_text(json.dumps(data))
        (engine / "rank0.engine").write_bytes(b"compiled")
        return engine

    return write


@pytest.mark.parametrize("extra", [OLD, NEW], ids=["0.15", "1.2"])
def test_it_is_one_of_ours(written: Callable[..., Path], extra: dict[str, Any]) -> None:
    engine = EngineDirectory.open(written(extra))
    build = engine.build
    assert (engine.has_engine, engine.has_onnx, engine.has_manifest) == (True, False, False)
    assert (build.dtype, build.max_batch_size, build.max_seq_len, build.max_num_tokens) == ("bfloat16", 4, 2048, 512)
    assert (build.backend, build.shadowkv) == ("tensorrt", SETTINGS)
    assert engine.model.num_layers >= 1
    for act in (verify_engine, refresh_engine):
        with pytest.raises(EngineError, match=r"has no (manifest\.json|model\.onnx); expected"):
            act(engine.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"builder_config": {}}, "has a builder_config; expected build_config"),
        ({"build_config": None}, "build_config holds NoneType|build_config"),
        ({"build_config__max_seq_len": None}, "max_seq_len"),
        ({"build_config__max_batch_size": "8"}, "max_batch_size is '8'"),
        ({"pretrained_config__shadowkv": None}, "has no section shadowkv: .* is another model class's engine"),
        ({"pretrained_config__shadowkv": {"rank": 15}}, "shadowkv.rank is 15"),
        ({"pretrained_config__dtype": "float8"}, "dtype is 'float8'"),
        ({"pretrained_config__architecture": "GPTForCausalLM"}, "architecture is 'GPTForCausalLM'"),
        ({"pretrained_config__mapping": {"tp_size": 2, "world_size": 2, "pp_size": 1}}, "is split over 2 ranks"),
        ({"pretrained_config__quantization": {"quant_algo": "FP8"}}, "quant_algo is 'FP8'"),
    ],
)
def test_what_cannot_be_used_is_one_line(written: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as e:
        EngineDirectory.open(written(**changes))
    assert "\n" not in str(e.value)
    assert "trtllm-build" in str(e.value)


def test_no_json_and_no_file(written: Callable[..., Path]) -> None:
    engine = written()
    (engine / "config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be used: JSONDecodeError"):
        EngineDirectory.open(engine)
    (engine / "config.json").unlink()
    with pytest.raises(EngineError, match="cannot be used: FileNotFoundError"):
        EngineDirectory.open(engine)
