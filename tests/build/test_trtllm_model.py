"""The model class for trtllm-build, under a recorder of the network calls; no TensorRT-LLM, no TensorRT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tests.build import trtllm_recorder as trtllm
from tests.build.trtllm_recorder import Kind015, Kind1x, Mode, Recorder, Value, build_config
from tests.cli.conftest import cli as cli
from trtllm_shadowkv import names
from trtllm_shadowkv.build.llama_graph import ONNX_TYPES, build_graph
from trtllm_shadowkv.build.tensorrt_compile import shapes
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import CheckpointError, ConfigError, MissingDependencyError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.rope import RopeConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    vocab_size=200,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10_000.0),
    tied=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)
BIASED = replace(MODEL, qkv_bias=True, output_bias=True, mlp_bias=True)
QWEN2 = replace(MODEL, architecture="Qwen2ForCausalLM", qkv_bias=True)
SETTINGS = ShadowKVConfig(chunk_size=16, rank=32, top_k=24, outliers=6)
# TensorRT-LLM's name of each of our graph's weights.
LAYER = {
    "input_norm": "input_layernorm.weight",
    "qkv": "attention.qkv.weight",
    "qkv_bias": "attention.qkv.bias",
    "output": "attention.dense.weight",
    "output_bias": "attention.dense.bias",
    "post_norm": "post_layernorm.weight",
    "gate": "mlp.fc.weight",
    "gate_bias": "mlp.fc.bias",
    "up": "mlp.gate.weight",
    "up_bias": "mlp.gate.bias",
    "down": "mlp.proj.weight",
    "down_bias": "mlp.proj.bias",
}
OUTER = {"embedding": "transformer.vocab_embedding.weight", "final_norm": "transformer.ln_f.weight"}
ONNX_NAMES = {number: name for name, number in ONNX_TYPES.items()}

Load = Callable[..., Recorder]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.delenv("TRTLLM_SHADOWKV_CONFIG", raising=False)
    return lambda **options: Recorder(monkeypatch, **options)


def config(model: ModelConfig = MODEL, dtype: str = "bfloat16", **changes: Any) -> Any:
    return trtllm.LLaMAConfig(**{**model.to_pretrained_config(dtype), "shadowkv": SETTINGS.to_dict(), **changes})


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    kind = getattr(torch, model.config.dtype)
    return {name: torch.ones(p.shape, dtype=kind) for name, p in model.named_parameters()}


def loaded(recorder: Recorder, given: Any) -> Any:
    model = recorder.cls(given)
    model.load(weights_of(model))
    return model


def name_of(weight: str) -> str:
    if weight.startswith("layers."):
        _, layer, rest = weight.split(".")
        return f"transformer.layers.{layer}.{LAYER[rest]}"
    return OUTER.get(weight, "lm_head.weight")


def listing(output: Value) -> list[str]:
    """One line for each operator that the output depends on, numbered in the order of their first use."""
    lines: list[str] = []
    seen: dict[str, int] = {}
    known: dict[int, int] = {}

    def visit(value: Value) -> int:
        if id(value) not in known:
            text = f"{value.op} {value.what} {[visit(x) for x in value.inputs]}"
            if text not in seen:
                seen[text] = len(lines)
                lines.append(text)
            known[id(value)] = seen[text]
        return known[id(value)]

    visit(output)
    return lines


def expected(model: ModelConfig, dtype: str) -> tuple[Value, list[Any]]:
    """Our ONNX graph in the recorder's terms: its output, and its plugins in order."""
    graph = build_graph(model, SETTINGS, dtype).graph
    values: dict[str, Value] = {x.name: Value("Input", dtype="int32", what=x.name) for x in graph.input}
    plugins: list[Any] = []
    for constant in graph.initializer:
        if constant.HasField("raw_data") or constant.float_data or constant.int32_data or constant.int64_data:
            number = float(numpy_helper.to_array(constant).reshape(-1)[0])
            values[constant.name] = Value("Constant", dtype="", what=number)
        else:
            values[constant.name] = Value("Weight", dtype="", what=name_of(constant.name))
    if dtype == "bfloat16":  # its bytes are float16 in our file; TensorRT-LLM's are as the checkpoint has them
        values["head"] = Value("Cast", values["head"], dtype="", what="float16")
    for node in graph.node:
        inputs = [values[x] for x in node.input]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.domain == names.DOMAIN:
            kept = {key: attributes[key] for key in names.ATTRIBUTES}
            plugins.append((node.op_type, f"layers.{kept['layer']}.{node.op_type}", kept))
            made = Value(node.op_type, *inputs, dtype="", what=kept)
            values |= {x: Value("Output", made, dtype="", what=i) for i, x in enumerate(node.output)}
            continue
        if node.op_type == "Gemm":
            assert attributes == {"transB": 1}
            made = Value("Gemm", *inputs[:2], dtype="")
            made = Value("Add", made, inputs[2], dtype="") if len(inputs) == 3 else made
        elif node.op_type == "ReduceMean":
            assert inputs[1].what == -1
            made = Value("ReduceMean", inputs[0], dtype="")
        else:
            made = Value(node.op_type, *inputs, dtype="", what=ONNX_NAMES[attributes["to"]] if attributes else None)
        values[node.output[0]] = made
    return values[names.LOGITS], plugins


