"""Where the tests of this folder run: on a GPU, or on the emulated one (tests/emulator), whose memory is the host's."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

EMULATED = os.environ.get("TRTLLM_SHADOWKV_EMULATED") == "1"
"""Then TRTLLM_SHADOWKV_LIBRARY names the library for the emulated GPU."""

DEVICE = "cpu" if EMULATED else "cuda"


class EmulatedStream:
    """In place of a torch stream: everything is done when a call returns."""

    cuda_stream = 3  # 1 and 2 are names of the null stream

    def synchronize(self) -> None:
        pass


def new_stream() -> Any:
    return EmulatedStream() if EMULATED else torch.cuda.Stream()


def working_on(stream: Any) -> AbstractContextManager[Any]:
    """torch's work goes to ``stream``."""
    return nullcontext() if EMULATED else torch.cuda.stream(stream)


def synchronize() -> None:
    if not EMULATED:
        torch.cuda.synchronize()
