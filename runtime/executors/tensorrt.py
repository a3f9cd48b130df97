"""The TensorRT executor: runs an engine's ``rank0.engine``, whose plugins work on a GPU state.

A generation pass of each batch size is captured in a CUDA graph the second time it runs, prologue included; rows are
padded to the next size. Every pass ends with its logits on the host, so nothing is under way between passes.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_shadowkv import names
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.native_state import DRY
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab
from trtllm_shadowkv.runtime.cuda_stream import CudaStream
from trtllm_shadowkv.runtime.executors.gpu_state import Capacity, GpuState, RowPages, wrong_inputs
from trtllm_shadowkv.runtime.executors.tensorrt_engine import CONTEXT, GENERATION, INPUTS, LoadedEngine, log
from trtllm_shadowkv.runtime.state import PADDING
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool

_SPARE_BYTES = 2 << 30
"""Of device memory that is left to CUDA's graphs and modules, and to the caller."""
_INPUT_STEP = 64
"""TensorRT wants inputs at multiples of 256 bytes."""
_CAPTURES = 3
"""Tries to capture passes before it is given up."""
_device_lock = threading.RLock()
"""Held by what captures, and by what waits for the whole device, which breaks captures of other threads."""

_log = logging.getLogger(__name__)
Array = NDArray[Any]
Progress = Callable[[int, int], None]


