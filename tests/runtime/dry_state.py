"""Dry states: what a CUDA state refuses and how it keeps its books, without a GPU."""

from __future__ import annotations

from typing import Any

from tests.reference.driver import make_model
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.library import Library
from trtllm_shadowkv.native_state import DRY
from trtllm_shadowkv.runtime.cuda_state import CudaState

STREAM = 0x1000  # a dry state looks no further than at whether it is one
PAGE, SEALED_PAGE = 128, 512


def make(library: Library, *, config: dict[str, Any] | None = None, **changes: Any) -> CudaState:
    """A dry state: 2 layers of 2 KV heads, rows sealed from 64 tokens on."""
    model = make_model(layers=2, heads=8, kv_heads=2, head_size=64)
    small = {"rank": 16, "top_k": 4, "outliers": 2, "window": 32, "dense_limit": 64}
    sizes: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_tokens": 4096,
        "slots": 4,
        "sealed_rows": 2,
        "max_batch": 6,
        "live_pages": 40,
        "sealed_pages": 12,
        "device": DRY,
    }
    return CudaState(model, ShadowKVConfig(**{**small, **(config or {})}), native=library, **{**sizes, **changes})


def allocate(state: CudaState, slot: int, prompt: int, total: int, **changes: Any) -> None:
    arguments: dict[str, Any] = {"top_k": 4, "dense": False, "value_stride": 1000, "stream": STREAM}
    if not changes.get("dense"):
        arguments["value_addresses"] = [1 << 20] * state.model.num_layers
    state.allocate(slot, prompt_tokens=prompt, total_tokens=total, **{**arguments, **changes})


def step(state: CudaState, *slots: int) -> None:
    state.begin_pass("generation", slots, 0, 1, False)