def named(output: Value, model: Any) -> Value:
    """The recorded output with names for weights, and constants as float32 has them."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    done: dict[int, Value] = {}

    def copy(value: Value) -> Value:
        if id(value) not in done:
            what = by_parameter[value.what] if value.op == "Weight" else value.what
            what = float(np.float32(what)) if value.op == "Constant" else what
            done[id(value)] = Value(value.op, *map(copy, value.inputs), dtype="", what=what)
        return done[id(value)]

    return copy(output)


# --- the network --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["0.15", "1.x"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [MODEL, BIASED, QWEN2], ids=["plain", "biased", "qwen2"])
def test_the_network_is_our_own_graph(load: Load, shape: ModelConfig, dtype: str, generation: str) -> None:
    recorder = load()
    model = loaded(recorder, config(shape, dtype))
    trt_config, _ = trtllm.build(recorder.builder, model, build_config(generation))
    output, plugins = expected(shape, dtype)
    network = recorder.network
    assert network.plugins == plugins
    assert list(network.outputs) == [names.LOGITS]
    assert network.outputs[names.LOGITS].dtype == "float32"
    assert listing(named(network.outputs[names.LOGITS], model)) == listing(output)
    assert trt_config.max_aux_streams == 0


def test_its_weights_are_those_of_a_llama_checkpoint(load: Load) -> None:
    recorder = load()
    found = {name: tuple(p.shape) for name, p in recorder.cls(config(BIASED)).named_parameters()}
    hidden, inner, width = 96, 160, 256
    layer = {
        "input_layernorm.weight": (hidden,),
        "attention.qkv.weight": (width + 2 * 128, hidden),
        "attention.qkv.bias": (width + 2 * 128,),
        "attention.dense.weight": (hidden, width),
        "attention.dense.bias": (hidden,),
        "post_layernorm.weight": (hidden,),
        **{f"mlp.{part}.weight": (inner, hidden) for part in ("fc", "gate")},
        **{f"mlp.{part}.bias": (inner,) for part in ("fc", "gate")},
        "mlp.proj.weight": (hidden, inner),
        "mlp.proj.bias": (hidden,),
    }
    outer = {"transformer.vocab_embedding.weight": (200, hidden), "transformer.ln_f.weight": (hidden,)}
    layers = {f"transformer.layers.{i}.{name}": size for i in range(2) for name, size in layer.items()}
    assert found == {**outer, **layers, "lm_head.weight": (200, hidden)}


def test_inputs_have_the_ranges_of_both_profiles(load: Load) -> None:
    recorder = load()
    trtllm.build(recorder.builder, loaded(recorder, config()), build_config("0.15"))
    profiles = shapes(4, 256)
    assert set(recorder.network.inputs) == set(profiles[0])
    dimensions: dict[str, Any] = {}
    for name, (dtype, shape, ranges) in recorder.network.inputs.items():
        ((dimension, lengths),) = ranges.items()
        assert (dtype, shape, lengths) == ("int32", [-1], [list(profile[name]) for profile in profiles])
        assert dimensions.setdefault(dimension, lengths) == lengths  # TensorRT-LLM demands it
    assert len(dimensions) == 3


def test_no_stretch_is_longer_than_a_sequence(load: Load) -> None:
    recorder = load()
    given = build_config("1.x", max_num_tokens=8192)
    _, kept = trtllm.build(recorder.builder, loaded(recorder, config()), given)
    assert kept.max_num_tokens == 512  # what the engine's config.json says
    assert recorder.network.inputs["input_ids"][2] == {"num_tokens": [[1, 4, 4], [1, 512, 512]]}


# --- registration -------------------------------------------------------------------------------------------------


def test_the_file_registers_its_class_and_loads_the_plugins_once(load: Load) -> None:
    recorder = load()
    assert recorder.model_map == {"ShadowKVForCausalLM": recorder.cls}
    assert recorder.registry.loaded == ["/somewhere/libtrtllm_shadowkv.so"]
    recorder.module._load_plugins()
    assert len(recorder.registry.loaded) == 1


def test_both_architectures_are_built(load: Load) -> None:
    recorder = load()
    own = recorder.cls.config_class(
        **{**MODEL.to_pretrained_config("bfloat16"), "architecture": "ShadowKVForCausalLM"}, shadowkv={"top_k": 7}
    )
    assert loaded(recorder, own).config.shadowkv["top_k"] == 7
    assert own.to_dict()["shadowkv"]["rank"] == 128
    stock = loaded(recorder, trtllm.LLaMAConfig(**MODEL.to_pretrained_config("bfloat16")))
    trtllm.build(recorder.builder, stock, build_config("0.15"))
    assert [attributes["top_k"] for _, _, attributes in recorder.network.plugins] == [256] * 6


def test_other_models_of_the_process_are_left_alone(load: Load) -> None:
    recorder = load()
    stock = SimpleNamespace(config=config())
    assert recorder.builder.optimize_model_with_config(stock, build_config("0.15", max_beam_width=4)) is stock


def test_a_library_without_plugins_and_an_unknown_builder_are_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingDependencyError, match=f"has no plugin {names.SPARSE_ATTENTION}"):
        load(plugins=(names.LANDMARK_TOPK, names.KEY_RECONSTRUCT))
    recorder = load()
    del recorder.builder.optimize_model_with_config
    with pytest.raises(MissingDependencyError, match=r"no optimize_model_with_config; expected TensorRT-LLM 0\.15"):
        recorder.module._join_builder()


def test_attributes_that_a_plugin_refuses_are_named(load: Load) -> None:
    recorder = load()
    model = loaded(recorder, config())
    recorder.registry.refusing = True
    with pytest.raises(ConfigError, match=r"ShadowKVLandmarkTopK refuses layer 0, num_heads 4, .*, outliers 6;"):
        trtllm.build(recorder.builder, model, build_config("0.15"))


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_the_checkpoint_then_the_file_then_the_defaults(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = load()
    file = tmp_path / "settings.yaml"
    file.write_text("shadowkv: {top_k: 64, rank: 48}\n")

    def settings(**changes: Any) -> tuple[int, int]:
        kept = recorder.cls(config(**changes)).config.shadowkv
        return kept["top_k"], kept["rank"]

    assert settings(shadowkv=None) == (256, 128)  # the rank that keys of 128 elements allow
    monkeypatch.setenv("TRTLLM_SHADOWKV_CONFIG", str(file))
    assert settings(shadowkv=None) == (64, 48)
    assert settings() == (24, 32)
    assert settings(shadowkv={}) == (256, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shadowkv: {topk: 64}", r"unknown setting 'topk' \(did you mean 'top_k'\?\)"),
        ("max_seq_len: 512\nshadowkv: {top_k: 64}", "sets max_seq_len; expected the section shadowkv alone"),
        ("shadowkv: {rank: 256}", "at most num_kv_heads · head_size = 128"),
    ],
)
def test_a_bad_file_of_settings_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    recorder = load()
    (tmp_path / "settings.yaml").write_text(text)
    monkeypatch.setenv("TRTLLM_SHADOWKV_CONFIG", str(tmp_path / "settings.yaml"))
    with pytest.raises(ConfigError, match=message):
        recorder.cls(config(shadowkv=None))
    with pytest.raises(ConfigError, match=r"config\.json: shadowkv: unknown setting 'budget'"):
        recorder.cls(config(shadowkv={"budget": 64}))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, r"quant_algo is 'FP8'; expected null"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, r"kv_cache_quant_algo is 'INT8'; expected null"),
        (
            {"mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1}},
            r"tp_size is 2; expected 1; convert the model for one GPU",
        ),
        ({"mapping": {"world_size": 2, "tp_size": 1, "pp_size": 2}}, r"pp_size is 2; expected 1"),
        ({"mapping": {"tp_size": 1, "pp_size": 1, "cp_size": 2}}, r"cp_size is 2; expected 1"),
        ({"dtype": "float32"}, r"dtype is 'float32'; expected 'float16' or 'bfloat16'"),
        ({"logits_dtype": "float16"}, r"logits_dtype is 'float16'; expected 'float32'; leave --logits_dtype away"),
        ({"moe": {"num_experts": 8}}, r"num_experts is 8; expected 0"),
        ({"residual_mlp": True}, r"residual_mlp is True; expected False"),
        ({"embedding_multiplier": 12.0}, r"embedding_multiplier is 12\.0; expected 1"),
        ({"architecture": "Qwen3ForCausalLM"}, r"norms of queries and keys; expected none; build it with"),
        ({"architecture": "GPTForCausalLM"}, r"architecture is 'GPTForCausalLM'; expected one of LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"rotary_scaling": {"type": "longrope"}}, r"'longrope'"),
    ],
)
def test_checkpoints_that_cannot_be_built_are_refused(load: Load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load().cls(config(**changes))


@pytest.mark.parametrize(
    ("plugins", "changes", "message"),
    [
        (
            {"gpt_attention_plugin": "bfloat16"},
            {},
            r"is 'bfloat16'; expected it off; pass --gpt_attention_plugin disable",
        ),
        ({"use_paged_context_fmha": True}, {}, r"expected it off; pass --use_paged_context_fmha disable"),
        ({"multiple_profiles": True}, {}, r"pass --multiple_profiles disable: an engine has two"),
        ({"lora_plugin": "auto"}, {}, r"pass --lora_plugin disable: there is no LoRA"),
        ({"gemm_plugin": "auto"}, {}, r"pass --gemm_plugin disable: our runtime does not load"),
        ({"streamingllm": True}, {}, r"--streamingllm disable"),
        ({"manage_weights": True}, {}, r"manage_weights is True; expected it off; leave --fast_build away"),
        ({"reduce_fusion": True}, {}, r"--reduce_fusion disable: it is for several GPUs"),
        ({"norm_quant_fusion": True}, {}, r"--norm_quant_fusion disable"),
        ({"remove_input_padding": False}, {}, r"remove_input_padding is off; expected it on"),
        ({}, {"kv_cache_type": Kind015.PAGED}, r"kv_cache_type is paged; expected disabled.*pass --kv_cache_type"),
        ({}, {"kv_cache_type": Kind1x.CONTINUOUS}, r"kv_cache_type is continuous; expected disabled"),
        ({}, {"max_beam_width": 4}, r"max_beam_width is 4; expected 1"),
        ({}, {"speculative_decoding_mode": Mode.MEDUSA}, r"speculative_decoding_mode is medusa; expected none"),
        ({}, {"max_draft_len": 5}, r"max_draft_len is 5"),
        ({}, {"gather_context_logits": True}, r"leave --gather_context_logits away"),
        ({}, {"gather_generation_logits": True}, r"leave --gather_generation_logits away"),
        ({}, {"max_prompt_embedding_table_size": 8}, r"max_prompt_embedding_table_size is 8"),
        ({}, {"lora_config": SimpleNamespace(lora_dir=["x"], lora_target_modules=[])}, r"LoRA weights are given"),
        ({}, {"auto_parallel_config": SimpleNamespace(enabled=True)}, r"auto_parallel is on; expected one GPU"),
        ({}, {"strongly_typed": False}, r"strongly_typed is off"),
        ({}, {"force_num_profiles": 1}, r"unset BUILDER_FORCE_NUM_PROFILES"),
        ({}, {"weight_streaming": True}, r"leave --weight_streaming away"),
        ({}, {"use_strip_plan": True}, r"leave --strip_plan away"),
        ({}, {"use_refit": True}, r"use_refit is True"),
        ({}, {"enable_debug_output": True}, r"leave --enable_debug_output away"),
        ({}, {"max_seq_len": 4096}, r"max_seq_len is 4096; expected at most .*, 1024; pass --max_seq_len 1024"),
        ({}, {"max_batch_size": 5000}, r"max_batch_size is 5000"),
    ],
)
@pytest.mark.parametrize("generation", ["0.15", "1.x"])
def test_settings_that_do_not_go_together_are_refused(
    load: Load, generation: str, plugins: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    recorder = load()
    model = loaded(recorder, config())
    with pytest.raises(ConfigError, match=message):
        trtllm.build(recorder.builder, model, build_config(generation, plugins, **changes))
    assert recorder.network.inputs == {}  # before anything was built


def test_a_builder_that_does_not_show_its_settings_is_refused(load: Load) -> None:
    recorder = load()
    with pytest.raises(ConfigError, match=r"did not show its settings to this class; expected TensorRT-LLM 0\.15"):
        loaded(recorder, config()).prepare_inputs(max_batch_size=1, max_num_tokens=1)


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused(load: Load) -> None:
    recorder = load()
    model = recorder.cls(config())
    whole, name = weights_of(model), "transformer.layers.1.mlp.gate.weight"

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            model.load({k: v for k, v in {**whole, **changes}.items() if v is not None})

    refused(f"the checkpoint has no {name}; expected 17 tensors; convert", **{name: None})
    refused(r"the checkpoint has no lm_head\.weight", **{"lm_head.weight": None})
    refused("the checkpoint has extra.bias, which this model does not use", **{"extra.bias": torch.ones(1)})
    refused(rf"{name} is \[96, 160\]; expected \[160, 96\]", **{name: whole[name].T})
    refused(f"{name} is float32; expected bfloat16", **{name: whole[name].float()})
    refused(
        "the output head holds 131072; expected at most 65504", **{"lm_head.weight": whole["lm_head.weight"] * 2**17}
    )
    with pytest.raises(CheckpointError, match=r"has no values; .*pass --checkpoint_dir, not --model_config"):
        trtllm.build(recorder.builder, model, build_config("0.15"))


def test_a_tied_head_may_be_left_out(load: Load) -> None:
    recorder = load()
    model = recorder.cls(config(replace(MODEL, tied=True)))
    given = weights_of(model)
    del given["lm_head.weight"]
    model.load(given)
    assert model.lm_head.weight.given is model.transformer.vocab_embedding.weight.given
    model.load({**given, "lm_head.weight": given["transformer.vocab_embedding.weight"]})


def test_a_head_that_shares_the_embeddings_parameter_is_left_out(load: Load) -> None:
    """TensorRT-LLM 0.15 with share_embedding_table."""
    recorder = load()
    model = recorder.cls(config())
    given = weights_of(model)
    del model.lm_head.weight
    model.load(given)
    del given["lm_head.weight"]
    model.load(given)


# --- outside trtllm-build -----------------------------------------------------------------------------------------


def test_the_command_prints_the_file(cli: Any) -> None:
    outcome = cli("model-file")
    assert (outcome.code, outcome.err) == (0, "")
    assert Path(outcome.out.rstrip("\n")).samefile(trtllm.FILE)


def test_the_package_imports_neither_tensorrt_llm_nor_tensorrt() -> None:
    code = (
        "import sys, trtllm_shadowkv.cli.main, trtllm_shadowkv.cli.model_file as m; m.model_file();"
        "print([n for n in sys.modules if n.startswith('tensorrt')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_tables_of_positions_beside_the_weights_are_no_weights(load: Load) -> None:
    """convert_checkpoint.py saves them."""
    recorder = load()
    model = recorder.cls(config())
    names = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
    tables = {f"transformer.{name}": torch.ones(1, 8, 64) for name in names}
    model.load({**weights_of(model), **tables, "rotary_inv_freq": torch.ones(32)})
    assert all(parameter.is_inited() for _, parameter in model.named_parameters())
