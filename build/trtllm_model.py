"""The file for ``trtllm-build --model_cls_file``: a Llama whose attention is the three ShadowKV plugins.

trtllm-build executes it as a module of its own before it reads the checkpoint; ``trtllm-shadowkv model-file`` prints
its path. The network is that of :mod:`trtllm_shadowkv.build.llama_graph`, made of TensorRT-LLM's layers, with the
inputs, output and profiles of our own builder. TensorRT-LLM 0.15 to 1.2.1; docs/trtllm.md says what ran.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import fields
from functools import wraps
from typing import Any

import numpy as np
import tensorrt as trt
import tensorrt_llm.builder as trtllm_builder
from tensorrt_llm._common import default_trtnet
from tensorrt_llm.functional import Tensor, _create_tensor, cast, gather_last_token_logits, matmul, rms_norm, silu
from tensorrt_llm.layers import ColumnLinear, Embedding, RmsNorm, RowLinear
from tensorrt_llm.models import MODEL_MAP, LLaMAConfig, PretrainedModel
from tensorrt_llm.module import Module, ModuleList

from trtllm_shadowkv import library, names
from trtllm_shadowkv.build.tensorrt_compile import shapes
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig, load_build_config
from trtllm_shadowkv.errors import CheckpointError, ConfigError, MissingDependencyError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.trtllm_checkpoint import ROPE_TABLES
from trtllm_shadowkv.trtllm_config import model_config

ARCHITECTURE = "ShadowKVForCausalLM"
"""Name in MODEL_MAP, and the class's."""

ENVIRONMENT = "TRTLLM_SHADOWKV_CONFIG"
"""Environment variable that names a YAML file with a section ``shadowkv``, for checkpoints that have none."""

_VERSIONS = "TensorRT-LLM 0.15 to 1.2.1"
_WHERE = "the checkpoint's config.json"
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.vocab_embedding.weight"
_LARGEST_HALF = 65504.0
_F32, _F16 = "float32", "float16"
_OPS = (names.LANDMARK_TOPK, names.KEY_RECONSTRUCT, names.SPARSE_ATTENTION)

# What must be off in TensorRT-LLM's BuildConfig, and what to do about it.
_BUILD_OFF = {
    "gather_context_logits": "leave --gather_context_logits away: a context pass can return 128 positions' logits",
    "gather_generation_logits": "leave --gather_generation_logits away: logits are an output anyway",
    "max_prompt_embedding_table_size": "leave --max_prompt_embedding_table_size away: there is no prompt tuning",
    "max_draft_len": "leave --max_draft_len away: there is no speculative decoding",
    "force_num_profiles": "unset BUILDER_FORCE_NUM_PROFILES: both profiles are needed",
    "use_refit": "an engine is built whole",
    "use_strip_plan": "leave --strip_plan away: an engine holds its weights",
    "weight_streaming": "leave --weight_streaming away: a decode step is a captured graph, which it forbids",
    "enable_debug_output": "leave --enable_debug_output away: no layer has debug outputs",
    "use_mrope": "build without it: positions are plain numbers",
}

# The same in its PluginConfig; the flag is --NAME.
_NO_PLUGIN = "disable: our runtime does not load TensorRT-LLM's plugin library"
_PLUGINS_OFF = {
    "gpt_attention_plugin": "disable: the ShadowKV plugins are the attention",
    "use_paged_context_fmha": "disable: the ShadowKV plugins read prompts and keep their own pages",
    "multiple_profiles": "disable: an engine has two profiles, for generation and for context passes",
    "lora_plugin": "disable: there is no LoRA",
    "dora_plugin": "disable: there is no LoRA",
    "streamingllm": "disable: ShadowKV keeps every token",
    "manage_weights": "leave --fast_build away: our runtime reads no weights beside the engine",
    "gemm_plugin": _NO_PLUGIN,
    "gemm_swiglu_plugin": _NO_PLUGIN,
    "low_latency_gemm_plugin": _NO_PLUGIN,
    "low_latency_gemm_swiglu_plugin": _NO_PLUGIN,
    "gemm_allreduce_plugin": _NO_PLUGIN,
    "fp8_rowwise_gemm_plugin": _NO_PLUGIN,
    "reduce_fusion": "disable: it is for several GPUs",
    "user_buffer": "disable: it is for several GPUs",
    "pp_reduce_scatter": "disable: it is for several GPUs",
    "norm_quant_fusion": "disable: quantisation is not supported",
    "fuse_fp4_quant": "disable: quantisation is not supported",
}


