"""The architectures this package serves, as one table of traits, and a model's shape as a frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.json_reader import JsonReader
from trtllm_shadowkv.rope import RopeConfig, rope_from_section

__all__ = ["ARCHITECTURES", "ModelConfig", "RopeConfig", "Traits"]


@dataclass(frozen=True)
class Traits:
    """What an architecture's name says that its config.json does not (transformers' ``modeling_*.py``).

    Attributes:
        qkv_bias, output_bias, mlp_bias: whether these projections have a bias; None: the configuration decides.
        qk_norm: RMS norm over the head size on queries and keys, before RoPE.
        sliding_window: the key that puts a sliding window to use, "" where there is none.
        head_size: the head size where head_dim is absent; None: hidden_size / num_attention_heads.
        bos_token_id, eos_token_id: meaning of these keys where they are absent.
    """

    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    sliding_window: str = ""
    head_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(None, None, None, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": Traits(False, False, False, sliding_window="sliding_window", bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": Traits(True, False, False, sliding_window="use_sliding_window"),
    "Qwen3ForCausalLM": Traits(None, None, False, qk_norm=True, sliding_window="use_sliding_window", head_size=128),
}


def _traits(r: JsonReader, name: Any) -> Traits:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"{r.where}: the architecture is {name!r}", f"one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only model. Sizes are in elements, ``max_position_embeddings`` in tokens.

    Attributes:
        architecture: a key of :data:`ARCHITECTURES`.
        tied: the output head is the token embedding.
        qkv_bias, output_bias, mlp_bias, qk_norm: see :class:`Traits`.
        eos_token_ids: tokens that end a generation; may be empty.

    Raises:
        ConfigError: fields that contradict each other or the architecture.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"the architecture is {self.architecture!r}", f"one of {', '.join(ARCHITECTURES)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads over {self.num_kv_heads} key/value heads",
                "a multiple of the number of key/value heads",
            )
        if self.head_size % 2:
            raise ConfigError(f"the head size is {self.head_size}", "an even number, because RoPE turns pairs")
        traits = ARCHITECTURES[self.architecture]
        for name in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm"):
            if getattr(traits, name) not in (None, getattr(self, name)):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", f"{getattr(traits, name)} for {self.architecture}"
                )
        if traits.qkv_bias is None and self.qkv_bias != self.output_bias:
            raise ConfigError(
                f"qkv_bias is {self.qkv_bias} and output_bias is {self.output_bias}",
                f"both or neither for {self.architecture}",
            )

    @property
    def key_width(self) -> int:
        """Key (or value) elements of one token in one layer, all heads together."""
        return self.num_kv_heads * self.head_size

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str) -> ModelConfig:
        """From the content of a Hugging Face config.json, transformers 4 or 5; ``where`` names it in errors.

        Absent keys mean what they mean to transformers, except that shapes are never guessed.

        Raises:
            ConfigError: an unsupported architecture or feature, a missing key or a bad value.
        """
        r = JsonReader(config, where)
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        traits = _traits(r, name)
        r.exactly("hidden_act", "silu", "another activation")
        r.exactly("partial_rotary_factor", 1, "rotating a part of the head")
        if config.get("quantization_config"):
            raise ConfigError(
                f"{where} has a quantization_config", "float32, float16 or bfloat16 weights", "use the original model"
            )
        if traits.sliding_window == "sliding_window" and config.get("sliding_window", "absent (4096)") is not None:
            raise r.error("sliding_window", "null", "sliding-window attention is not supported (absent means 4096)")
        if traits.sliding_window == "use_sliding_window" and r.flag("use_sliding_window", False):
            raise r.error("use_sliding_window", "false", "sliding-window attention is not supported")
        layer_types = config.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise r.error("layer_types", "full_attention in every layer", "other attention is not supported")

        hidden, heads = r.integer("hidden_size"), r.integer("num_attention_heads")
        head_size = config.get("head_dim", traits.head_size)
        if head_size is None:
            if hidden % heads:
                raise r.error("head_dim", f"a head size, because {hidden} / {heads} heads is no whole number")
            head_size = hidden // heads
        else:
            head_size = r.integer("head_dim", head_size)
        attention_bias = r.flag("attention_bias", False)
        context = r.integer("max_position_embeddings")
        sections = [config[k] for k in ("rope_parameters", "rope_scaling") if config.get(k) is not None]
        ropes = [rope_from_section(s, r, "rope_theta", context) for s in sections or [None]]
        if len(set(ropes)) > 1:
            raise ConfigError(f"{where}: rope_parameters and rope_scaling contradict each other", "one of them")
        return _located(
            where,
            architecture=name,
            hidden_size=hidden,
            intermediate_size=r.integer("intermediate_size"),
            num_layers=r.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=r.integer("num_key_value_heads", heads),
            head_size=head_size,
            vocab_size=r.integer("vocab_size"),
            max_position_embeddings=context,
            rms_norm_eps=r.positive("rms_norm_eps"),
            rope=ropes[0],
            tied=r.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            output_bias=attention_bias if traits.output_bias is None else traits.output_bias,
            mlp_bias=r.flag("mlp_bias", False) if traits.mlp_bias is None else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            eos_token_ids=r.token_ids("eos_token_id", traits.eos_token_id),
            bos_token_id=r.token_id("bos_token_id", traits.bos_token_id),
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its Hugging Face name, matrices as (out, in); ``lm_head.weight`` only when not tied."""
        hidden, query = self.hidden_size, self.num_heads * self.head_size
        linears = {
            "self_attn.q_proj": (query, hidden, self.qkv_bias),
            "self_attn.k_proj": (self.key_width, hidden, self.qkv_bias),
            "self_attn.v_proj": (self.key_width, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, query, self.output_bias),
            "mlp.gate_proj": (self.intermediate_size, hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate_size, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, self.intermediate_size, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            shapes[f"{layer}input_layernorm.weight"] = (hidden,)
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (self.head_size,)
                shapes[f"{layer}self_attn.k_norm.weight"] = (self.head_size,)
            shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def to_pretrained_config(self, dtype: str) -> dict[str, Any]:
        """The ``pretrained_config`` section of an engine's config.json, with TensorRT-LLM's keys.

        ``eos_token_id`` (a list) and ``bos_token_id`` are ours. ``attn_bias`` is the bias of Q, K and V; that of
        the output projection follows from the architecture.
        """
        scaling: dict[str, Any] | None = None
        if self.rope.kind != "default":
            scaling = {"rope_type": self.rope.kind, "factor": self.rope.factor}
        if scaling and self.rope.kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                scaling[key] = getattr(self.rope, key)
        return {
            "architecture": self.architecture,
            "dtype": dtype,
            "logits_dtype": "float32",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "norm_epsilon": self.rms_norm_eps,
            "qk_layernorm": self.qk_norm,
            "position_embedding_type": "rope_gpt_neox",
            "rotary_embedding_dim": self.head_size,
            "rotary_base": self.rope.theta,
            "rotary_scaling": scaling,
            "attn_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied,
            "use_parallel_embedding": False,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            "eos_token_id": list(self.eos_token_ids),
            "bos_token_id": self.bos_token_id,
        }

    @classmethod
    def from_pretrained_config(cls, config: dict[str, Any], where: str) -> ModelConfig:
        """The inverse of :meth:`to_pretrained_config`; also reads a TensorRT-LLM checkpoint's config.json.

        Raises:
            ConfigError: as :meth:`from_hf`.
        """
        r = JsonReader(config, where)
        name = config.get("architecture")
        traits = _traits(r, name)
        head_size = r.integer("head_size")
        r.exactly("hidden_act", "silu", "another activation")
        r.exactly("position_embedding_type", "rope_gpt_neox", "another position embedding")
        r.exactly("rotary_embedding_dim", head_size, "rotating a part of the head")
        if config.get("quantization") is not None:
            JsonReader(config["quantization"], f"{where}: quantization").exactly("quant_algo", None, "quantization")
        attn_bias = r.flag("attn_bias", bool(traits.qkv_bias))
        heads, context = r.integer("num_attention_heads"), r.integer("max_position_embeddings")
        return _located(
            where,
            architecture=name,
            hidden_size=r.integer("hidden_size"),
            intermediate_size=r.integer("intermediate_size"),
            num_layers=r.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=r.integer("num_key_value_heads", heads),
            head_size=head_size,
            vocab_size=r.integer("vocab_size"),
            max_position_embeddings=context,
            rms_norm_eps=r.positive("norm_epsilon"),
            rope=rope_from_section(config.get("rotary_scaling"), r, "rotary_base", context),
            tied=r.flag("tie_word_embeddings", False),
            qkv_bias=attn_bias,
            output_bias=attn_bias if traits.output_bias is None else traits.output_bias,
            mlp_bias=r.flag("mlp_bias", bool(traits.mlp_bias)),
            qk_norm=r.flag("qk_layernorm", traits.qk_norm),
            eos_token_ids=r.token_ids("eos_token_id", None),
            bos_token_id=r.token_id("bos_token_id", None),
        )


def _located(where: str, **values: Any) -> ModelConfig:
    """Build a :class:`ModelConfig`; an error of its cross-field checks says where the values came from."""
    try:
        return ModelConfig(**values)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
