"""GPUs and their PCIe links from NVIDIA's management library, by ctypes; creates no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_TEXT = 96
"""NVML's longest string buffer for names and versions."""


@dataclass(frozen=True)
class GpuInfo:
    """One GPU; None: the driver does not say.

    Attributes:
        bus_id: PCI address, ``00000000:45:00.0``.
        memory, memory_free: bytes.
        compute_capability: ``9.0``.
        pcie_generation, pcie_width: of the link now; an idle GPU may lower its generation.
        pcie_max_generation, pcie_max_width: what GPU and slot can do.
        numa_node: filled in by the caller.
    """

    index: int
    name: str | None
    bus_id: str | None
    memory: int | None
    memory_free: int | None
    compute_capability: str | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    numa_node: int | None = None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs; ``problem`` says why there are none (``version`` may be known all the same).

    Attributes:
        version: ``580.95.05``.
        cuda: newest CUDA version the driver is for, ``13.0``.
    """

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    problem: str | None = None


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    """``nvmlPciInfo_t`` of nvmlDeviceGetPciInfo_v3."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class _NvmlError(Exception):
    pass


class _Nvml:
    """Calls with their status checked."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError as e:
            raise _NvmlError(f"this driver has no {name}") from e
        status = int(function(*arguments))
        if status:
            raise _NvmlError(f"{name}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        try:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            text: bytes | None = describe(ctypes.c_int(status))
        except AttributeError:
            text = None
        return (text or b"").decode(errors="replace") or f"status {status}"

    def maybe(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call ``name(*arguments, &result)`` and give back ``result``, or None where the call fails."""
        try:
            self(name, *arguments, ctypes.byref(result))
        except _NvmlError:
            return None
        return result

    def text(self, name: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(_TEXT)
        try:
            self(name, *arguments, buffer, ctypes.c_uint(_TEXT))
        except _NvmlError:
            return None
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: Any) -> int | None:
        found = self.maybe(name, ctypes.c_uint(), *arguments)
        return None if found is None else int(found.value)


def read_driver(library: str = "libnvidia-ml.so.1", load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """What the driver says; never raises.

    Args:
        library: the file to load.
        load: turns it into an object whose attributes are the C functions.
    """
    try:
        nvml = _Nvml(load(library))
    except OSError:
        return Driver(problem=f"no NVIDIA driver: {library} is not on this machine")
    try:
        nvml("nvmlInit_v2")
    except _NvmlError as e:
        return Driver(problem=f"the NVIDIA driver does not answer: {e}")
    try:
        version = nvml.text("nvmlSystemGetDriverVersion")
        cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
        cuda_text = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
        count = nvml.number("nvmlDeviceGetCount_v2") or 0
        gpus = tuple(_gpu(nvml, index) for index in range(count))
        return Driver(version, cuda_text, gpus, None if gpus else "the NVIDIA driver shows no GPU to this process")
    finally:
        with suppress(_NvmlError):
            nvml("nvmlShutdown")


def _gpu(nvml: _Nvml, index: int) -> GpuInfo:
    device = nvml.maybe("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p(), ctypes.c_uint(index))
    if device is None:
        return GpuInfo(index, *([None] * 9))
    memory = nvml.maybe("nvmlDeviceGetMemoryInfo", _Memory(), device)
    pci = nvml.maybe("nvmlDeviceGetPciInfo_v3", _Pci(), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    capability = nvml.maybe("nvmlDeviceGetCudaComputeCapability", minor, device, ctypes.byref(major))
    return GpuInfo(
        index=index,
        name=nvml.text("nvmlDeviceGetName", device),
        bus_id=None if pci is None else pci.busId.decode(errors="replace"),
        memory=None if memory is None else int(memory.total),
        memory_free=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else f"{major.value}.{minor.value}",
        pcie_generation=nvml.number("nvmlDeviceGetCurrPcieLinkGeneration", device),
        pcie_width=nvml.number("nvmlDeviceGetCurrPcieLinkWidth", device),
        pcie_max_generation=nvml.number("nvmlDeviceGetMaxPcieLinkGeneration", device),
        pcie_max_width=nvml.number("nvmlDeviceGetMaxPcieLinkWidth", device),
    )