def _load_plugins() -> None:
    """Put our plugins into TensorRT's registry, unless they are there."""
    registry = trt.get_plugin_registry()

    def missing() -> list[str]:
        return [op for op in _OPS if registry.get_creator(op, names.PLUGIN_VERSION, names.DOMAIN) is None]

    if not missing():
        return
    path = library.load().path.resolve()
    registry.load_library(str(path))
    if absent := missing():
        raise MissingDependencyError(
            f"{path} has no plugin {absent[0]}, or TensorRT {trt.__version__} does not accept it",
            "a plugin library that was compiled with TensorRT's headers",
            "install kernel-lens (pip install --no-deps kernel-lens==2.0.1) and then the package again",
        )


def _settings(config: Any, model: ModelConfig) -> ShadowKVConfig:
    """ShadowKV settings: the checkpoint's, else those of the file that the environment names, else the defaults."""
    section, path = getattr(config, "shadowkv", None), os.environ.get(ENVIRONMENT)
    if section is not None:
        found = ShadowKVConfig.from_dict(section, f"{_WHERE}: shadowkv")
    elif path:
        build = load_build_config(path)
        plain = BuildConfig()
        for f in fields(BuildConfig):
            if f.name != "shadowkv" and getattr(build, f.name) != getattr(plain, f.name):
                raise ConfigError(
                    f"{path} ({ENVIRONMENT}) sets {f.name}", "the section shadowkv alone", "the rest are trtllm-build's"
                )
        found = build.shadowkv
    else:
        found = ShadowKVConfig()
    return found.resolved(model.key_width)


def _read_config(config: Any) -> ModelConfig:
    """The model's shape.

    Raises:
        ConfigError: a model, type, quantisation or parallelism that this class does not build.
    """
    model = model_config(json.loads(json.dumps(config.to_dict(), default=str)), _WHERE)  # enums become their values
    if (size := config.mapping.tp_size) > 1:
        raise ConfigError(f"{_WHERE}: mapping.tp_size is {size}", "1", "convert the model for one GPU")
    if config.dtype not in ("float16", "bfloat16"):
        raise ConfigError(
            f"{_WHERE}: dtype is {config.dtype!r}", "'float16' or 'bfloat16'", "the plugins have no other: convert it"
        )
    if config.logits_dtype != _F32:
        raise ConfigError(f"logits_dtype is {config.logits_dtype!r}", repr(_F32), "leave --logits_dtype away")
    if model.qk_norm:
        raise ConfigError(
            f"{_WHERE}: norms of queries and keys", "none", "build it with trtllm-shadowkv build --checkpoint-dir"
        )
    return model


def _word(value: Any) -> str:
    """Name of an enum's member; anything else as it is."""
    return str(getattr(value, "name", value))


class ShadowKVLlamaConfig(LLaMAConfig):  # type: ignore[misc]
    """Configuration of our own architecture: a Llama's with a section ``shadowkv``."""

    def __init__(self, *, shadowkv: Any = None, **rest: Any) -> None:
        self.shadowkv = shadowkv
        super().__init__(**rest)


class _Norm(RmsNorm):  # type: ignore[misc]
    """Takes and gives float32; the weight keeps its type."""

    def forward(self, x: Any) -> Any:
        return rms_norm(x, self.normalized_shape, 1, cast(self.weight.value, _F32), self.eps)


def _product(layer: Any, x: Any) -> Any:
    """A linear layer as our graph has it: the layer itself asks for float32 sums by casts around float16 products."""
    y = matmul(x, layer.get_weight(), transb=True, use_fp32_acc=False)
    return y if layer.bias is None else y + layer.bias.value


