"""``libtrtllm_shadowkv.so``: where it is, and its C ABI (``plugins/state/c_api.h``) with Python's types.

The library is part of the package where a CUDA toolkit was found when the package was installed. It needs neither
TensorRT nor torch, and no GPU to be loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trtllm_shadowkv
from trtllm_shadowkv.errors import ConfigError, MissingDependencyError, NoRoomError, ShadowKVError, StateError

ENVIRONMENT = "TRTLLM_SHADOWKV_LIBRARY"
"""Environment variable that names the library's file; where it is set, nothing else is looked at."""

FILE = "libtrtllm_shadowkv.so"

# tsk_status of plugins/state/c_api.h.
_OK, _INVALID_ARGUMENT, _NO_DRIVER, _NO_DEVICE = range(4)
_WRONG_STATE, _OUT_OF_CAPACITY = 7, 8

_HOW_TO_GET = (
    "with a CUDA 12.8+ toolkit and a C++ compiler at hand (the toolkit also comes by: pip install --no-deps "
    "-r requirements/cuda.txt) install the package again from its source: TRTLLM_SHADOWKV_CUDA=ON pip install ."
)


class _Device(ctypes.Structure):
    """``tsk_device``."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("pci_bus_id", ctypes.c_char * 32),
        ("memory_bytes", ctypes.c_int64),
        ("l2_bytes", ctypes.c_int64),
        ("compute_major", ctypes.c_int32),
        ("compute_minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("runtime_version", ctypes.c_int32),
    )


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU.

    Attributes:
        name: as the driver says it, ``NVIDIA H200``.
        pci_bus_id: ``0000:45:00.0``.
        memory_bytes: all of its memory.
        l2_bytes: its L2 cache.
        compute_capability: (9, 0) for an H200.
        multiprocessors: 132 for an H200.
        driver_version: newest CUDA version its driver is for, (13, 0).
        runtime_version: CUDA version of the runtime inside the library.
    """

    name: str
    pci_bus_id: str
    memory_bytes: int
    l2_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    driver_version: tuple[int, int]
    runtime_version: tuple[int, int]


