"""The TensorRT executor: runs an engine's ``rank0.engine``, whose plugins work on a GPU state.

A generation pass of each batch size is captured in a CUDA graph the second time it runs, prologue included; rows are
padded to the next size. Every pass ends with its logits on the host, so nothing is under way between passes.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_shadowkv import library, names
from trtllm_shadowkv.build import manifest, tensorrt_modules
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError, StateError
from trtllm_shadowkv.native_state import DRY
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab
from trtllm_shadowkv.runtime.cuda_stream import CudaStream
from trtllm_shadowkv.runtime.executors.gpu_state import Capacity, GpuState, RowPages
from trtllm_shadowkv.runtime.state import PADDING
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool

GENERATION, CONTEXT = 0, 1
"""Optimisation profiles."""
_INPUTS = (names.INPUT_IDS, names.POSITION_IDS, names.LAST_TOKEN_IDS, names.SEQUENCE_SLOTS)
_SPARE_BYTES = 2 << 30
"""Of device memory that is left to CUDA's graphs and modules, and to the caller."""
_INPUT_STEP = 64
"""TensorRT wants inputs at multiples of 256 bytes."""

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
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._own = CudaStream(device)
        try:
            self._stream = torch.cuda.ExternalStream(self._own.handle, self._device)
            self._loaded: _Loaded | None = _Loaded.open(engine, device)
            self._make_buffers(self._loaded)
            self.state = self._make_state(config, device_memory, host_memory, progress)
        except BaseException:
            self._own.close()
            raise
        self._finalizer = weakref.finalize(self, _give_back, os.getpid(), self.state, self._own)

    def _make_buffers(self, loaded: _Loaded) -> None:
        most = max(self.engine.build.max_num_tokens, self.engine.build.max_batch_size)
        most = -(-most // _INPUT_STEP) * _INPUT_STEP
        wanted = max(loaded.most(p, names.LAST_TOKEN_IDS) for p in (GENERATION, CONTEXT))
        with torch.cuda.device(self._device):
            self._scratch = torch.empty(loaded.activation_bytes, dtype=torch.uint8, device=self._device)
            self._inputs = torch.zeros(len(_INPUTS), most, dtype=torch.int32, device=self._device)
            self._staged = torch.zeros(len(_INPUTS), most, dtype=torch.int32, pin_memory=True)
            self._logits = torch.empty(wanted, self.engine.model.vocab_size, device=self._device)
            self._answer = torch.empty(wanted, self.engine.model.vocab_size, pin_memory=True)
            # Here, where what is left of the device's memory is not yet the state's. Those of generation passes have
            # one shape for good, as their graphs must; all share one scratch.
            self._contexts = {
                size: loaded.context(GENERATION if size else CONTEXT, self._scratch, self._stream.cuda_stream)
                for size in (0, *self._sizes)
            }
            for size in self._sizes:
                self._point(self._contexts[size], (size,) * len(_INPUTS))
            torch.cuda.synchronize()

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
            logits [len(wanted), vocab] float32.
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
            logits [len(slots), vocab] float32.
        """
        self._open()
        size = next(size for size in self._sizes if size >= len(slots))
        padding = size - len(slots)
        rows = [*slots, *[PADDING] * padding]
        self.state.begin_pass("generation", rows, 0, 1, False)
        positions = [0 if s == PADDING else self.state.length(s) - 1 for s in rows]
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
        slots = self._inputs[_INPUTS.index(names.SEQUENCE_SLOTS)]
        self.state.cuda.step_prologue(slots.data_ptr(), size, self._own.handle)
        self._execute(self._contexts[size])

    def _capture(self, size: int) -> None:
        """Capture a step, which TensorRT wants to have run once; nothing of it runs. Where it cannot be, none is."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._step(size)
        except Exception as e:
            self.graphs = False
            _log.warning("generation passes run without CUDA graphs from now on: %s", e)
            return
        self._graphs[size] = graph

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Where it fails, nothing of it runs on, and what its kernels found is not taken for the next one's."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            try:
                yield
            except BaseException:
                with suppress(Exception):
                    torch.cuda.synchronize()
                    self.state.cuda.fault(self._own.handle)
                raise

    def _open(self) -> _Loaded:
        if self._loaded is None:
            raise StateError("the executor is closed", "an open one")
        return self._loaded

    def _stage(self, *inputs: Sequence[int]) -> None:
        """Copy the inputs, in the order of ``_INPUTS``, to where the engine reads them."""
        for staged, there, values in zip(self._staged, self._inputs, inputs, strict=True):
            staged[: len(values)] = torch.from_numpy(np.asarray(values, np.int32))
            there[: len(values)].copy_(staged[: len(values)], non_blocking=True)

    def _point(self, context: Any, lengths: Sequence[int]) -> None:
        """Say how long the inputs are, and where inputs and logits lie."""
        log.lines.clear()
        for name, tensor, length in zip(_INPUTS, self._inputs, lengths, strict=True):
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
            raise StateError(f"kernels found wrong inputs (fault bits {fault})", "0", "report this as a bug")
        return self._answer[:count].numpy().copy()

    def close(self) -> None:
        """Give all memory back; nothing to do the second time."""
        self._graphs.clear()
        self._contexts.clear()
        self._finalizer()
        self._loaded = None
        self._scratch = self._inputs = self._staged = self._logits = self._answer = torch.empty(0)
        torch.cuda.empty_cache()


def _give_back(process: int, state: GpuState, stream: CudaStream) -> None:
    """Unless this is a fork of the process that took it: CUDA is none of its business."""
    if os.getpid() == process:
        state.close()
        stream.close()


class _Log:
    """What TensorRT said since it was last cleared."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(self) -> str:
        return " | ".join(self.lines[-3:]) or "it does not say why"


log = _Log()
_loggers: dict[str, Any] = {}  # by module: TensorRT keeps the first one that it gets for the whole process


class _Loaded:
    """A deserialised engine."""

    def __init__(self, trt: Any, engine: Any, runtime: Any) -> None:
        self._trt, self._engine = trt, engine
        self._runtime = runtime  # which the engine needs

    @classmethod
    def open(cls, directory: EngineDirectory, device: int) -> _Loaded:
        plugins = library.load()
        info = plugins.device_info(device)  # before TensorRT, which does not survive a machine without a GPU
        backend = directory.build.backend
        trt = tensorrt_modules.load(backend)
        _check_made_for(directory, str(trt.__version__), info.compute_capability, plugins.version)
        logger = _loggers.setdefault(trt.__name__, _logger(trt))
        registry = trt.get_plugin_registry()
        if registry.get_creator(names.LANDMARK_TOPK, names.PLUGIN_VERSION, names.DOMAIN) is None:
            registry.load_library(str(plugins.path.resolve()))
        log.lines.clear()
        with torch.cuda.device(device):
            runtime = trt.Runtime(logger)
            engine = runtime.deserialize_cuda_engine((directory.path / names.ENGINE_FILE).read_bytes())
        if engine is None:
            path = directory.path / names.ENGINE_FILE
            raise EngineError(f"TensorRT cannot load {path}: {log.text()}", todo="build the engine again")
        loaded = cls(trt, engine, runtime)
        loaded._check(directory)
        return loaded

    def _check(self, directory: EngineDirectory) -> None:
        e, path = self._engine, directory.path / names.ENGINE_FILE
        found = {e.get_tensor_name(i) for i in range(e.num_io_tensors)}
        expected = {*_INPUTS, names.LOGITS}
        for what, there, wanted in (
            ("auxiliary streams", e.num_aux_streams, 0),
            ("optimisation profiles", e.num_optimization_profiles, 2),
            ("inputs and outputs", sorted(found), sorted(expected)),
        ):
            if there != wanted:
                raise EngineError(f"{path} has {what} {there}", str(wanted), "build it with trtllm-shadowkv build")

    def most(self, profile: int, name: str) -> int:
        """Largest length of an input."""
        return int(self._engine.get_tensor_profile_shape(name, profile)[2][0])

    @property
    def activation_bytes(self) -> int:
        """Scratch that one pass of any profile needs."""
        e = self._engine
        by_profile = getattr(e, "get_device_memory_size_for_profile_v2", e.get_device_memory_size_for_profile)
        whole = getattr(e, "device_memory_size_v2", e.device_memory_size)
        return max(1, int(whole), *(int(by_profile(p)) for p in range(e.num_optimization_profiles)))

    def context(self, profile: int, scratch: Tensor, stream: int) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise StateError(f"TensorRT makes no execution context: {log.text()}")
        context.set_device_memory(scratch.data_ptr(), scratch.nbytes)
        if not context.set_optimization_profile_async(profile, stream):
            raise StateError(f"TensorRT refuses profile {profile}: {log.text()}")
        return context


def _check_made_for(directory: EngineDirectory, version: str, capability: tuple[int, int], plugins: str) -> None:
    made = manifest.read(directory.path)
    here = f"{capability[0]}.{capability[1]}"
    again = f"trtllm-shadowkv build --refresh {directory.path}"
    architectures = str(made["gpu_architecture"]).split("+")
    if here not in architectures:
        raise EngineError(
            f"{directory.path} was compiled for compute capability {', '.join(architectures)}", here, again
        )
    for what, found, expected in (
        ("TensorRT", made["tensorrt_version"], version),
        ("plugin library", made["plugin_library_version"], plugins),
    ):
        if found != expected:
            raise EngineError(f"{directory.path} was compiled with {what} {found}", expected, again)


def _logger(trt: Any) -> Any:
    errors = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in errors:
                log.lines.append(" ".join(text.split())[:300])

    return Logger()