class _Attention(Module):  # type: ignore[misc]
    def __init__(self, model: ModelConfig, settings: ShadowKVConfig, dtype: str, layer: int) -> None:
        super().__init__()
        m, s = model, settings
        values = (layer, m.num_heads, m.num_kv_heads, m.head_size, s.chunk_size, s.rank, s.top_k, s.outliers)
        self.layer, self.attributes = layer, dict(zip(names.ATTRIBUTES, values, strict=True))
        width = m.num_heads * m.head_size
        self.qkv = ColumnLinear(
            m.hidden_size, width + 2 * m.key_width, bias=m.qkv_bias, dtype=dtype, gather_output=False
        )
        self.dense = RowLinear(width, m.hidden_size, bias=m.output_bias, dtype=dtype)

    def forward(self, x: Any, position_ids: Any, slots: Any) -> Any:
        q, selection = self.op(names.LANDMARK_TOPK, _product(self.qkv, x), position_ids, slots)
        (ticket,) = self.op(names.KEY_RECONSTRUCT, selection, slots)
        (out,) = self.op(names.SPARSE_ATTENTION, q, selection, ticket, slots)
        return _product(self.dense, out)

    def op(self, name: str, *inputs: Any) -> list[Any]:
        """Add one of our plugins; its outputs."""
        creator = trt.get_plugin_registry().get_creator(name, names.PLUGIN_VERSION, names.DOMAIN)
        arrays = {key: np.array([value], np.int32) for key, value in self.attributes.items()}
        listed = [trt.PluginField(key, array, trt.PluginFieldType.INT32) for key, array in arrays.items()]
        plugin = creator.create_plugin(
            f"layers.{self.layer}.{name}", trt.PluginFieldCollection(listed), trt.TensorRTPhase.BUILD
        )
        if plugin is None:
            attributes = ", ".join(f"{key} {value}" for key, value in self.attributes.items())
            raise ConfigError(
                f"{name} refuses {attributes}", "attributes as docs/tensorrt.md lists them", "the log says which"
            )
        node = default_trtnet().add_plugin_v3([x.trt_tensor for x in inputs], [], plugin)
        return [_create_tensor(node.get_output(i), node) for i in range(node.num_outputs)]


class _MLP(Module):  # type: ignore[misc]
    """GatedMLP's weights (``fc`` is the gate), with float32 between its products, and never fused by trtllm-build."""

    def __init__(self, model: ModelConfig, dtype: str) -> None:
        super().__init__()
        hidden, inner, self.dtype = model.hidden_size, model.intermediate_size, dtype
        self.fc = ColumnLinear(hidden, inner, bias=model.mlp_bias, dtype=dtype, gather_output=False)
        self.gate = ColumnLinear(hidden, inner, bias=model.mlp_bias, dtype=dtype, gather_output=False)
        self.proj = RowLinear(inner, hidden, bias=model.mlp_bias, dtype=dtype)

    def forward(self, x: Any) -> Any:
        gated = silu(cast(_product(self.fc, x), _F32)) * cast(_product(self.gate, x), _F32)
        return _product(self.proj, cast(gated, self.dtype))


