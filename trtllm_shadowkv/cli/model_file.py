"""``trtllm-shadowkv model-file``: the model class for TensorRT-LLM's own builder."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from trtllm_shadowkv.errors import MissingDependencyError


def model_file() -> None:
    """Print the path of the file that trtllm-build takes as --model_cls_file (--model_cls_name ShadowKVForCausalLM)."""
    spec = find_spec("trtllm_shadowkv.build.trtllm_model")  # which imports nothing of TensorRT-LLM
    if spec is None or spec.origin is None:
        raise MissingDependencyError("this installation has no build/trtllm_model.py", todo="install the package again")
    typer.echo(spec.origin)
