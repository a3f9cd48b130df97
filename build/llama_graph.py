"""The ONNX graph of a Llama-type model whose attention is the three ShadowKV ops.

The graph uses standard operators of opset 20 and the ops of domain ``trtllm_shadowkv``; it is what ONNX Runtime runs
on a CPU and what TensorRT compiles. Weights keep their Hugging Face layout (out, in) and are read through
``Gemm(transB=1)``, so writing them is a copy, and a tied output head shares the embedding's bytes.

In a 16-bit graph products of matrices and attention are 16-bit; what lies between them is float32: the residual
stream, norms, SiLU. The head is float16 in a bfloat16 graph too: what it reads is normed, so its range is small, and
bfloat16 logits are too coarse to tell near tokens apart (docs/adr/0013-precision-of-the-graph.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from trtllm_shadowkv import names
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.models import ModelConfig

OPSET = 20
IR_VERSION = 10
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


@dataclass(frozen=True)
class Weight:
    """One initializer, made of one or more checkpoint tensors concatenated along their first dimension."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


def head_weight(model: ModelConfig) -> str:
    """Name of the output head's weight."""
    return "embedding" if model.tied else "head"


def weights(model: ModelConfig, dtype: str) -> Iterator[Weight]:
    """Every weight of a graph of this dtype in file order."""
    shapes = model.weight_shapes()

    def joined(name: str, *sources: str) -> Weight:
        rows = sum(shapes[s][0] for s in sources)
        kind = "float16" if name == head_weight(model) and dtype != "float32" else dtype
        return Weight(name, sources, (rows, *shapes[sources[0]][1:]), kind)

    yield joined("embedding", "model.embed_tokens.weight")
    for i in range(model.num_layers):
        here, there = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{there}.self_attn", f"{there}.mlp"
        qkv = [f"{attention}.{p}_proj" for p in "qkv"]
        yield joined(f"{here}.input_norm", f"{there}.input_layernorm.weight")
        yield joined(f"{here}.qkv", *(f"{p}.weight" for p in qkv))
        if model.qkv_bias:
            yield joined(f"{here}.qkv_bias", *(f"{p}.bias" for p in qkv))
        if model.qk_norm:
            yield joined(f"{here}.q_norm", f"{attention}.q_norm.weight")
            yield joined(f"{here}.k_norm", f"{attention}.k_norm.weight")
        yield joined(f"{here}.output", f"{attention}.o_proj.weight")
        if model.output_bias:
            yield joined(f"{here}.output_bias", f"{attention}.o_proj.bias")
        yield joined(f"{here}.post_norm", f"{there}.post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            yield joined(f"{here}.{part}", f"{mlp}.{part}_proj.weight")
            if model.mlp_bias:
                yield joined(f"{here}.{part}_bias", f"{mlp}.{part}_proj.bias")
    yield joined("final_norm", "model.norm.weight")
    if not model.tied:
        yield joined("head", "lm_head.weight")


class _Graph:
    """Collects nodes; every method adds one and returns the name of its output."""

    def __init__(self, model: ModelConfig, config: ShadowKVConfig, dtype: str) -> None:
        self.model, self.config = model, config
        self.half = dtype != "float32"
        self.type = ONNX_TYPES[dtype]
        self.nodes: list[NodeProto] = []
        self.values: list[ValueInfoProto] = []
        self.constants: list[TensorProto] = []
        self._count = 0

    def add(
        self, op: str, inputs: list[str], *, domain: str = "", outputs: list[str] | None = None, **attrs: Any
    ) -> str:
        self._count += 1
        outputs = outputs or [f"{op.lower()}_{self._count}"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{op}_{self._count}", domain=domain, **attrs))
        return outputs[0]

    def ints(
        self, name: str, values: list[int], *, kind: int = TensorProto.INT64, shape: list[int] | None = None
    ) -> str:
        """A small integer constant; made once for each name."""
        if all(c.name != name for c in self.constants):
            self.constants.append(helper.make_tensor(name, kind, [len(values)] if shape is None else shape, values))
        return name

    def real(self, name: str, value: float) -> str:
        """A float32 scalar; made once for each name."""
        if all(c.name != name for c in self.constants):
            self.constants.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
        return name

    def cast(self, x: str, kind: int) -> str:
        """``x`` as another type; a float32 graph has no other."""
        return self.add("Cast", [x], to=kind) if self.half else x

    def wide(self, x: str) -> str:
        return self.cast(x, TensorProto.FLOAT)

    def narrow(self, x: str) -> str:
        return self.cast(x, self.type)

    def linear(self, x: str, weight: str, bias: bool) -> str:
        """x · Wᵀ + b, W stored (out, in)."""
        return self.add("Gemm", [x, weight, *([f"{weight}_bias"] if bias else [])], transB=1)

    def norm(self, x: str, weight: str) -> str:
        """RMS norm over the last dimension (arXiv 1910.07467); takes and gives float32."""
        square = self.add("Pow", [x, self.real("two", 2.0)])
        mean = self.add("ReduceMean", [square, self.ints("last_axis", [-1])], keepdims=1)
        root = self.add("Sqrt", [self.add("Add", [mean, self.real("epsilon", self.model.rms_norm_eps)])])
        return self.add("Mul", [self.add("Div", [x, root]), self.wide(weight)])

    def head_norms(self, qkv: str, layer: str) -> str:
        """Normalise every query and key head before the position embedding (Qwen3)."""
        m = self.model
        widths = [m.num_heads * m.head_size, m.key_width, m.key_width]
        q, k, v = (f"{layer}.{p}" for p in "qkv")
        self.add("Split", [qkv, self.ints("qkv_widths", widths)], outputs=[q, k, v], axis=-1)
        parts = []
        for part, weight in ((q, "q_norm"), (k, "k_norm")):
            heads = self.add("Reshape", [part, self.ints("by_head", [0, -1, m.head_size])])
            normed = self.narrow(self.norm(self.wide(heads), f"{layer}.{weight}"))
            parts.append(self.add("Reshape", [normed, self.ints("by_token", [0, -1])]))
        return self.add("Concat", [*parts, v], axis=-1)

    def attention(self, qkv: str, layer: int) -> str:
        """The three ops of one layer; the shapes of their outputs are declared, since inference stops at them."""
        m, c = self.model, self.config
        values = (layer, m.num_heads, m.num_kv_heads, m.head_size, c.chunk_size, c.rank, c.top_k, c.outliers)
        attributes = {
            **dict(zip(names.ATTRIBUTES, values, strict=True)),
            "plugin_namespace": names.DOMAIN,
            "plugin_version": names.PLUGIN_VERSION,
        }
        q, selection, ticket, out = (f"layers.{layer}.{n}" for n in ("query", "selection", "ticket", "attended"))
        width = m.num_heads * m.head_size
        self.declare(q, self.type, ["num_tokens", width])
        self.declare(selection, TensorProto.INT32, ["batch", m.num_kv_heads, c.top_k])
        self.declare(ticket, TensorProto.INT32, [1])
        self.declare(out, self.type, ["num_tokens", width])
        slots = names.SEQUENCE_SLOTS
        for op, inputs, outputs in (
            (names.LANDMARK_TOPK, [qkv, names.POSITION_IDS, slots], [q, selection]),
            (names.KEY_RECONSTRUCT, [selection, slots], [ticket]),
            (names.SPARSE_ATTENTION, [q, selection, ticket, slots], [out]),
        ):
            self.add(op, inputs, domain=names.DOMAIN, outputs=outputs, **attributes)
        return out

    def declare(self, name: str, kind: int, shape: list[str | int]) -> None:
        self.values.append(helper.make_tensor_value_info(name, kind, shape))

    def layer(self, x: str, i: int) -> str:
        """The residual stream [num_tokens, hidden] after layer i."""
        m, here = self.model, f"layers.{i}"
        qkv = self.linear(self.narrow(self.norm(x, f"{here}.input_norm")), f"{here}.qkv", m.qkv_bias)
        if m.qk_norm:
            qkv = self.head_norms(qkv, here)
        attended = self.linear(self.attention(qkv, i), f"{here}.output", m.output_bias)
        x = self.add("Add", [x, self.wide(attended)])
        normed = self.narrow(self.norm(x, f"{here}.post_norm"))
        gate = self.wide(self.linear(normed, f"{here}.gate", m.mlp_bias))
        gate = self.add("Mul", [gate, self.add("Sigmoid", [gate])])  # SiLU
        gated = self.add("Mul", [gate, self.wide(self.linear(normed, f"{here}.up", m.mlp_bias))])
        return self.add("Add", [x, self.wide(self.linear(self.narrow(gated), f"{here}.down", m.mlp_bias))])


def build_graph(model: ModelConfig, config: ShadowKVConfig, dtype: str) -> ModelProto:
    """The graph without its weights: every :class:`Weight` is an initializer that still needs its bytes.

    Args:
        model: shape of the model.
        config: settings, rank resolved.
        dtype: float32, float16 or bfloat16.

    Inputs: input_ids [num_tokens], position_ids [num_tokens], last_token_ids [num_logits] (index + 1 of each position
    whose logits are wanted), sequence_slots [batch], all int32. Output: logits [num_logits, vocab] float32.
    """
    g = _Graph(model, config, dtype)
    x = g.wide(g.add("Gather", ["embedding", names.INPUT_IDS]))
    for i in range(model.num_layers):
        x = g.layer(x, i)
    wanted = g.add("Sub", [names.LAST_TOKEN_IDS, g.ints("one", [1], kind=TensorProto.INT32, shape=[])])
    x = g.cast(g.norm(g.add("Gather", [x, wanted]), "final_norm"), TensorProto.FLOAT16)
    x = g.add("Gemm", [x, head_weight(model)], transB=1)
    g.add("Cast", [x], outputs=[names.LOGITS], to=TensorProto.FLOAT)

    def tensor(name: str, kind: int, *shape: str | int) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, list(shape))

    inputs = [
        tensor(names.INPUT_IDS, TensorProto.INT32, "num_tokens"),
        tensor(names.POSITION_IDS, TensorProto.INT32, "num_tokens"),
        tensor(names.LAST_TOKEN_IDS, TensorProto.INT32, "num_logits"),
        tensor(names.SEQUENCE_SLOTS, TensorProto.INT32, "batch"),
    ]
    outputs = [tensor(names.LOGITS, TensorProto.FLOAT, "num_logits", model.vocab_size)]
    initializers = [
        TensorProto(name=w.name, data_type=ONNX_TYPES[w.dtype], dims=w.shape) for w in weights(model, dtype)
    ]
    graph = helper.make_graph(g.nodes, "shadowkv", inputs, outputs, [*g.constants, *initializers], value_info=g.values)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(names.DOMAIN, int(names.PLUGIN_VERSION))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="trtllm_shadowkv")
