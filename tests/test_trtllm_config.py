"""TensorRT-LLM's description of a model, read and written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.rope import RopeConfig
from trtllm_shadowkv.trtllm_config import model_config, pretrained_config, tensor_parallel_size

# The keys that TensorRT-LLM 0.15 writes for a Llama, with values of our own.
OLD: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "vocab_size": 1001,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "hidden_act": "silu",
    "logits_dtype": "float32",
    "norm_epsilon": 1e-6,
    "runtime_defaults": None,
    "position_embedding_type": "rope_gpt_neox",
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "mapping": {
        "world_size": 2,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": 2,
        "pp_size": 1,
        "moe_tp_size": 2,
        "moe_ep_size": 1,
    },
    "quantization": {
        "quant_algo": None,
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "smoothquant_val": 0.5,
        "clamp_val": None,
        "use_meta_recipe": False,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": None,
    },
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
    "share_embedding_table": False,
    "head_size": 16,
    "qk_layernorm": False,
    "mlp_bias": False,
    "attn_bias": False,
    "rotary_base": 500000.0,
    "rotary_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "residual_mlp": False,
    "disable_weight_only_quant_plugin": False,
    "fc_after_embed": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "layer_idx_offset": 0,
    "moe": {"num_experts": 0, "moe_intermediate_size": 0, "top_k": 0, "normalization_mode": 1, "tp_mode": 0},
}
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=96,
    intermediate_size=192,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_size=16,
    vocab_size=1001,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 2048),
    tied=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
    bos_token_id=None,
)
# What 1.x adds, and how it names what 0.15 names otherwise.
NEW = {
    **{key: value for key, value in OLD.items() if key != "share_embedding_table"},
    "rotary_scaling": {**OLD["rotary_scaling"], "rope_type": "llama3"},
    "rotary_embedding_dim": 16,
    "tie_word_embeddings": False,
    "remove_duplicated_kv_heads": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "has_partial_lora_mask": False,
}
QWEN3 = {
    **OLD,
    "architecture": "Qwen3ForCausalLM",
    "rotary_scaling": None,
    "qwen_type": "qwen3",
    "seq_length": 8192,
    "use_logn_attn": False,
    "moe_intermediate_size": 0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("data", [OLD, NEW], ids=["0.15", "1.x"])
def test_both_generations(data: dict[str, Any]) -> None:
    assert model_config(data, "config.json") == LLAMA
    assert tensor_parallel_size(data, "config.json") == 2


def test_our_own_architecture_is_a_llama() -> None:
    assert model_config({**OLD, "architecture": "ShadowKVForCausalLM", "shadowkv": {"rank": 8}}, "x") == LLAMA


@pytest.mark.parametrize("key", ["tie_word_embeddings", "share_embedding_table"])
def test_a_tied_head(key: str) -> None:
    assert model_config({**OLD, key: True}, "x") == replace(LLAMA, tied=True)


def test_qwen3_has_head_norms_though_the_key_is_false() -> None:
    model = model_config(QWEN3, "x")
    assert (model.qk_norm, model.qkv_bias, model.output_bias, model.tied) == (True, False, False, True)


def test_qwen2_has_biases_and_legacy_keys_of_experts() -> None:
    legacy = {key: value for key, value in OLD.items() if key not in ("moe", "head_size", "mapping", "quantization")}
    data = {**legacy, "architecture": "Qwen2ForCausalLM", "attn_bias": True, "moe_num_experts": 0, "moe_top_k": 0}
    model = model_config(data, "x")
    assert (model.qkv_bias, model.output_bias, model.head_size) == (True, False, 16)
    assert tensor_parallel_size(data, "x") == 1


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        replace(LLAMA, tied=True, eos_token_ids=(2, 7), bos_token_id=1, rope=RopeConfig(1e4)),
        replace(LLAMA, architecture="MistralForCausalLM", rope=RopeConfig(1e4, "linear", 2.0)),
        replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True),
        replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True),
        replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    ],
)
def test_what_is_written_is_read_again(model: ModelConfig) -> None:
    data = json.loads(json.dumps(pretrained_config(model, "bfloat16", tp_size=2)))
    assert model_config(data, "config.json") == model
    assert tensor_parallel_size(data, "config.json") == 2
    assert (data["architecture"], data["dtype"]) == (model.architecture, "bfloat16")
    assert data["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert data.get("qwen_type") == {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(model.architecture)


MISSING = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "norm_epsilon")


@pytest.mark.parametrize("key", [*MISSING, "max_position_embeddings", "architecture", "hidden_act"])
def test_a_missing_field(key: str) -> None:
    data = {name: value for name, value in OLD.items() if name != key}
    with pytest.raises(ConfigError, match=f"^ckpt/config.json has no {key}.*; expected "):
        model_config(data, "ckpt/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GPTForCausalLM"}, "architecture is 'GPTForCausalLM'; expected one of Llama"),
        ({"architecture": ["LlamaForCausalLM"]}, r"architecture is \['LlamaForCausalLM'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; expected 'rope_gpt_neox'"),
        ({"quantization": {"quant_algo": "FP8"}}, "quantization: quant_algo is 'FP8'; expected null.*; convert the"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo is 'INT8'; expected null"),
        ({"quantization": 8}, "quantization holds int"),
        ({"quant_mode": 2}, "quant_mode is 2; expected 0"),
        ({"mapping": {"world_size": 2, "pp_size": 2}}, "mapping: pp_size is 2; expected 1; pipeline"),
        ({"mapping": {"cp_size": 2}}, "mapping: cp_size is 2; expected 1; context"),
        ({"mapping": {"tp_size": 2, "world_size": 4}}, "mapping: world_size is 4; expected 2, the tp_size"),
        ({"mapping": {"tp_size": 0}}, "tp_size is 0; expected a whole number from 1"),
        ({"mapping": {"tp_size": 4}}, "6 attention heads with tp_size 4; expected a tp_size that divides 6"),
        ({"mapping": {"tp_size": 3}}, "2 key/value heads with tp_size 3; expected one to divide the other"),
        ({"intermediate_size": 191}, "191 columns between the MLP's products with tp_size 2"),
        ({"moe": {"num_experts": 8, "top_k": 2}}, "moe: num_experts is 8; expected 0; mixtures of experts"),
        ({"moe_num_experts": 8}, "moe_num_experts is 8; expected 0"),
        ({"sliding_window": 4096}, "sliding_window is 4096; expected none; sliding-window"),
        ({"use_sliding_window": True}, "use_sliding_window is True; expected none"),
        ({"lora_target_modules": ["attn_qkv"]}, "lora_target_modules is .*; expected none; LoRA"),
        ({"attention_multiplier": 0.5}, "attention_multiplier is 0.5; expected 1"),
        ({"is_pruned": True}, "is_pruned is True; expected False"),
        ({"rotary_scaling": {"type": "yarn", "factor": 4.0}}, "the RoPE section asks for 'yarn'"),
        ({"qk_layernorm": True}, "qk_norm is True; expected False for LlamaForCausalLM"),
        ({"hidden_size": "96"}, "hidden_size is '96'; expected a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads is None; expected a whole number"),
    ],
)
def test_what_is_refused_and_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        model_config({**OLD, **changes}, "ckpt/config.json")
    assert str(error.value).startswith("ckpt/config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [None, [], "x"])
def test_no_mapping(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json holds .*; expected a JSON object"):
        model_config(data, "config.json")


def test_a_disabled_sliding_window_is_none() -> None:
    assert model_config({**OLD, "sliding_window": 4096, "use_sliding_window": False}, "x") == LLAMA


def test_a_model_that_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="6 attention heads with tp_size 5"):
        pretrained_config(LLAMA, "float16", tp_size=5)
