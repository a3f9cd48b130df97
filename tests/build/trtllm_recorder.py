"""Stand-ins for what build/trtllm_model.py uses of tensorrt and tensorrt_llm; they record the network as expressions.

Layers and functions add the operators that TensorRT-LLM's do (norms, SiLU, biases), types are checked as in a strongly
typed network, and ``build`` makes the calls of TensorRT-LLM's ``build`` in its order.
"""

from __future__ import annotations

import copy
import enum
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_shadowkv import library, names
from trtllm_shadowkv.build import tensorrt_compile

FILE = Path(tensorrt_compile.__file__).with_name("trtllm_model.py")
OPS = (names.LANDMARK_TOPK, names.KEY_RECONSTRUCT, names.SPARSE_ATTENTION)


class Value:
    """A tensor: the operator that makes it, what that reads, and its type."""

    def __init__(self, op: str, *inputs: Any, dtype: str, what: Any = None) -> None:
        self.op, self.inputs, self.dtype, self.what = op, inputs, dtype, what
        self.trt_tensor = self

    def binary(self, op: str, other: Any) -> Value:
        if not isinstance(other, Value):
            other = Value("Constant", dtype=self.dtype, what=other)
        assert self.dtype == other.dtype, f"{op} of {self.dtype} and {other.dtype}"
        return Value(op, self, other, dtype=self.dtype)

    def __add__(self, other: Any) -> Value:
        return self.binary("Add", other)

    def __sub__(self, other: Any) -> Value:
        return self.binary("Sub", other)

    def __mul__(self, other: Any) -> Value:
        return self.binary("Mul", other)

    def mark_output(self, name: str, dtype: str) -> None:
        NETWORK.outputs[name] = cast(self, dtype)


def tensor(*, name: str, dtype: str, shape: list[int], dim_range: dict[str, Any]) -> Value:
    made = Value("Input", dtype=dtype, what=name)
    NETWORK.inputs[name] = (dtype, shape, dict(dim_range))
    return made


def cast(x: Value, dtype: str) -> Value:
    return x if x.dtype == dtype else Value("Cast", x, dtype=dtype, what=dtype)


def matmul(x: Value, weight: Value, transa: bool = False, transb: bool = False, use_fp32_acc: bool = True) -> Value:
    assert (transa, transb) == (False, True), "weights are (out, in)"
    if use_fp32_acc and x.dtype == weight.dtype == "float16":
        return cast(cast(x, "float32").binary("Gemm", cast(weight, "float32")), "float16")
    return x.binary("Gemm", weight)


def rms_norm(x: Value, normalized_shape: Any, num_groups: int, weight: Value, eps: float) -> Value:
    mean = Value("ReduceMean", x.binary("Pow", 2.0), dtype=x.dtype)
    root = Value("Sqrt", mean + eps, dtype=x.dtype)
    return x.binary("Div", root) * weight


def silu(x: Value) -> Value:
    return x * Value("Sigmoid", x, dtype=x.dtype)


def gather_last_token_logits(x: Value, last_token_ids: Value, packed: bool) -> Value:
    assert packed
    return Value("Gather", x, last_token_ids - 1, dtype=x.dtype)


class Parameter:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype, self.given = shape, dtype, None
        self.value = Value("Weight", dtype=dtype, what=self)

    def is_inited(self) -> bool:
        return self.given is not None


class Module:
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.forward(*arguments, **named)  # type: ignore[attr-defined]

    def named_parameters(self, prefix: str = "") -> Any:
        for name, part in vars(self).items():
            if isinstance(part, Parameter):
                yield prefix + name, part
            elif isinstance(part, Module):
                yield from part.named_parameters(f"{prefix}{name}.")


class ModuleList(Module):
    def __init__(self, modules: list[Module]) -> None:
        vars(self).update({str(i): module for i, module in enumerate(modules)})

    def __getitem__(self, i: int) -> Module:
        if str(i) not in vars(self):
            raise IndexError(i)
        module: Module = vars(self)[str(i)]
        return module


