"""Host memory for values that GPUs read in place."""

from __future__ import annotations

import ctypes

from trtllm_shadowkv.library import Library
from trtllm_shadowkv.native_state import NativeHandle


class PinnedSlab(NativeHandle):
    """Zero-filled host memory that GPUs read in place, aligned to 2 MiB.

    Args:
        nbytes: 1 to 2^40.
        device: GPU through which it is registered.
        native: the library; None: the installed one.

    Attributes:
        device_address: where kernels find it.
        host_address: where the CPU does.

    Raises:
        ConfigError: ``nbytes`` or ``device`` out of range.
        MissingDependencyError: no library, driver or GPU.
        ShadowKVError: no memory, or it cannot be registered.
    """

    def __init__(self, nbytes: int, device: int = 0, native: Library | None = None) -> None:
        super().__init__("pinned slab", "tsk_pinned_destroy", native)
        self.nbytes = nbytes
        self._api("tsk_pinned_create", device, nbytes, ctypes.byref(self._handle))
        on_device, on_host = ctypes.c_uint64(), ctypes.c_void_p()
        self._call("tsk_pinned_address", ctypes.byref(on_device), ctypes.byref(on_host))
        self.device_address, self.host_address = on_device.value, int(on_host.value or 0)

    def buffer(self) -> memoryview:
        """Its bytes, for ``torch.frombuffer``; not to be used after :meth:`close`."""
        self._open()
        return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.host_address)).cast("B")
