"""Reading a driver through NVML's C interface: functions written here that fill the caller's memory as NVML does."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from trtllm_shadowkv.nvml import read_driver

SUCCESS, NOT_SUPPORTED, DRIVER_NOT_LOADED = 0, 3, 9


class Function:
    """Something callable that, like a function of ctypes, takes a ``restype``."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.body(*arguments)


def target(reference: Any) -> Any:
    return reference._obj


class Library:
    """One GPU on a link of generation 5 that has trained to 8 of 16 lanes."""

    def __init__(self, **replaced: Any) -> None:
        self.ended = 0
        functions = {
            "nvmlInit_v2": lambda: SUCCESS,
            "nvmlShutdown": self.shut_down,
            "nvmlErrorString": lambda status: f"reason {status.value}".encode(),
            "nvmlSystemGetDriverVersion": self.text("580.95.05"),
            "nvmlSystemGetCudaDriverVersion_v2": self.number(13000),
            "nvmlDeviceGetCount_v2": self.number(1),
            "nvmlDeviceGetHandleByIndex_v2": self.handle,
            "nvmlDeviceGetName": self.text("NVIDIA H200"),
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetPciInfo_v3": self.pci,
            "nvmlDeviceGetCudaComputeCapability": self.capability,
            "nvmlDeviceGetCurrPcieLinkGeneration": self.number(5),
            "nvmlDeviceGetCurrPcieLinkWidth": self.number(8),
            "nvmlDeviceGetMaxPcieLinkGeneration": self.number(5),
            "nvmlDeviceGetMaxPcieLinkWidth": self.number(16),
            **replaced,
        }
        for name, body in functions.items():
            if body is not None:
                setattr(self, name, Function(body))

    def shut_down(self) -> int:
        self.ended += 1
        return SUCCESS

    @staticmethod
    def text(value: str) -> Any:
        def write(*arguments: Any) -> int:
            buffer, size = arguments[-2:]
            assert len(buffer) == size.value
            buffer.value = value.encode()
            return SUCCESS

        return write

    @staticmethod
    def number(value: int) -> Any:
        def write(*arguments: Any) -> int:
            target(arguments[-1]).value = value
            return SUCCESS

        return write

    @staticmethod
    def handle(index: Any, out: Any) -> int:
        target(out).value = 0x1000 + index.value
        return SUCCESS

    @staticmethod
    def memory(device: Any, out: Any) -> int:
        assert device.value == 0x1000
        # nvmlMemory_t: three 64-bit numbers, written here as bytes, not through the caller's own structure
        raw = (143771 << 20).to_bytes(8, "little") + (100 << 30).to_bytes(8, "little") + bytes(8)
        ctypes.memmove(ctypes.addressof(target(out)), raw, 24)
        return SUCCESS

    @staticmethod
    def pci(device: Any, out: Any) -> int:
        raw = b"0000:45:00.0".ljust(16, b"\0") + bytes(20) + b"00000000:45:00.0".ljust(32, b"\0")
        assert ctypes.sizeof(target(out)) == len(raw) == 68
        ctypes.memmove(ctypes.addressof(target(out)), raw, len(raw))
        return SUCCESS

    @staticmethod
    def capability(device: Any, major: Any, minor: Any) -> int:
        target(major).value, target(minor).value = 9, 0
        return SUCCESS


def test_one_gpu() -> None:
    library = Library()
    found = read_driver(load=lambda name: library)
    assert (found.version, found.cuda, found.problem) == ("580.95.05", "13.0", None)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.compute_capability, gpu.bus_id) == ("NVIDIA H200", "9.0", "00000000:45:00.0")
    assert (gpu.memory, gpu.memory_free) == (143771 << 20, 100 << 30)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.pcie_max_generation, gpu.pcie_max_width) == (5, 8, 5, 16)
    assert library.ended == 1


def test_no_driver() -> None:
    found = read_driver("libthere-is-no-such-library.so.1")
    assert found.gpus == () and found.version is None
    assert found.problem == "no NVIDIA driver: libthere-is-no-such-library.so.1 is not on this machine"


def test_driver_that_is_not_loaded() -> None:
    library = Library(nvmlInit_v2=lambda: DRIVER_NOT_LOADED)
    found = read_driver(load=lambda name: library)
    assert found.problem == "the NVIDIA driver does not answer: nvmlInit_v2: reason 9"
    assert library.ended == 0


def test_library_of_another_kind() -> None:
    found = read_driver(load=lambda name: object())
    assert found.problem == "the NVIDIA driver does not answer: this driver has no nvmlInit_v2"


def test_no_gpu_shown() -> None:
    found = read_driver(load=lambda name: Library(nvmlDeviceGetCount_v2=Library.number(0)))
    assert found.version == "580.95.05" and found.problem == "the NVIDIA driver shows no GPU to this process"


@pytest.mark.parametrize("absent", [True, False])
def test_what_the_driver_does_not_say_is_unknown(absent: bool) -> None:
    body = None if absent else (lambda *arguments: NOT_SUPPORTED)
    names = [
        name
        for name in vars(Library())
        if name.startswith(("nvmlDeviceGet", "nvmlSystem")) and "Count" not in name and "Handle" not in name
    ]
    assert len(names) == 10
    found = read_driver(load=lambda name: Library(**dict.fromkeys(names, body)))
    (gpu,) = found.gpus
    assert found.version is None and found.cuda is None
    assert {value for key, value in vars(gpu).items() if key != "index"} == {None}


def test_gpu_that_fell_off_the_bus() -> None:
    found = read_driver(load=lambda name: Library(nvmlDeviceGetHandleByIndex_v2=lambda *arguments: 15))
    assert len(found.gpus) == 1 and found.gpus[0].name is None
