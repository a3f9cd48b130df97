"""TensorRT-LLM's description of a model: a checkpoint's config.json, ``pretrained_config`` in an engine's.

Both generations of its keys are read: experts as ``moe_num_experts`` or in a section ``moe``, a tied head as
``share_embedding_table`` or ``tie_word_embeddings``, the kind of RoPE as ``type`` or ``rope_type``, quantisation as
``quant_mode`` or in a section ``quantization``.
"""

from __future__ import annotations

from typing import Any

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.models import ARCHITECTURES, ModelConfig

__all__ = ["check_split", "model_config", "pretrained_config", "tensor_parallel_size"]

_OURS = "ShadowKVForCausalLM"
"""Architecture of the class file for trtllm-build: a Llama."""
_CONVERT = "convert the original model with trtllm-shadowkv convert-checkpoint"
_NEUTRAL: dict[str, Any] = {
    "residual_mlp": False,
    "fc_after_embed": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "layer_idx_offset": 0,
    "embedding_multiplier": 1,
    "attention_multiplier": 1,
    "residual_multiplier": 1,
    "output_multiplier_scale": 1,
    "mup_width_multiplier": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_logn_attn": False,
    "rotary_pct": 1,
    "num_kv_heads_per_layer": None,
    "remove_duplicated_kv_heads": False,
    "is_pruned": False,
    "has_partial_lora_mask": False,
    "max_draft_len": 0,
    "quant_mode": 0,
}
"""Keys that change what a model computes or what its weights are, each with the value that changes nothing."""


def model_config(pretrained: Any, where: str) -> ModelConfig:
    """A model's shape from TensorRT-LLM's description of it; ``where`` names that in errors.

    Sizes are those of the whole model, whatever ``mapping.tp_size`` says (:func:`tensor_parallel_size`). End tokens are
    there only where :func:`pretrained_config` wrote them: TensorRT-LLM does not.

    Raises:
        ConfigError: no mapping, a missing or bad value, or a model that is not supported: another architecture or
            activation, quantisation, experts, a sliding window, LoRA, pipeline or context parallelism.
    """
    r = JsonReader(pretrained, where)
    name = pretrained.get("architecture")
    if name == _OURS:
        name = "LlamaForCausalLM"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise r.error("architecture", f"one of {', '.join((*ARCHITECTURES, _OURS))}", "other models are not supported")
    if pretrained.get("hidden_act") != "silu":  # absent, TensorRT-LLM takes gelu
        raise r.error("hidden_act", "'silu'", "another activation is not supported")
    for key, neutral in _NEUTRAL.items():
        r.exactly(key, neutral, "such a model")
    _refuse_quantization(r)
    _refuse_experts(r)
    _refuse_windows_and_lora(r)
    tensor_parallel_size(pretrained, where)
    heads = r.integer("num_attention_heads")
    data = {**pretrained, "architecture": name}
    if pretrained.get("head_size") is None:
        data["head_size"] = r.integer("hidden_size") // heads
    # Its Qwen3 has these norms by its name; the key stays false.
    data["qk_layernorm"] = r.flag("qk_layernorm", False) or ARCHITECTURES[name].qk_norm
    data["tie_word_embeddings"] = r.flag("tie_word_embeddings", False) or r.flag("share_embedding_table", False)
    return ModelConfig.from_pretrained_config(data, where)


def tensor_parallel_size(pretrained: Any, where: str) -> int:
    """Over how many ranks the weights are split; 1 where nothing is said.

    Raises:
        ConfigError: ``mapping`` is no mapping of sizes, splits layers or contexts, or sizes that cannot be split so.
    """
    r = JsonReader(pretrained, where)
    m = JsonReader(pretrained.get("mapping") or {}, f"{where}: mapping")
    for key, what in (("pp_size", "pipeline"), ("cp_size", "context")):
        if m.integer(key, 1) != 1:
            raise m.error(key, "1", f"{what} parallelism is not supported")
    size = m.integer("tp_size", 1)
    if m.integer("world_size", size) != size:
        raise m.error("world_size", f"{size}, the tp_size")
    heads = r.integer("num_attention_heads")
    check_split(heads, r.integer("num_key_value_heads", heads), r.integer("intermediate_size"), size, where)
    return size


def check_split(heads: int, kv_heads: int, inner: int, tp_size: int, where: str) -> None:
    """Raise :class:`ConfigError` unless TensorRT-LLM can split these numbers over ``tp_size`` ranks."""
    for count, what in ((heads, "attention heads"), (inner, "columns between the MLP's products")):
        if count % tp_size:
            raise ConfigError(f"{where}: {count} {what} with tp_size {tp_size}", f"a tp_size that divides {count}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"{where}: {kv_heads} key/value heads with tp_size {tp_size}", "one to divide the other without remainder"
        )


def pretrained_config(model: ModelConfig, dtype: str, tp_size: int = 1) -> dict[str, Any]:
    """The config.json of a checkpoint of this model: the inverse of :func:`model_config`.

    Args:
        dtype: float32, float16 or bfloat16.
        tp_size: ranks that the weights are split over.

    Raises:
        ConfigError: the model cannot be split so.
    """
    check_split(model.num_heads, model.num_kv_heads, model.intermediate_size, tp_size, model.architecture)
    data = model.to_pretrained_config(dtype)
    data["embedding_sharding_dim"] = 0
    data["mapping"] = {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    if model.architecture.startswith("Qwen"):  # its class for them reads these, without defaults
        data["qwen_type"] = model.architecture.removesuffix("ForCausalLM").lower()
        data["seq_length"] = 8192  # of no effect without use_logn_attn
    return data


def _refuse_quantization(r: JsonReader) -> None:
    section = r.data.get("quantization")
    q = JsonReader({} if section is None else section, f"{r.where}: quantization")
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if q.data.get(key) is not None:
            raise q.error(key, "null: float32, float16 or bfloat16 weights", _CONVERT)


def _refuse_experts(r: JsonReader) -> None:
    section = r.data.get("moe")
    moe = JsonReader({} if section is None else section, f"{r.where}: moe")
    for reader, key in ((moe, "num_experts"), (r, "moe_num_experts")):
        if reader.data.get(key):
            raise reader.error(key, "0", "mixtures of experts are not supported")


def _refuse_windows_and_lora(r: JsonReader) -> None:
    if r.flag("use_sliding_window", r.data.get("sliding_window") is not None):
        key = "sliding_window" if r.data.get("sliding_window") is not None else "use_sliding_window"
        raise r.error(key, "none", "sliding-window attention is not supported")
    for key in ("lora_config", "lora_target_modules"):
        if r.data.get(key):
            raise r.error(key, "none", "LoRA is not supported: merge it into the weights")
