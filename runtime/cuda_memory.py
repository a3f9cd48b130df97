"""The memory of a CUDA state as torch tensors that share it: what tests fill and check, and benches fill."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trtllm_shadowkv.config import PAGE_TOKENS
from trtllm_shadowkv.footprint import SEALED_PAGE_TOKENS
from trtllm_shadowkv.runtime.cuda_state import CudaState

UNIT = 8
"""Tokens whose values lie transposed together."""

E4M3_MAX = 448.0

TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _DeviceMemory:
    """``size`` bytes at ``address``, in the form torch imports."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def device_tensor(address: int, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda:0") -> Tensor:
    """Device memory as a tensor that shares it and does not own it; ``device`` ``cpu`` for that of an emulated GPU."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory: Tensor
    if device == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    else:
        memory = torch.as_tensor(_DeviceMemory(address, size), device=device)
    shaped: Tensor = memory.view(dtype).view(tuple(shape))
    return shaped


def transposed_units(values: Tensor) -> Tensor:
    """Values [..., T, D] as the state keeps them: units [..., T/8, D, 8]."""
    units: Tensor = values.unflatten(-2, (-1, UNIT))
    return units.transpose(-1, -2).contiguous()


def plain_values(units: Tensor) -> Tensor:
    """The inverse: [..., U, D, 8] -> [..., U·8, D]."""
    return units.transpose(-1, -2).flatten(-3, -2)


def quantise(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``x`` as e4m3, and its float32 scale: amax/448 over ``dims`` (kept, of size 1), 1 where that is 0."""
    amax = x.float().abs().amax(dims, keepdim=True)
    scale = amax / torch.full_like(amax, E4M3_MAX)  # by a number a GPU does not divide: it multiplies by the inverse
    scale = torch.where(scale == 0, 1.0, scale)
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def outlier_words(ids: Tensor, chunks: int) -> Tensor:
    """Bit maps of outlier chunks as ``excluded`` has them: ids [H, o] below ``chunks`` -> [H, ⌈chunks/32⌉] int32."""
    bits = torch.zeros(len(ids), -(-chunks // 32) * 32, dtype=torch.int64, device=ids.device)
    bits.scatter_(1, ids.long(), 1)
    words = (bits.unflatten(1, (-1, 32)) << torch.arange(32, device=ids.device)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


class CudaMemory:
    """Every pool of a state; layouts are those of ``plugins/kernels/decode/view.h``.

    L layers, H KV heads, C tokens a chunk, D head size, r rank, T the state's 2-byte type.

    Attributes:
        live_keys: [L, pages, H, 128, D] T; live_values: [L, pages, H, 16, D, 8] T.
        factor_a: [L, sealed pages, 512, r] T; factor_b: [L, sealed rows, H·D, r] T.
        landmarks: [L, sealed pages, H, 512/C, D] T or e4m3; landmark_scales, value_scales: without D, float32, or None.
        centres: [L, sealed rows, H, D] float32 or None.
        excluded: [L, sealed pages, H, 512/C/32] int32, bit maps.
        outlier_ids: [L, sealed rows, H, o] int32; outlier_keys: [… o, C, D] T; outlier_values: [… o·C/8, D, 8] T.
        cache_keys: [L, sealed rows, H, slots, C, D] T; cache_values: [… slots, C/8, D, 8] T or e4m3.
        cache_order: [L, sealed rows, H, slots, 2] int32, (chunk, slot), least recently used first.
        hit_counts, miss_counts: [max_batch, H] int32; entries: [max_batch, H, top_k, 2] int32, (chunk, slot).
    """

    def __init__(self, state: CudaState, device: str = "cuda") -> None:
        """``device``: of the tensors; of ``cuda`` the state's."""
        m, k = state.model, state.config
        assert k.rank is not None
        self.state = state
        self.dtype = TORCH_TYPES[state.dtype]
        self.value_dtype = self.dtype if state.value_format == "element" else torch.float8_e4m3fn
        landmark_dtype = self.dtype if state.landmark_format == "element" else torch.float8_e4m3fn
        layers, h, d, c = m.num_layers, m.num_kv_heads, m.head_size, k.chunk_size
        per_page = SEALED_PAGE_TOKENS // c
        at = state.buffers()

        def pool(name: str, *size: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return device_tensor(at[name], size, dtype, f"cuda:{state.device}" if device == "cuda" else device)

        live = pool("live", layers, state.live_pages, 2, h * PAGE_TOKENS * d)
        self.live_keys = live[:, :, 0].unflatten(-1, (h, PAGE_TOKENS, d))
        self.live_values = live[:, :, 1].unflatten(-1, (h, PAGE_TOKENS // UNIT, d, UNIT))
        paged = (layers, state.sealed_pages, h, per_page)
        rows = (layers, state.sealed_rows, h)
        o, slots = k.outliers, state.cache_slots
        self.factor_a = pool("factor_a", layers, state.sealed_pages, SEALED_PAGE_TOKENS, k.rank)
        self.factor_b = pool("factor_b", layers, state.sealed_rows, h * d, k.rank)
        self.landmarks = pool("landmarks", *paged, d, dtype=landmark_dtype)
        self.excluded = pool("excluded", *paged[:-1], per_page // 32, dtype=torch.int32)
        self.outlier_ids = pool("outlier_ids", *rows, o, dtype=torch.int32)
        self.outlier_keys = pool("outlier_keys", *rows, o, c, d)
        self.outlier_values = pool("outlier_values", *rows, o * c // UNIT, d, UNIT)
        self.cache_keys = pool("cache_keys", *rows, slots, c, d)
        self.cache_values = pool("cache_values", *rows, slots, c // UNIT, d, UNIT, dtype=self.value_dtype)
        self.cache_order = pool("cache_order", *rows, slots, 2, dtype=torch.int32)
        f32: dict[str, Any] = {"dtype": torch.float32}
        fp8_landmarks, fp8_values = state.landmark_format == "e4m3", state.value_format == "e4m3"
        self.landmark_scales = pool("landmark_scales", *paged, **f32) if fp8_landmarks else None
        self.centres = pool("centres", *rows, d, **f32) if fp8_landmarks else None
        self.value_scales = pool("value_scales", *paged, **f32) if fp8_values else None
        self.hit_counts = pool("hit_counts", state.max_batch, h, dtype=torch.int32)
        self.miss_counts = pool("miss_counts", state.max_batch, h, dtype=torch.int32)
        self.entries = pool("entries", state.max_batch, h, k.top_k, 2, dtype=torch.int32)