def batch_sizes(most: int) -> list[int]:
    """Rows of the graphs that are captured: powers of two, and the largest batch."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})


class TensorRtExecutor:
    """Runs passes of one engine on one GPU.

    Args:
        engine: a checked engine directory with an engine file.
        config: settings of the state, rank resolved.
        device_memory: bytes for live pages and sealed state; None: what is left once the engine is loaded.
        host_memory: bytes of pinned memory for values.
        device: the GPU's number.
        graphs: capture generation passes; False: every pass is launched kernel by kernel.
        progress: called with bytes of pinned memory that are there, and in all.

    Raises:
        EngineError: the engine was compiled by another TensorRT, for another GPU or with other plugins, is damaged, or
            has auxiliary streams.
        ConfigError: too little memory for one row.
        MissingDependencyError: no TensorRT, plugin library or GPU.
    """

    def __init__(
        self,
        engine: EngineDirectory,
        config: ShadowKVConfig,
        *,
        device_memory: int | None,
        host_memory: int,
        device: int = 0,
        graphs: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.engine, self.graphs = engine, graphs
        self._device = torch.device("cuda", device)
        self._sizes = batch_sizes(engine.build.max_batch_size)
        self._ran: set[int] = set()
        self._failed_captures = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        with _device_lock, ExitStack() as held:
            self._own = held.enter_context(CudaStream(device))
            self._stream = torch.cuda.ExternalStream(self._own.handle, self._device)
            self._loaded: LoadedEngine | None = LoadedEngine.open(engine, device)
            self._make_buffers(self._loaded, held)
            self.state = self._make_state(config, device_memory, host_memory, progress)
            held.callback(self.state.close)
            self._process = os.getpid()
            self._finalizer = weakref.finalize(self, _give_back, self._process, held.pop_all())

    def _make_buffers(self, loaded: LoadedEngine, held: ExitStack) -> None:
        most = max(self.engine.build.max_num_tokens, self.engine.build.max_batch_size)
        most = -(-most // _INPUT_STEP) * _INPUT_STEP
        wanted = max(loaded.most(p, names.LAST_TOKEN_IDS) for p in (GENERATION, CONTEXT))
        vocab = self.engine.model.vocab_size
        # Not torch's pinned memory, which torch gives back by way of the streams that used it.
        self._staged = self._pinned(held, torch.int32, len(INPUTS), most)
        self._answer = self._pinned(held, torch.float32, wanted, vocab)
        with torch.cuda.device(self._device):
            self._scratch = torch.empty(loaded.activation_bytes, dtype=torch.uint8, device=self._device)
            self._inputs = torch.zeros(len(INPUTS), most, dtype=torch.int32, device=self._device)
            self._logits = torch.empty(wanted, vocab, device=self._device)
            # Here, where what is left of the device's memory is not yet the state's. Those of generation passes have
            # one shape for good, as their graphs must; all share one scratch.
            self._contexts = {
                size: loaded.context(GENERATION if size else CONTEXT, self._scratch, self._stream.cuda_stream)
                for size in (0, *self._sizes)
            }
            for size in self._sizes:
                self._point(self._contexts[size], (size,) * len(INPUTS))
            self._stream.synchronize()

    def _pinned(self, held: ExitStack, dtype: torch.dtype, *shape: int) -> Tensor:
        slab = held.enter_context(PinnedSlab(prod(shape) * dtype.itemsize, self._device.index))
        return torch.frombuffer(slab.buffer(), dtype=dtype, count=prod(shape)).view(shape)

    def _make_state(
        self, config: ShadowKVConfig, device_memory: int | None, host_memory: int, progress: Progress | None
    ) -> GpuState:
        build, model, config = self.engine.build, self.engine.model, config.resolved(self.engine.model.key_width)
        rows, tokens = build.max_batch_size, self.engine.max_seq_len
        if device_memory is None:
            torch.cuda.empty_cache()
            device_memory = torch.cuda.mem_get_info(self._device)[0] - _SPARE_BYTES

        def make(device: int, live_pages: int, sealed_pages: int, sealed_rows: int) -> CudaState:
            return CudaState(
                model,
                config,
                dtype=build.dtype,
                max_tokens=tokens,
                slots=rows,
                sealed_rows=sealed_rows,
                max_batch=max(self._sizes),
                live_pages=live_pages,
                sealed_pages=sealed_pages,
                device=device,
            )

        def size_of(live_pages: int, sealed_pages: int, sealed_rows: int) -> int:
            with make(DRY, live_pages, sealed_pages, sealed_rows) as dry:
                return dry.device_bytes

        capacity = Capacity.within(device_memory, rows, tokens, config, size_of)
        cuda = make(self._device.index, capacity.live_pages, capacity.sealed_pages, capacity.sealed_rows)
        values = None
        try:
            if capacity.sealed_rows:
                chunks = RowPages.of(config, tokens, tokens, dense=False).chunks
                region = GpuState.region_of(model, config, cuda.value_format, chunks)
                make_slab = partial(PinnedSlab, device=self._device.index)
                most = rows * model.num_layers * region  # what all rows could use
                values = PinnedValuePool(min(host_memory, most), region, make_slab, progress)
            return GpuState(cuda, values, capacity, self._own.handle)
        except BaseException:
            cuda.close()
            if values is not None:
                values.close()
            raise

    # --- passes -------------------------------------------------------------------------------------------------------

    def context(self, slot: int, tokens: Sequence[int], start: int, is_last: bool, wanted: Sequence[int]) -> Array:
        """One stretch of one prompt.

        Args:
            tokens: its token ids; the first has position ``start``.
            is_last: it ends the prompt.
            wanted: indices into ``tokens`` of the positions whose logits are returned, 1 to 128 of them.

        Returns:
            logits [len(wanted), vocab] float32, to be read before the next pass.
        """
        loaded = self._open()
        most = loaded.most(CONTEXT, names.LAST_TOKEN_IDS)
        if not 1 <= len(wanted) <= most:
            raise StateError(f"logits of {len(wanted)} positions in one pass", f"from 1 to {most}")
        self.state.begin_pass("context", [slot], start, len(tokens), is_last)
        with self._pass():
            self._stage(tokens, range(start, start + len(tokens)), [i + 1 for i in wanted], [slot])
            self._point(self._contexts[0], (len(tokens), len(tokens), len(wanted), 1))
            self._execute(self._contexts[0])
            return self._result(len(wanted))

    def generation(self, slots: Sequence[int], tokens: Sequence[int]) -> Array:
        """One token of every row; a slot of −1 is a padding row.

        Returns:
            logits [len(slots), vocab] float32, to be read before the next pass.
        """
        self._open()
        size = next(size for size in self._sizes if size >= len(slots))
        padding = size - len(slots)
        rows = [*slots, *[PADDING] * padding]
        positions = self.state.cuda.begin_generation(rows)
        with self._pass():
            self._stage([*tokens, *[0] * padding], positions, range(1, size + 1), rows)
            if self.graphs and size in self._ran and size not in self._graphs:
                self._capture(size)
            if size in self._graphs:
                self._graphs[size].replay()
            else:
                self._step(size)
                self._ran.add(size)
            return self._result(len(slots))

    def _step(self, size: int) -> None:
        slots = self._inputs[INPUTS.index(names.SEQUENCE_SLOTS)]
        self.state.cuda.step_prologue(slots.data_ptr(), size, self._own.handle)
        self._execute(self._contexts[size])

    def _capture(self, size: int) -> None:
        """Capture a step, which TensorRT wants to have run once; nothing of it runs. Where it cannot be, none is."""
        if not _device_lock.acquire(blocking=False):  # another executor captures, opens or closes: next time
            return
        try:
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._step(size)
            self._graphs[size] = graph
        except Exception as e:  # whoever else uses the device in this process may have waited for all of it
            self._failed_captures += 1
            self.graphs = self._failed_captures < _CAPTURES
            _log.warning(
                "a generation pass could not be captured as a CUDA graph (try %d): %s", self._failed_captures, e
            )
        finally:
            _device_lock.release()

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Where it fails, nothing of it runs on, and what its kernels found is not taken for the next one's."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            try:
                yield
            except BaseException:
                with suppress(Exception), _device_lock:
                    torch.cuda.synchronize()  # fetches run on a stream of the state's own
                    self.state.cuda.fault(self._own.handle)
                raise

    def _open(self) -> LoadedEngine:
        if self._loaded is None:
            raise StateError("the executor is closed", "an open one")
        return self._loaded

    def _stage(self, *inputs: Sequence[int]) -> None:
        """Copy the inputs, in the order of ``INPUTS``, to where the engine reads them."""
        for staged, there, values in zip(self._staged, self._inputs, inputs, strict=True):
            staged[: len(values)] = torch.from_numpy(np.asarray(values, np.int32))
            there[: len(values)].copy_(staged[: len(values)], non_blocking=True)

    def _point(self, context: Any, lengths: Sequence[int]) -> None:
        """Say how long the inputs are, and where inputs and logits lie."""
        log.lines.clear()
        for name, tensor, length in zip(INPUTS, self._inputs, lengths, strict=True):
            if not context.set_input_shape(name, (length,)) or not context.set_tensor_address(name, tensor.data_ptr()):
                raise StateError(f"TensorRT refuses {name} of length {length}: {log.text()}")
        if not context.set_tensor_address(names.LOGITS, self._logits.data_ptr()):
            raise StateError(f"TensorRT refuses the address of {names.LOGITS}: {log.text()}")

    def _execute(self, context: Any) -> None:
        log.lines.clear()
        if not context.execute_async_v3(self._own.handle):
            raise StateError(f"TensorRT could not run a pass: {log.text()}")

    def _result(self, count: int) -> Array:
        self._answer[:count].copy_(self._logits[:count], non_blocking=True)
        fault = self.state.cuda.fault(self._own.handle)  # waits for the stream
        if fault:
            raise wrong_inputs(fault)
        return self._answer[:count].numpy()

    def close(self) -> None:
        """Give all memory back; nothing to do the second time, or in a fork of the process that took it."""
        if os.getpid() != self._process:
            return
        with _device_lock:
            self._graphs.clear()
            self._contexts.clear()
            self._scratch = self._inputs = self._staged = self._logits = self._answer = torch.empty(0)
            try:
                self._finalizer()
            finally:
                self._loaded = None
            with suppress(RuntimeError):  # a device that has failed
                torch.cuda.empty_cache()


def _give_back(process: int, held: ExitStack) -> None:
    """Unless this is a fork of the process that took it: CUDA is none of its business."""
    if os.getpid() == process:
        with _device_lock:
            held.close()
