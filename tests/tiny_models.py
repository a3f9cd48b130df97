"""Random tiny Hugging Face model directories, written by transformers itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def write_tiny(
    directory: Path,
    architecture: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 256,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    max_positions: int = 16384,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write a model of random weights to ``directory`` (config.json, safetensors) and return it.

    Query and key projections are scaled so that attention scores spread by several units: with transformers' own
    initialisation every token gets nearly the same weight, and a selection of tokens could hardly be wrong.
    Norm weights are near 1 and biases near 0, but none is exactly that, so that a forgotten one shows.

    Args:
        rope_scaling: extra RoPE parameters, e.g. ``{"rope_type": "linear", "factor": 4.0}``.
        attention_bias, mlp_bias: only where the architecture knows them (Qwen2 always has its q, k, v biases).
        shards: more than 1: at least so many files with an index.
    """
    config_class, model_class = CLASSES[architecture]
    extra: dict[str, Any] = {"mistral": {"sliding_window": None}}.get(architecture, {})
    if architecture in ("llama", "qwen3"):
        extra["attention_bias"] = attention_bias
    elif attention_bias:
        raise ValueError(f"{architecture} has no attention_bias")
    if architecture == "llama":
        extra["mlp_bias"] = mlp_bias
    elif mlp_bias:
        raise ValueError(f"{architecture} has no mlp_bias")
    if head_dim is not None or architecture == "qwen3":
        extra["head_dim"] = head_dim or hidden // heads
    config = config_class(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"} | (rope_scaling or {}),
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _randomise(name, weight)
    torch.set_rng_state(before)
    model = model.to(dtype).eval()  # type: ignore[arg-type]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=math.ceil(size / shards) if shards > 1 else "50GB")
    found = len(list(directory.glob("*.safetensors")))
    assert (found == 1) if shards == 1 else (found >= shards), f"{found} files for {shards} shards"
    return directory


def _randomise(name: str, weight: torch.Tensor) -> None:
    if weight.dim() == 1:
        mean = 0.0 if name.endswith("bias") else 1.5 if ".q_norm" in name or ".k_norm" in name else 1.0
        torch.nn.init.normal_(weight, mean, 0.2)
    elif "embed_tokens" in name or "lm_head" in name:
        torch.nn.init.normal_(weight, 0.0, 1.0 if "embed_tokens" in name else 0.2)
    else:
        gain = 1.5 if ".q_proj" in name or ".k_proj" in name else 1.0
        torch.nn.init.normal_(weight, 0.0, gain / math.sqrt(weight.shape[1]))
