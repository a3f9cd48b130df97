"""ShadowKV (arXiv 2410.21465) as an extension of TensorRT-LLM's compiled-engine backend.

``from trtllm_shadowkv import LLM, SamplingParams`` is all that generating text takes. Importing the package itself
imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_shadowkv.llm import LLM
    from trtllm_shadowkv.request import AttentionParams, RequestOutput, StreamDelta
    from trtllm_shadowkv.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AttentionParams", "RequestOutput", "SamplingParams", "StreamDelta", "__version__"]

_HOMES = {
    "LLM": "llm",
    "AttentionParams": "request",
    "RequestOutput": "request",
    "StreamDelta": "request",
    "SamplingParams": "sampling_params",
}

for _folder in ("build", "runtime"):
    if any((Path(_path) / _folder).is_file() for _path in __path__):
        raise ImportError(
            f"trtllm_shadowkv/{_folder} is a text file: this copy was made without symbolic links; "
            "clone it with git clone -c core.symlinks=true, or unpack the archive with tar or unzip"
        )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"trtllm_shadowkv.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