class _Layer(Module):  # type: ignore[misc]
    def __init__(self, model: ModelConfig, settings: ShadowKVConfig, dtype: str, layer: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.input_layernorm = _Norm(model.hidden_size, eps=model.rms_norm_eps, dtype=dtype)
        self.attention = _Attention(model, settings, dtype, layer)
        self.post_layernorm = _Norm(model.hidden_size, eps=model.rms_norm_eps, dtype=dtype)
        self.mlp = _MLP(model, dtype)

    def forward(self, x: Any, position_ids: Any, slots: Any) -> Any:
        attended = self.attention(cast(self.input_layernorm(x), self.dtype), position_ids, slots)
        x = x + cast(attended, _F32)
        return x + cast(self.mlp(cast(self.post_layernorm(x), self.dtype)), _F32)


class _Transformer(Module):  # type: ignore[misc]
    def __init__(self, model: ModelConfig, settings: ShadowKVConfig, dtype: str) -> None:
        super().__init__()
        self.vocab_embedding = Embedding(model.vocab_size, model.hidden_size, dtype=dtype)
        self.layers = ModuleList([_Layer(model, settings, dtype, i) for i in range(model.num_layers)])
        self.ln_f = _Norm(model.hidden_size, eps=model.rms_norm_eps, dtype=dtype)

    def forward(self, input_ids: Any, position_ids: Any, last_token_ids: Any, slots: Any) -> Any:
        """The normed states of the positions whose logits are wanted, float32."""
        x = cast(self.vocab_embedding(input_ids), _F32)
        for layer in self.layers:
            x = layer(x, position_ids, slots)
        return self.ln_f(gather_last_token_logits(x, last_token_ids, True))


class ShadowKVForCausalLM(PretrainedModel):  # type: ignore[misc]
    """What ``--model_cls_name`` names; for checkpoints of its own architecture and of stock ones that it can build."""

    config_class = ShadowKVLlamaConfig

    def __init__(self, config: Any) -> None:
        shape = _read_config(config)
        settings = _settings(config, shape)
        config.shadowkv = settings.to_dict()  # the engine's config.json says what it was built with
        super().__init__(config)
        self.llama, self.checked = shape, False
        self.transformer = _Transformer(shape, settings, config.dtype)
        self.lm_head = ColumnLinear(shape.hidden_size, shape.vocab_size, bias=False, dtype=config.dtype)

    def check_config(self, config: Any) -> None:
        """Nothing is left to check."""

    def load(self, weights: Any, from_pruned: bool = False) -> None:
        """Take the checkpoint's weights; tables of RoPE beside them are not needed.

        Raises:
            CheckpointError: one is missing, unused, or of another shape or type.
        """
        weights = {name: weight for name, weight in weights.items() if not ROPE_TABLES.fullmatch(name)}
        if _HEAD not in weights and _EMBEDDING in weights and self.llama.tied:
            weights[_HEAD] = weights[_EMBEDDING]
        expected = dict(self.named_parameters())
        if _HEAD not in expected:  # TensorRT-LLM let it share the embedding's
            weights.pop(_HEAD, None)
        todo = "convert the model again"
        for name in [*expected, *weights]:
            if name not in weights:
                raise CheckpointError(f"the checkpoint has no {name}", f"{len(expected)} tensors", todo)
            if name not in expected:
                raise CheckpointError(f"the checkpoint has {name}, which this model does not use", "", todo)
            found, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
            if found != wanted:
                raise CheckpointError(f"the checkpoint's {name} is {list(found)}", str(list(wanted)), todo)
            kind = str(weights[name].dtype).removeprefix("torch.")
            if kind != self.config.dtype:
                raise CheckpointError(f"the checkpoint's {name} is {kind}", f"{self.config.dtype}, as all others", todo)
        head = weights.get(_HEAD, weights[_EMBEDDING])
        if (largest := float(head.abs().max())) > _LARGEST_HALF:
            raise CheckpointError(f"the output head holds {largest:g}", f"at most {_LARGEST_HALF:g}: it is float16")
        super().load(weights, from_pruned)

    def check_build(self, build: Any) -> None:
        """Refuse what does not go together with ShadowKV; ``build`` is TensorRT-LLM's BuildConfig.

        Raises:
            ConfigError: a setting that this class would have to ignore.
        """
        plugins = build.plugin_config
        for name, todo in _PLUGINS_OFF.items():
            if value := getattr(plugins, name, None):
                if todo.startswith("disable"):
                    todo = f"pass --{name} {todo}"
                raise ConfigError(f"{name} is {value!r}", "it off", todo)
        if not plugins.remove_input_padding:
            raise ConfigError("remove_input_padding is off", "it on", "leave --remove_input_padding away")
        kind = _word(build.kv_cache_type).lower()
        if kind != "disabled":
            raise ConfigError(
                f"kv_cache_type is {kind}",
                "disabled: ShadowKV keeps keys and values itself",
                "pass --kv_cache_type disabled",
            )
        if build.max_beam_width != 1:
            raise ConfigError(f"max_beam_width is {build.max_beam_width}", "1", "there is no beam search")
        mode = _word(build.speculative_decoding_mode)
        if mode not in ("NONE", "None", "1"):  # 1: the number of NONE, from a file of settings
            raise ConfigError(
                f"speculative_decoding_mode is {mode.lower()}", "none", "leave --speculative_decoding_mode away"
            )
        lora = getattr(build, "lora_config", None)
        if getattr(lora, "lora_dir", None) or getattr(lora, "lora_target_modules", None):
            raise ConfigError("LoRA weights are given", "none", "leave --lora_dir and --lora_target_modules away")
        if getattr(getattr(build, "auto_parallel_config", None), "enabled", False):
            raise ConfigError("auto_parallel is on", "one GPU", "leave --auto_parallel away")
        if not getattr(build, "strongly_typed", True):
            raise ConfigError("strongly_typed is off", "it on", "leave it as it is")
        for name, todo in _BUILD_OFF.items():
            if value := getattr(build, name, None):
                raise ConfigError(f"{name} is {value!r}", "it off", todo)
        longest = self.llama.max_position_embeddings
        if build.max_seq_len > longest:
            raise ConfigError(
                f"max_seq_len is {build.max_seq_len}",
                f"at most the model's max_position_embeddings, {longest}",
                f"pass --max_seq_len {longest}, or less",
            )
        BuildConfig(self.config.dtype, build.max_batch_size, build.max_seq_len, build.max_num_tokens)  # or it refuses
        # As our own builder: no stretch is longer than a sequence. The engine's config.json says it too.
        build.max_num_tokens = min(build.max_num_tokens, build.max_seq_len)
        self.checked = True

    def prepare_inputs(self, max_batch_size: int, max_num_tokens: int, **others: Any) -> dict[str, Any]:
        """The engine's inputs with the ranges of both profiles; TensorRT-LLM passes all of its sizes by name.

        Raises:
            ConfigError: weights were never loaded, or trtllm-build's settings never checked.
        """
        if not self.checked:
            raise ConfigError("trtllm-build did not show its settings to this class", _VERSIONS)
        empty = [name for name, parameter in self.named_parameters() if not parameter.is_inited()]
        if empty:
            raise CheckpointError(
                f"{empty[0]} has no values", "a checkpoint", "pass --checkpoint_dir, not --model_config"
            )
        profiles = shapes(max_batch_size, max_num_tokens)
        dimensions = {
            names.INPUT_IDS: "num_tokens",
            names.POSITION_IDS: "num_tokens",
            names.LAST_TOKEN_IDS: "num_logits",
            names.SEQUENCE_SLOTS: "batch",
        }
        return {
            name: Tensor(
                name=name,
                dtype=trt.int32,
                shape=[-1],
                dim_range=OrderedDict([(dimension, [list(profile[name]) for profile in profiles])]),
            )
            for name, dimension in dimensions.items()
        }

    def forward(self, input_ids: Any, position_ids: Any, last_token_ids: Any, sequence_slots: Any) -> Any:
        x = self.transformer(input_ids, position_ids, last_token_ids, sequence_slots)
        # The head's product is float16 whatever its weights are (decision 0013).
        logits = matmul(cast(x, _F16), cast(self.lm_head.get_weight(), _F16), transb=True, use_fp32_acc=False)
        logits.mark_output(names.LOGITS, _F32)
        return logits


def _join_builder() -> None:
    """Have TensorRT-LLM's builder show us its settings, and build engines without auxiliary streams.

    A plugin finds its state by the stream that it is called on; the builder has no setting for these streams.
    """
    owners = (trtllm_builder, "optimize_model_with_config"), (trtllm_builder.Builder, "create_builder_config")
    for owner, name in owners:
        if not hasattr(owner, name):
            raise MissingDependencyError(f"this TensorRT-LLM's builder has no {name}", _VERSIONS)
    optimize = trtllm_builder.optimize_model_with_config
    create = trtllm_builder.Builder.create_builder_config

    @wraps(optimize)
    def optimize_checked(model: Any, build_config: Any) -> Any:
        if isinstance(model, ShadowKVForCausalLM):
            model.check_build(build_config)
        return optimize(model, build_config)

    @wraps(create)
    def create_without_streams(*arguments: Any, **settings: Any) -> Any:
        config = create(*arguments, **settings)
        config.trt_builder_config.max_aux_streams = 0
        return config

    trtllm_builder.optimize_model_with_config = optimize_checked
    trtllm_builder.Builder.create_builder_config = create_without_streams


_load_plugins()
_join_builder()
MODEL_MAP[ARCHITECTURE] = ShadowKVForCausalLM
