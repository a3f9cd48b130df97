"""The CPU executor: ONNX Runtime runs the engine's ONNX file, and its three ops call a state.

ONNX Runtime's CPU provider has no bfloat16 and few float16 kernels, so 16-bit types and weights become float32 in
memory. The ops are Python ops of onnxruntime-extensions. They are registered once a process and find the state of the
run they belong to in a thread-local: ONNX Runtime calls the nodes of a sequential session on the thread that called
``run``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, load
from onnxruntime_extensions import PyOp, get_library_path, onnx_op

from trtllm_shadowkv import names
from trtllm_shadowkv.build.llama_graph import ONNX_TYPES
from trtllm_shadowkv.dtypes import NUMPY, to_dtype
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError
from trtllm_shadowkv.runtime.state import State

_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PARALLEL_ELEMENTS = 1 << 20
"""Elements of one layer's attention from which torch's threads pay. Below, waking and joining them costs more than the
work, and tens of times more where other processes keep the cores busy."""
_current = threading.local()

Array = NDArray[Any]


class _Output:
    """An op's result as onnxruntime-extensions asks for it: ``shape`` and ``flatten().tolist()``.

    A list of floats costs 20 ms a megabyte; what receives it takes an array of the right type just as well.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self._array = tensor.numpy().reshape(-1)

    def flatten(self) -> _Output:
        return self

    def tolist(self) -> Array:
        return self._array


def _call(
    op: Callable[[State], tuple[torch.Tensor, ...]], zeros: Callable[[], tuple[torch.Tensor, ...]]
) -> tuple[_Output, ...]:
    """Run an op on the state of this thread's run.

    No error may leave an op: it would end the process, because ONNX Runtime's custom ops let none through. It is kept
    for ``_run`` to raise, and the rest of the pass runs idle on ``zeros``, outputs of the right shapes and types.
    """
    if _current.error is None:
        try:
            return tuple(map(_Output, op(_current.state)))
        except BaseException as e:
            _current.error = e
    return tuple(map(_Output, zeros()))


_op: Callable[..., Callable[[Callable[..., Any]], Any]] = onnx_op  # which has no types
# Only what the ops below read: each declared attribute is parsed from text in every call.
_LAYER = {"layer": PyOp.dt_int64}
_SHAPES = {n: PyOp.dt_int64 for n in ("layer", "num_heads", "num_kv_heads", "head_size", "top_k")}


@_op(
    op_type=f"{names.DOMAIN}::{names.LANDMARK_TOPK}",
    inputs=[PyOp.dt_float, PyOp.dt_int32, PyOp.dt_int32],
    outputs=[PyOp.dt_float, PyOp.dt_int32],
    attrs=_SHAPES,
)
def _landmark_topk(qkv: Array, positions: Array, slots: Array, **attributes: Any) -> tuple[_Output, ...]:
    def op(state: State) -> tuple[torch.Tensor, ...]:
        tensors = torch.from_numpy(qkv), torch.from_numpy(positions), torch.from_numpy(slots)
        return state.landmark_topk(attributes["layer"], *tensors)

    def zeros() -> tuple[torch.Tensor, ...]:
        q = torch.zeros(len(qkv), attributes["num_heads"] * attributes["head_size"])
        return q, torch.zeros(len(slots), attributes["num_kv_heads"], attributes["top_k"], dtype=torch.int32)

    return _call(op, zeros)


@_op(
    op_type=f"{names.DOMAIN}::{names.KEY_RECONSTRUCT}",
    inputs=[PyOp.dt_int32, PyOp.dt_int32],
    outputs=[PyOp.dt_int32],
    attrs=_LAYER,
)
def _key_reconstruct(selection: Array, slots: Array, **attributes: Any) -> tuple[_Output, ...]:
    def op(state: State) -> tuple[torch.Tensor, ...]:
        tensors = torch.from_numpy(selection), torch.from_numpy(slots)
        return (state.key_reconstruct(attributes["layer"], *tensors),)

    return _call(op, lambda: (torch.zeros(1, dtype=torch.int32),))


