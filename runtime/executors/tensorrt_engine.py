"""``rank0.engine`` in memory: checked against its manifest and this machine, then deserialised by TensorRT."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from trtllm_shadowkv import library, names
from trtllm_shadowkv.build import manifest, tensorrt_modules
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError, StateError

GENERATION, CONTEXT = 0, 1
"""Optimisation profiles."""
INPUTS = (names.INPUT_IDS, names.POSITION_IDS, names.LAST_TOKEN_IDS, names.SEQUENCE_SLOTS)


class _Log(threading.local):
    """What TensorRT said to this thread since it was last cleared."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(self) -> str:
        return " | ".join(self.lines[-3:]) or "it does not say why"


log = _Log()
_loggers: dict[str, Any] = {}  # by module: TensorRT keeps the first one that it gets for the whole process


class LoadedEngine:
    """A deserialised engine."""

    def __init__(self, trt: Any, engine: Any, runtime: Any) -> None:
        self._trt, self._engine = trt, engine
        self._runtime = runtime  # which the engine needs

    @classmethod
    def open(cls, directory: EngineDirectory, device: int) -> LoadedEngine:
        plugins = library.load()
        info = plugins.device_info(device)  # before TensorRT, which does not survive a machine without a GPU
        backend = directory.build.backend
        trt = tensorrt_modules.load(backend)
        if directory.has_manifest:
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
        expected = {*INPUTS, names.LOGITS}
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
        v2 = "_v2" if hasattr(e, "device_memory_size_v2") else ""  # before it sizes were 32 bits
        by_profile = getattr(e, f"get_device_memory_size_for_profile{v2}")
        whole = int(getattr(e, f"device_memory_size{v2}"))
        return max(1, whole, *(int(by_profile(p)) for p in range(e.num_optimization_profiles)))

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
