"""Names that cross a boundary: engine inputs and outputs, ops, their attributes.

``plugins/names.h`` is generated from this file when CMake configures, so C++ and Python cannot drift apart.
"""

from __future__ import annotations

DOMAIN = "trtllm_shadowkv"
"""ONNX domain of the three ops and TensorRT plugin namespace."""

PLUGIN_VERSION = "1"

# Engine inputs (TensorRT-LLM's names where it has one) and output.
INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
LAST_TOKEN_IDS = "last_token_ids"
SEQUENCE_SLOTS = "sequence_slots"
LOGITS = "logits"

# Ops.
LANDMARK_TOPK = "ShadowKVLandmarkTopK"
KEY_RECONSTRUCT = "ShadowKVKeyReconstruct"
SPARSE_ATTENTION = "ShadowKVSparseAttention"

# Attributes: every op carries all of them.
ATTRIBUTES = (
    "layer",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "chunk_size",
    "rank",
    "top_k",
    "outliers",
)

# Files of an engine directory.
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
ONNX_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
ENGINE_FILE = "rank0.engine"


def cpp_header() -> str:
    """The C++ twin of this module (text of ``names.h``)."""
    here = globals()
    scalars = [n for n in here if n.isupper() and isinstance(here[n], str)]
    lines = [
        "// Generated from trtllm_shadowkv/names.py; do not edit.",
        "#pragma once",
        "",
        "namespace trtllm_shadowkv::names",
        "{",
    ]
    lines += [f'inline constexpr char const* k{n} = "{here[n]}";' for n in scalars]
    lines += ["inline constexpr char const* kATTRIBUTE_NAMES[] = {"]
    lines += [f'    "{a}",' for a in ATTRIBUTES]
    return "\n".join([*lines, "};", "} // namespace trtllm_shadowkv::names", ""])