def find() -> Path | None:
    """The library's file, or None where this installation has none.

    Raises:
        MissingDependencyError: the environment variable names a file that does not exist.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named)
        if not path.is_file():
            raise MissingDependencyError(
                f"{ENVIRONMENT} is {named!r}, which is no file", f"the path of a {FILE}", "correct it or unset it"
            )
        return path
    # An editable installation has two folders: the checkout, and site-packages with what was compiled.
    return next((p for folder in trtllm_shadowkv.__path__ if (p := Path(folder) / FILE).is_file()), None)


def load() -> Library:
    """Load the library and check that it belongs to this package.

    Raises:
        MissingDependencyError: there is none, or it cannot be loaded here, or it is of another version.
    """
    path = find()
    if path is None:
        raise MissingDependencyError(f"{FILE} is not in this installation of trtllm-shadowkv", todo=_HOW_TO_GET)
    return Library(path)


class Library:
    """A loaded ``libtrtllm_shadowkv.so``. Its methods may be called from several threads at once.

    Each raises :class:`MissingDependencyError` where there is no CUDA driver or no GPU, :class:`ConfigError` for an
    argument out of range, and :class:`ShadowKVError` where a CUDA or system call failed (the call and the reason are
    in the message).
    """

    def __init__(self, path: Path) -> None:
        """Load ``path``.

        Raises:
            MissingDependencyError: it cannot be loaded here, is no library of ours or is of another version.
        """
        self.path = path
        try:
            self._lib = ctypes.CDLL(str(path.resolve()))
        except OSError as e:
            raise MissingDependencyError(
                f"{path} cannot be loaded: {' '.join(str(e).split())}", todo=_HOW_TO_GET
            ) from e
        self._version = self.function("tsk_version", ctypes.c_char_p)
        expected = trtllm_shadowkv.__version__
        if self.version != expected:
            raise MissingDependencyError(
                f"{path} is of version {self.version}", f"{expected}, the package's version", _HOW_TO_GET
            )
        self._last_error = self.function("tsk_last_error", ctypes.c_char_p)
        self._device_count = self.function("tsk_device_count", ctypes.c_int, ctypes.POINTER(ctypes.c_int32))
        self._device_info = self.function("tsk_device_info", ctypes.c_int, ctypes.c_int32, ctypes.POINTER(_Device))
        self._measure_link = self.function(
            "tsk_measure_link",
            ctypes.c_int,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_double),
        )

    @property
    def version(self) -> str:
        """Version of the package that the library was compiled for."""
        version: bytes = self._version()
        return version.decode()

    def device_count(self) -> int:
        """GPUs that this process may use, at least 1."""
        count = ctypes.c_int32()
        self.check(self._device_count(ctypes.byref(count)))
        return count.value

    def device_info(self, device: int = 0) -> DeviceInfo:
        """What GPU number ``device`` is; creates no CUDA context."""
        found = _Device()
        self.check(self._device_info(whole("device", device, 32), ctypes.byref(found)))
        return DeviceInfo(
            name=found.name.decode(errors="replace"),
            pci_bus_id=found.pci_bus_id.decode(errors="replace"),
            memory_bytes=found.memory_bytes,
            l2_bytes=found.l2_bytes,
            compute_capability=(found.compute_major, found.compute_minor),
            multiprocessors=found.multiprocessors,
            driver_version=_cuda_version(found.driver_version),
            runtime_version=_cuda_version(found.runtime_version),
        )

    def measure_link(self, device: int = 0, chunk_bytes: int = 2048, footprint_bytes: int = 1 << 30) -> float:
        """How fast a GPU gathers chunks that lie at random in pinned host memory, in 10^9 bytes a second.

        Args:
            device: the GPU's number.
            chunk_bytes: a multiple of 16 from 128 to 8192.
            footprint_bytes: host memory that the chunks are spread over, 2^24 to 2^36; it is taken for the time of the
                call, as is up to 256 MiB on the GPU. Small chunks are slower where the footprint is larger.

        The bytes that arrive are compared with the host's; wrong ones are a :class:`ShadowKVError`.
        """
        speed = ctypes.c_double()
        status = self._measure_link(
            whole("device", device, 32),
            whole("chunk_bytes", chunk_bytes, 64),
            whole("footprint_bytes", footprint_bytes, 64),
            ctypes.byref(speed),
        )
        self.check(status)
        return speed.value

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """The library's function ``name`` with ctypes' result and argument types.

        Raises:
            MissingDependencyError: there is none.
        """
        try:
            function = getattr(self._lib, name)
        except AttributeError as e:
            raise MissingDependencyError(
                f"{self.path} has no function {name}: it is no {FILE}, or an older build of it", todo=_HOW_TO_GET
            ) from e
        function.restype = result
        function.argtypes = arguments
        return function  # type: ignore[no-any-return]

    def check(self, status: int) -> None:
        """Raise this thread's last error, unless ``status``, which its last call returned, is TSK_OK.

        Raises:
            StateError: the call does not fit what was called before.
            NoRoomError: a state's capacity is used up.
            MissingDependencyError, ConfigError, ShadowKVError: see the class.
        """
        if status == _OK:
            return
        message: bytes = self._last_error()
        text = message.decode(errors="replace")
        if status in (_NO_DRIVER, _NO_DEVICE):
            raise MissingDependencyError(text)
        if status in (_WRONG_STATE, _OUT_OF_CAPACITY):
            raise (StateError if status == _WRONG_STATE else NoRoomError)(text)
        raise ConfigError(text) if status == _INVALID_ARGUMENT else ShadowKVError(text)


def _cuda_version(number: int) -> tuple[int, int]:
    """13000 -> (13, 0)."""
    return number // 1000, number % 1000 // 10


def whole(name: str, value: int, bits: int) -> int:
    """``value``, a signed number, refused where ctypes would silently cut off bits.

    Raises:
        ConfigError: it is none of ``bits`` bits.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ConfigError(f"{name} is {value!r}", f"a whole number of {bits} bits")
    return value


def address(name: str, value: int | None) -> int | None:
    """``value`` as a pointer for ctypes, None for null; refused where ctypes would silently cut off bits.

    Raises:
        ConfigError: it is no address.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64):
        raise ConfigError(f"{name} is {value!r}", "an address: a whole number from 0 to 2^64 - 1")
    return value or None