class Linear(Module):
    def __init__(self, inner: int, outer: int, bias: bool = True, dtype: str = "", gather_output: bool = True) -> None:
        self.weight = Parameter((outer, inner), dtype)
        self.bias = Parameter((outer,), dtype) if bias else None

    def get_weight(self) -> Value:
        return self.weight.value

    def forward(self, x: Value) -> Value:
        x = matmul(x, self.weight.value, transb=True)
        return x if self.bias is None else x + self.bias.value


class Embedding(Module):
    def __init__(self, rows: int, width: int, dtype: str) -> None:
        self.weight = Parameter((rows, width), dtype)

    def forward(self, ids: Value) -> Value:
        return Value("Gather", self.weight.value, ids, dtype=self.weight.dtype)


class RmsNorm(Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-6, dtype: str = "") -> None:
        self.normalized_shape, self.eps = (normalized_shape,), eps
        self.weight = Parameter((normalized_shape,), dtype)


class PretrainedModel(Module):
    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self, weights: Any, from_pruned: bool = False) -> None:
        for name, parameter in self.named_parameters():
            parameter.given = weights[name]


class LLaMAConfig:
    """As TensorRT-LLM's: keys that it does not know are attributes too."""

    def __init__(self, **keys: Any) -> None:
        vars(self).update({"residual_mlp": False, "moe": {"num_experts": 0}, "embedding_multiplier": 1.0, **keys})
        self.mapping = SimpleNamespace(**keys.get("mapping", {}))
        self.quantization = SimpleNamespace(**keys.get("quantization", {}))

    def to_dict(self) -> dict[str, Any]:
        parts = {"mapping": vars(self.mapping), "quantization": vars(self.quantization)}
        return copy.deepcopy({**vars(self), **parts})


class Registry:
    def __init__(self, loadable: tuple[str, ...]) -> None:
        self.loadable, self.loaded, self.refusing = loadable, [], False

    def load_library(self, path: str) -> None:
        self.loaded.append(path)

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        if not self.loaded or name not in self.loadable or (version, namespace) != ("1", "trtllm_shadowkv"):
            return None
        return SimpleNamespace(create_plugin=lambda *given: None if self.refusing else (name, *given))


class Network:
    """What was recorded, and the part of TensorRT's network that the class uses."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Value] = {}
        self.plugins: list[tuple[str, str, dict[str, int]]] = []

    def add_plugin_v3(self, inputs: list[Value], shape_inputs: list[Value], plugin: Any) -> Any:
        op, name, fields, phase = plugin
        assert (phase, shape_inputs) == ("build", [])
        assert all((kind, array.dtype, array.shape) == ("int32", "int32", (1,)) for _, array, kind in fields)
        attributes = {key: int(array[0]) for key, array, _ in fields}
        assert len(attributes) == len(fields)
        self.plugins.append((op, name, attributes))
        node = Value(op, *inputs, dtype="", what=attributes)
        kinds = {names.LANDMARK_TOPK: [inputs[0].dtype, "int32"], names.KEY_RECONSTRUCT: ["int32"]}
        outputs = [
            Value("Output", node, dtype=dtype, what=i) for i, dtype in enumerate(kinds.get(op, [inputs[0].dtype]))
        ]
        return SimpleNamespace(num_outputs=len(outputs), get_output=outputs.__getitem__)


NETWORK = Network()


class Kind015(enum.Enum):
    CONTINUOUS, PAGED, DISABLED = range(3)


class Kind1x(enum.Enum):
    CONTINUOUS, PAGED, DISABLED = "continuous", "paged", "disabled"


class Mode(enum.IntFlag):
    NONE, DRAFT_TOKENS_EXTERNAL, MEDUSA = enum.auto(), enum.auto(), enum.auto()


PLUGINS: dict[str, Any] = {
    "gpt_attention_plugin": None,
    "bert_attention_plugin": "auto",
    "gemm_plugin": None,
    "lora_plugin": None,
    "context_fmha": True,
    "use_paged_context_fmha": False,
    "multiple_profiles": False,
    "streamingllm": False,
    "manage_weights": False,
    "remove_input_padding": True,
    "reduce_fusion": False,
    "use_fused_mlp": True,
}
LIMITS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_seq_len": 512,
    "max_num_tokens": 256,
    "max_beam_width": 1,
    "opt_num_tokens": 4,
    "max_prompt_embedding_table_size": 0,
    "gather_context_logits": False,
    "gather_generation_logits": False,
    "strongly_typed": True,
    "force_num_profiles": None,
    "enable_debug_output": False,
    "max_draft_len": 0,
    "speculative_decoding_mode": Mode.NONE,
    "use_refit": False,
    "weight_streaming": False,
    "use_strip_plan": False,
}


def build_config(generation: str, plugins: dict[str, Any] | None = None, **changes: Any) -> Any:
    """TensorRT-LLM's settings as the documented command leaves them: those of 0.15, or of 1.x."""
    lora = SimpleNamespace(lora_dir=[], lora_target_modules=[])
    if generation == "0.15":
        own = {"kv_cache_type": Kind015.DISABLED, "auto_parallel_config": SimpleNamespace(enabled=False)}
        known = PLUGINS
    else:
        own = {"kv_cache_type": Kind1x.DISABLED, "use_mrope": False}
        known = {**PLUGINS, "dora_plugin": False, "use_fp8_context_fmha": True, "norm_quant_fusion": False}
    config = SimpleNamespace(**LIMITS, **own, lora_config=lora)
    config.plugin_config = SimpleNamespace(**{**known, **(plugins or {})})
    vars(config).update(changes)
    return config


