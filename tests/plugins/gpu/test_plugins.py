"""The plugins' enqueue on a state that is bound to their stream, driven without TensorRT, against the C ABI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.plugins.gpu.prompts import natural_qkv, read_prompt, seal
from tests.plugins.gpu.rig import Rig, Shape
from tests.plugins.tensorrt.harness import Harness, HeadersMissing, Plugin, compile_harness
from tests.plugins.tensorrt.kinds import Field, Phase, Tensor, Type
from tests.plugins.tensorrt.ops import KEY_RECONSTRUCT, LANDMARK_TOPK, SPARSE_ATTENTION, Op, int32
from trtllm_shadowkv import library
from trtllm_shadowkv.runtime.cuda_state import CudaState

SHAPE = Shape(layers=2, heads=6, kv_heads=2, head_size=64, rank=64, top_k=16, outliers=4, window=32, limit=64)
ELEMENTS = {"float16": Type.HALF, "bfloat16": Type.BF16}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    try:
        compiled = compile_harness(tmp_path_factory.mktemp("harness"))
    except HeadersMissing as e:
        pytest.skip(str(e))
    return Harness(compiled, library.load().path.resolve())


def fields(shape: Shape, layer: int) -> Iterator[Field]:
    values = {"layer": layer, "num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_size": shape.head_size}
    values |= {"chunk_size": shape.chunk, "rank": shape.rank, "top_k": shape.top_k, "outliers": shape.outliers}
    return (int32(name, value) for name, value in values.items())


class Engine:
    """A CUDA state whose three ops are enqueued as an engine would: plugins of the runtime phase, attached."""

    def __init__(self, plugins: Harness, state: CudaState, shape: Shape, stream: int) -> None:
        self.state, self.shape, self.plugins, self.rows = state, shape, plugins, 0
        self.made: dict[tuple[str, int], Plugin] = {}
        state.bind(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)

    def begin_pass(self, kind: str, slots: Any, *arguments: Any, **named: Any) -> None:
        self.rows = len(slots)
        self.state.begin_pass(kind, slots, *arguments, **named)  # type: ignore[arg-type]

    def plugin(self, op: Op, layer: int) -> Plugin:
        if (op.name, layer) not in self.made:
            created = self.plugins.create(op.name, fields(self.shape, layer), Phase.RUNTIME)
            assert created is not None
            self.made[op.name, layer] = created.attach()
        return self.made[op.name, layer]

    def tensors(self, op: Op, tokens: int, element: Type | None = None) -> list[Tensor]:
        s, rows, element = self.shape, self.rows, element or ELEMENTS[self.shape.dtype]
        q = Tensor(element, (tokens, s.heads * s.head_size))
        every = {
            "qkv": Tensor(element, (tokens, (s.heads + 2 * s.kv_heads) * s.head_size)),
            "position_ids": Tensor(Type.INT32, (tokens,)),
            "sequence_slots": Tensor(Type.INT32, (rows,)),
            "q": q,
            "selection": Tensor(Type.INT32, (rows, s.kv_heads, s.top_k)),
            "ticket": Tensor(Type.INT32, (1,)),
            "out": q,
        }
        return [every[name] for name in op.tensors]

    def enqueue(self, op: Op, layer: int, tokens: int, stream: int, *addresses: int) -> None:
        assert self.plugin(op, layer).enqueue(self.tensors(op, tokens), stream, addresses) == 0, self.plugins.take_log()

    def landmark_topk(
        self, layer: int, qkv: int, positions: int, tokens: int, q: int, selection: int | None, stream: int
    ) -> None:
        if selection is None:
            size = self.rows, self.shape.kv_heads, self.shape.top_k
            where = "cpu" if self.state.device < 0 else None
            self.selection = torch.zeros(size, dtype=torch.int32, device=where or self.slots_device)
            selection = self.selection.data_ptr()
        self.enqueue(LANDMARK_TOPK, layer, tokens, stream, qkv, positions, positions, q, selection)
        self.chosen = selection

    def key_reconstruct(self, layer: int, tokens: int, stream: int) -> None:
        self.enqueue(KEY_RECONSTRUCT, layer, tokens, stream, self.chosen, self.chosen, self.chosen)

    def sparse_attention(self, layer: int, q: int, tokens: int, out: int, stream: int) -> None:
        self.enqueue(SPARSE_ATTENTION, layer, tokens, stream, q, self.chosen, self.chosen, self.chosen, out)

    slots_device: Any = "cpu"


def through(plugins: Harness, rig: Rig) -> Engine:
    """The rig's state, from now on called through plugins."""
    engine = Engine(plugins, rig.state, rig.shape, rig.stream.cuda_stream)
    engine.slots_device = rig.memory.live_keys.device
    rig.state = engine  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("how", [("bfloat16", "element"), ("float16", "e4m3")], ids="-".join)
def test_a_sequence_through_plugins_has_the_bits_of_the_c_abi(
    plugins: Harness, how: tuple[str, str], generator: torch.Generator
) -> None:
    shape = replace(SHAPE, dtype=how[0], values=how[1], landmarks=how[1])
    with Rig(shape, rows=3, tokens=512) as plain, Rig(shape, rows=3, tokens=512) as engine:
        through(plugins, engine)
        prompt = natural_qkv(plain, 300, generator)
        steps = [natural_qkv(plain, 3, generator) for _ in range(20)]
        found = []
        for rig in (plain, engine):
            rig.allocate(0, 300, 320)
            rig.allocate(1, 20, 60)
            results = [*read_prompt(rig, 0, prompt, [129, 1, 170]), *read_prompt(rig, 1, prompt, [20])]
            seal(rig, 0)
            for qkv in steps:
                results += rig.step([1, -1, 0], qkv)
            found.append(results)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert plugins.take_log() == []


def test_a_pass_that_does_not_fit_says_so(plugins: Harness) -> None:
    with Rig(SHAPE, rows=2, tokens=256) as rig:
        engine = through(plugins, rig)
        stream = rig.stream.cuda_stream
        rig.allocate(0, 30, 40)
        engine.begin_pass("context", [0], 0, 30, True, stream=stream)
        plugin = engine.plugin(LANDMARK_TOPK, 1)

        def refused(tensors: list[Tensor], where: int = stream, by: Plugin = plugin) -> str:
            assert by.enqueue(tensors, where) != 0
            (line,) = plugins.take_log()
            return line

        wanted = engine.tensors(LANDMARK_TOPK, 29)
        assert "layer 1: 29 tokens in a pass of 30; expected those that begin_pass announced" in refused(wanted)
        engine.rows = 2
        assert "rows of a context pass is 2; expected 1 to 1" in refused(engine.tensors(LANDMARK_TOPK, 30))
        engine.rows = 1
        fits = engine.tensors(LANDMARK_TOPK, 30)
        assert "no state is bound to this stream" in refused(fits, stream + 64)
        assert "element (0 float16, 1 bfloat16) is 0" in refused(engine.tensors(LANDMARK_TOPK, 30, Type.HALF))
        other = plugins.create(LANDMARK_TOPK.name, fields(replace(SHAPE, rank=32), 1), Phase.RUNTIME)
        deeper = plugins.create(LANDMARK_TOPK.name, fields(SHAPE, 2), Phase.RUNTIME)
        assert other is not None and deeper is not None
        assert "rank is 32; expected 64, for which the state was made" in refused(fits, by=other)
        assert "layer is 2; expected 0 to 1" in refused(fits, by=deeper)
        assert "qkv is null" in refused(fits), "no memory"
        engine.state.unbind()
        assert "no state is bound to this stream" in refused(fits)