@_op(
    op_type=f"{names.DOMAIN}::{names.SPARSE_ATTENTION}",
    inputs=[PyOp.dt_float, PyOp.dt_int32, PyOp.dt_int32, PyOp.dt_int32],
    outputs=[PyOp.dt_float],
    attrs=_LAYER,
)
def _sparse_attention(
    q: Array, selection: Array, ticket: Array, slots: Array, **attributes: Any
) -> tuple[_Output, ...]:
    def op(state: State) -> tuple[torch.Tensor, ...]:
        tensors = [torch.from_numpy(a) for a in (q, selection, ticket, slots)]
        return (state.sparse_attention(attributes["layer"], *tensors),)

    return _call(op, lambda: (torch.zeros(q.shape),))


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class OnnxCpuExecutor:
    """Runs passes of one engine on the CPU.

    Args:
        engine: a checked engine directory with an ONNX file.
        state: owner of keys and values; the ops of every pass work on it.
        threads: for ONNX Runtime and for torch, which share the cores.

    Raises:
        EngineError: the directory has no ONNX file, or ONNX Runtime refuses it.
    """

    def __init__(self, engine: EngineDirectory, state: State, threads: int | None = None) -> None:
        if not engine.has_onnx:
            raise EngineError(
                f"{engine.path} has no {names.ONNX_FILE}",
                "an ONNX graph for the CPU executor",
                "build without --engine-only",
            )
        self.engine, self.state = engine, state
        self.threads = threads or usable_cores()
        self.session = self._open()

    def _open(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(get_library_path())
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # Spinning threads would take the cores from torch, which runs between ONNX Runtime's own nodes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        model = load(str(self.engine.path / names.ONNX_FILE), load_external_data=False)
        external = _load_weights(model, self.engine)
        _to_float32(model)
        options.add_external_initializers(
            list(external), [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in external.values()]
        )
        self._weights = external  # ONNX Runtime borrows their memory
        try:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as e:  # onnxruntime raises classes of its own without a common base
            raise EngineError(f"ONNX Runtime refuses {self.engine.path}: {' '.join(str(e).split())[:400]}") from e

    def context(self, slot: int, tokens: Sequence[int], start: int, is_last: bool, wanted: Sequence[int]) -> Array:
        """One stretch of one prompt.

        Args:
            tokens: its token ids; the first has position ``start``.
            is_last: it ends the prompt.
            wanted: indices into ``tokens`` of the positions whose logits are returned.

        Returns:
            logits [len(wanted), vocab] float32.
        """
        self.state.begin_pass("context", [slot], start, len(tokens), is_last)
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        last = np.asarray(wanted, np.int32) + 1
        return self._run(np.asarray(tokens, np.int32), positions, last, [slot], self.threads)

    def generation(self, slots: Sequence[int], tokens: Sequence[int]) -> Array:
        """One token of every row; a slot of −1 is a padding row.

        Returns:
            logits [len(slots), vocab] float32.
        """
        self.state.begin_pass("generation", slots, 0, 1, False)
        self.state.step_prologue()
        positions = [0 if s < 0 else self.state.length(s) - 1 for s in slots]
        last = np.arange(1, len(slots) + 1, dtype=np.int32)
        elements = max((self._attended(s) for s in slots if s >= 0), default=0)
        threads = self.threads if elements > _PARALLEL_ELEMENTS else 1
        return self._run(np.asarray(tokens, np.int32), np.asarray(positions, np.int32), last, slots, threads)

    def close(self) -> None:
        """Nothing to give back that Python does not."""

    def _attended(self, slot: int) -> int:
        """Elements of keys and values that one layer reads for a row's next token."""
        kv = self.state.config
        tokens = self.state.length(slot)
        if self.state.is_sealed(slot):
            tokens = kv.window + (kv.top_k + kv.outliers) * kv.chunk_size
        return 2 * tokens * self.engine.model.key_width

    def _run(self, tokens: Array, positions: Array, last: Array, slots: Sequence[int], threads: int) -> Array:
        feeds = {
            names.INPUT_IDS: tokens,
            names.POSITION_IDS: positions,
            names.LAST_TOKEN_IDS: np.asarray(last, np.int32),
            names.SEQUENCE_SLOTS: np.asarray(slots, np.int32),
        }
        torch.set_num_threads(threads)
        outer = getattr(_current, "state", None)
        _current.state, _current.error = self.state, None
        try:
            with torch.inference_mode():
                (logits,) = self.session.run([names.LOGITS], feeds)
            if _current.error is not None:
                raise _current.error
        finally:
            _current.state, _current.error = outer, None
            torch.set_num_threads(self.threads)
        return logits  # type: ignore[no-any-return]


def _load_weights(model: ModelProto, engine: EngineDirectory) -> dict[str, Array]:
    """The external initializers as float32 arrays: mapped where they are float32 in the file, converted where not."""
    path = engine.path / names.WEIGHTS_FILE
    data = np.memmap(path, dtype=np.uint8, mode="r")
    arrays: dict[str, Array] = {}
    dtypes = {number: name for name, number in ONNX_TYPES.items()}
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            where = {e.key: e.value for e in tensor.external_data}
            offset, length = int(where["offset"]), int(where["length"])
            if where["location"] != names.WEIGHTS_FILE or offset + length > len(data):
                raise EngineError(f"{names.ONNX_FILE} points outside {path}", todo="build the engine again")
            dtype = dtypes[tensor.data_type]
            array = data[offset : offset + length].view(NUMPY[dtype]).reshape(tuple(tensor.dims))
            arrays[tensor.name] = to_dtype(array, dtype, "float32", tensor.name)
    return arrays


def _to_float32(model: ModelProto) -> None:
    """Turn every 16-bit type of the graph into float32."""
    for tensor in model.graph.initializer:
        if tensor.data_type in _FLOATS:
            tensor.data_type = TensorProto.FLOAT
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _FLOATS:
                attribute.i = TensorProto.FLOAT
