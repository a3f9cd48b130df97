"""Architecture traits, config.json in its old and new forms, and RoPE tables, against transformers."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.models import ModelConfig, RopeConfig

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OLD = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    **SIZES,
}
"""A config.json as transformers 4 wrote it."""

CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-wide": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"eos_token_id": [7, 8]}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "bos_token_id": 0}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 64}),
    "qwen3-biases": (Qwen3Config, Qwen3ForCausalLM, {"attention_bias": True}),
}


def hf_config(case: str, **changes: Any) -> Any:
    config_class, model_class, extra = CASES[case]
    return config_class(**SIZES | extra | changes, architectures=[model_class.__name__])


def old_dict(**changes: Any) -> dict[str, Any]:
    """:data:`OLD` with changes; a value of ``...`` removes the key."""
    return {k: v for k, v in (OLD | changes).items() if v is not ...}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_transformers(case: str) -> None:
    config = hf_config(case)
    with torch.device("meta"):
        state = CASES[case][1](config).state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert ModelConfig.from_hf(config.to_dict(), "config.json").weight_shapes() == shapes


@pytest.mark.parametrize("case", CASES)
def test_reads_what_transformers_writes(case: str) -> None:
    config = hf_config(case, rope_parameters={"rope_theta": 500_000.0, **LLAMA3})
    model = ModelConfig.from_hf(json.loads(config.to_json_string(use_diff=True)), "config.json")
    assert model == ModelConfig.from_hf(config.to_dict(), "config.json")
    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (96, 160, 3)
    assert (model.num_heads, model.num_kv_heads, model.group) == (6, 2, 3)
    assert model.head_size == getattr(config, "head_dim", 16)
    assert model.key_width == 2 * model.head_size
    assert (model.vocab_size, model.max_position_embeddings) == (300, 4096)
    assert model.rms_norm_eps == config.rms_norm_eps
    assert model.tied == config.tie_word_embeddings
    assert model.bos_token_id == config.bos_token_id
    eos = config.eos_token_id
    assert model.eos_token_ids == tuple([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert model.rope == RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert model.architecture == config.architectures[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, LLAMA3])
def test_round_trip_through_pretrained_config(case: str, rope: dict[str, Any]) -> None:
    model = ModelConfig.from_hf(hf_config(case, rope_parameters={"rope_theta": 12_345.6, **rope}).to_dict(), "x")
    section = json.loads(json.dumps(model.to_pretrained_config("bfloat16")))
    assert section["dtype"] == "bfloat16"
    assert ModelConfig.from_pretrained_config(section, "config.json") == model


def test_old_and_new_forms_agree() -> None:
    new = old_dict(torch_dtype=..., dtype="bfloat16", rope_parameters={"rope_theta": 5e5, **LLAMA3})
    legacy_section = {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    old = old_dict(rope_theta=500_000, rope_scaling=legacy_section)
    assert ModelConfig.from_hf(new, "new") == ModelConfig.from_hf(old, "old")
    both = old | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert ModelConfig.from_hf(both, "both") == ModelConfig.from_hf(old, "old")
    linear = ModelConfig.from_hf(old_dict(rope_scaling={"type": "linear", "factor": 4}), "linear")
    assert linear.rope == RopeConfig(10_000.0, "linear", 4.0)
    assert ModelConfig.from_hf(old_dict(rope_scaling=None), "null").rope == RopeConfig(10_000.0)


def test_absent_keys_mean_what_transformers_takes_them_for() -> None:
    read = ModelConfig.from_hf(old_dict(num_key_value_heads=..., head_dim=None), "x")
    assert (read.num_kv_heads, read.head_size, read.rope.theta) == (6, 16, 10_000.0)
    assert (read.bos_token_id, read.eos_token_ids, read.tied) == (1, (2,), False)
    read = ModelConfig.from_hf(old_dict(eos_token_id=None, bos_token_id=None), "x")
    assert (read.bos_token_id, read.eos_token_ids) == (None, ())
    # Qwen3's head size does not follow from its hidden size.
    assert ModelConfig.from_hf(old_dict(architectures=["Qwen3ForCausalLM"]), "x").head_size == Qwen3Config().head_dim
    assert LlamaConfig().bos_token_id == MistralConfig().bos_token_id == 1
    assert LlamaConfig().eos_token_id == MistralConfig().eos_token_id == 2
    assert Qwen2Config().eos_token_id is Qwen3Config().eos_token_id is None
    unstated = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert ModelConfig.from_hf(old_dict(rope_scaling=unstated), "x").rope.original_max_position_embeddings == 4096


def published(architecture: str, sizes: tuple[int, ...], **extra: Any) -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    return {
        "architectures": [architecture],
        **dict(zip(names, sizes, strict=True)),
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        **extra,
    }


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(
            published("LlamaForCausalLM", (4096, 14336, 32, 32, 8, 128_256), rope_theta=5e5, rope_scaling=LLAMA3),
            8_030_261_248,
            id="Llama-3.1-8B",
        ),
        pytest.param(published("LlamaForCausalLM", (4096, 11008, 32, 32, 4, 64_000)), 6_061_035_520, id="Yi-6B"),
        pytest.param(
            published("MistralForCausalLM", (4096, 14336, 32, 32, 8, 32_768), sliding_window=None),
            7_248_023_552,
            id="Mistral-7B-v0.3",
        ),
        pytest.param(
            published(
                "Qwen2ForCausalLM", (3584, 18944, 28, 28, 4, 152_064), sliding_window=131_072, use_sliding_window=False
            ),
            7_615_616_512,
            id="Qwen2.5-7B",
        ),
        pytest.param(
            published("Qwen3ForCausalLM", (4096, 12288, 36, 32, 8, 151_936), head_dim=128), 8_190_735_360, id="Qwen3-8B"
        ),
    ],
)
def test_published_models_have_their_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    shapes = ModelConfig.from_hf(config, "config.json").weight_shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.parametrize("head_size", [16, 64, 96, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        {
            **LLAMA3,
            "factor": 32.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 6.0,
            "original_max_position_embeddings": 333,
        },
    ],
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 5e6])
def test_inverse_frequencies_are_those_of_transformers(head_size: int, rope: dict[str, Any], theta: float) -> None:
    config = hf_config("llama", head_dim=head_size, rope_parameters={"rope_theta": theta, **rope})
    ours = ModelConfig.from_hf(config.to_dict(), "x").rope.inverse_frequencies(head_size)
    assert len(ours) == head_size // 2
    assert ours[0] == 1.0 / (rope.get("factor", 1.0) if rope["rope_type"] == "linear" else 1.0)
    # transformers raises theta to a power in float32, which costs it a few units in the last place.
    np.testing.assert_allclose(ours, LlamaRotaryEmbedding(config).inv_freq.double().numpy(), rtol=3e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM, MistralForCausalLM"),
    "no architecture": ({"architectures": ...}, "architecture is None"),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "one of LlamaForCausalLM"),
    "architectures no list": ({"architectures": {"LlamaForCausalLM": 1}}, "one of LlamaForCausalLM"),
    "mistral window": ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window is 4096"),
    "mistral window absent": ({"architectures": ["MistralForCausalLM"]}, "no sliding_window"),
    "qwen2 window": ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window is True"),
    "qwen3 window": ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window is True"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "layer types no list": ({"layer_types": 3}, "layer_types"),
    "layer types of lists": ({"layer_types": [["full_attention"]]}, "layer_types"),
    "activation": ({"hidden_act": "gelu"}, "'silu'"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}}, "default, linear, llama3"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "default, linear, llama3"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "short_factor": []}}, "default, linear, llama3"),
    "mrope": ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "'default' and 'mrope'"),
    "null rope": ({"rope_scaling": {"rope_type": None}}, "default, linear, llama3"),
    "unhashable rope": ({"rope_scaling": {"rope_type": ["linear"]}}, "default, linear, llama3"),
    "nested rope": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
    "rope list": ({"rope_parameters": [1]}, "holds list"),
    "two ropes": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "contradict",
    ),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "no factor"),
    "linear factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    "llama3 without low": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        "no low_freq",
    ),
    "llama3 high below low": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "more than low_freq_factor"),
    "llama3 context": ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": "8192"}}, "'8192'"),
    "theta": ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    "theta NaN": ({"rope_theta": math.nan}, "rope_theta is nan"),
    "theta infinite": ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta is inf"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial rotary inside": ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "odd head": ({"head_dim": 15}, "even number"),
    "head zero": ({"head_dim": 0}, "head_dim is 0"),
    "head unknown": ({"hidden_size": 97}, "no head_dim"),
    "kv heads": ({"num_key_value_heads": 4}, "6 attention heads over 4"),
    "eps": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    "eps absent": ({"rms_norm_eps": ...}, "no rms_norm_eps"),
    "eos string": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos negative": ({"eos_token_id": [2, -1]}, "eos_token_id"),
    "bos list": ({"bos_token_id": [1, 2]}, "one token id"),
    "tied string": ({"tie_word_embeddings": "yes"}, "true or false"),
    "bias number": ({"attention_bias": 1}, "attention_bias is 1"),
}
BAD_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    f"{key} {value!r}": ({key: value}, key)
    for key in SIZES
    for value in (..., 0, -8, 8.0, "8", True, math.nan, 2**40, [8])
    if (key, value) != ("num_key_value_heads", ...)
}


@pytest.mark.parametrize("case", REFUSED | BAD_SIZES)
def test_refusals_name_the_fault_and_the_place(case: str) -> None:
    changes, message = (REFUSED | BAD_SIZES)[case]
    with pytest.raises(ConfigError) as e:
        ModelConfig.from_hf(old_dict(**changes), "models/x/config.json")
    assert message in str(e.value)
    assert str(e.value).startswith("models/x/config.json")
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("data", [None, [], "LlamaForCausalLM", 3])
def test_something_else_than_an_object_is_refused(data: Any) -> None:
    for read in (ModelConfig.from_hf, ModelConfig.from_pretrained_config):
        with pytest.raises(ConfigError, match="JSON object"):
            read(data, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "PhiForCausalLM"}, "one of LlamaForCausalLM"),
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo is 'FP8'"),
        ({"quantization": 3}, "holds int"),
        ({"position_embedding_type": "alibi"}, "rope_gpt_neox"),
        ({"rotary_embedding_dim": 8}, "rotary_embedding_dim is 8"),
        ({"rotary_scaling": {"type": "yarn"}}, "default, linear, llama3"),
        ({"qk_layernorm": True}, "qk_norm is True"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
    ],
)
def test_altered_engine_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    section = ModelConfig.from_hf(OLD, "x").to_pretrained_config("float16")
    with pytest.raises(ConfigError, match=r"^engine/config\.json") as e:
        ModelConfig.from_pretrained_config(section | changes, "engine/config.json")
    assert message in str(e.value)


def test_reads_a_tensorrt_llm_configuration_without_our_keys() -> None:
    model = ModelConfig.from_hf(old_dict(eos_token_id=None, bos_token_id=None), "x")
    section = model.to_pretrained_config("float16")
    for key in ("eos_token_id", "bos_token_id", "attn_bias", "mlp_bias", "rotary_scaling", "tie_word_embeddings"):
        del section[key]
    assert ModelConfig.from_pretrained_config(section, "x") == model


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"qk_norm": True}, {"architecture": "Qwen2ForCausalLM"}, {"architecture": "MyModel"}],
)
def test_fields_that_contradict_the_architecture_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(ModelConfig.from_hf(OLD, "x"), **changes)


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = "import sys, trtllm_shadowkv.models; print({'torch', 'numpy', 'transformers'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