class Builder:
    def create_builder_config(self, precision: str, **settings: Any) -> Any:
        return SimpleNamespace(trt_builder_config=SimpleNamespace(precision=precision, max_aux_streams=None))


def build(builder: Any, model: Any, config: Any) -> Any:
    """The calls of TensorRT-LLM's ``build``; returns its builder configuration and its copy of the settings."""
    config = copy.deepcopy(config)
    model = builder.optimize_model_with_config(model, config)
    made = builder.Builder().create_builder_config(precision=model.config.dtype)
    sizes = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_beam_width", "opt_num_tokens", "max_draft_len")
    model(**model.prepare_inputs(**{name: getattr(config, name) for name in sizes}, use_cache=False, max_input_len=1))
    return made.trt_builder_config, config


class Recorder:
    """The class file, executed as trtllm-build does it, with the stand-ins in ``sys.modules``."""

    def __init__(self, patch: pytest.MonkeyPatch, file: Path = FILE, plugins: tuple[str, ...] = OPS) -> None:
        global NETWORK
        self.network = NETWORK = Network()
        self.registry = Registry(plugins)
        self.model_map: dict[str, Any] = {}
        patch.setattr(library, "load", lambda: SimpleNamespace(path=Path("/somewhere/libtrtllm_shadowkv.so")))
        parts: dict[str, dict[str, Any]] = {
            "tensorrt": {
                "__version__": "10.6.0",
                "int32": "int32",
                "PluginField": lambda name, data, kind: (name, data, kind),
                "PluginFieldCollection": list,
                "PluginFieldType": SimpleNamespace(INT32="int32"),
                "TensorRTPhase": SimpleNamespace(BUILD="build"),
                "get_plugin_registry": lambda: self.registry,
            },
            "tensorrt_llm": {},
            "tensorrt_llm.builder": {
                "Builder": type("Builder", (Builder,), {}),
                "optimize_model_with_config": lambda model, build_config: model,
            },
            "tensorrt_llm._common": {"default_trtnet": lambda: self.network},
            "tensorrt_llm.functional": {
                "Tensor": tensor,
                "_create_tensor": lambda output, layer: output,
                "cast": cast,
                "gather_last_token_logits": gather_last_token_logits,
                "matmul": matmul,
                "rms_norm": rms_norm,
                "silu": silu,
            },
            "tensorrt_llm.layers": {
                "ColumnLinear": Linear,
                "Embedding": Embedding,
                "RmsNorm": RmsNorm,
                "RowLinear": Linear,
            },
            "tensorrt_llm.models": {
                "LLaMAConfig": LLaMAConfig,
                "MODEL_MAP": self.model_map,
                "PretrainedModel": PretrainedModel,
            },
            "tensorrt_llm.module": {"Module": Module, "ModuleList": ModuleList},
        }
        for name, attributes in parts.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        self.builder: Any = sys.modules["tensorrt_llm.builder"]
        spec = importlib.util.spec_from_file_location("models", file)
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "models", self.module)
        spec.loader.exec_module(self.module)
        self.cls = self.module.ShadowKVForCausalLM
