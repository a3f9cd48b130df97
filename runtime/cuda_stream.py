"""A CUDA stream that nobody else has: torch hands out the same few streams again and again."""

from __future__ import annotations

import ctypes

from trtllm_shadowkv.library import Library
from trtllm_shadowkv.native_state import NativeHandle


class CudaStream(NativeHandle):
    """A stream that does not wait for the null stream.

    Args:
        device: the GPU's number.
        native: the library; None: the installed one.

    Attributes:
        handle: the cudaStream_t.

    Raises:
        ConfigError: ``device`` out of range.
        MissingDependencyError: no library, driver or GPU.
    """

    def __init__(self, device: int = 0, native: Library | None = None) -> None:
        super().__init__("stream", "tsk_stream_destroy", native)
        self._api("tsk_stream_create", device, ctypes.byref(self._handle))
        self.handle = self._open()
