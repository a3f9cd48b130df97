"""A CUDA state whose memory a test can see: pools as torch tensors, rows filled at random or from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.plugins.gpu.device import DEVICE, new_stream, synchronize, working_on
from tests.reference.driver import make_model
from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.rope import RopeConfig
from trtllm_shadowkv.runtime.cuda_memory import UNIT, CudaMemory, outlier_words, quantise, transposed_units
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab

PAGE, SEALED_PAGE = 128, 512


@dataclass
class Shape:
    """One combination of sizes and formats."""

    heads: int = 6
    kv_heads: int = 2
    head_size: int = 64
    layers: int = 1
    chunk: int = 8
    rank: int = 64
    top_k: int = 16
    outliers: int = 4
    window: int = 32
    limit: int = 64
    cache: int = 2
    dtype: str = "bfloat16"
    landmarks: str = "element"
    values: str = "element"
    rotation: bool = True
    groups: int = 0


class Rig:
    """A state of ``shape`` for ``rows`` rows of at most ``tokens`` tokens, with every pool visible.

    All memory is poisoned with NaN bytes before anything is written.
    """

    def __init__(
        self, shape: Shape, rows: int = 4, tokens: int = 1024, batch: int | None = None, values_on_gpu: bool = False
    ) -> None:
        self.shape, self.rows, self.tokens = shape, rows, tokens
        rope = RopeConfig(10_000.0) if shape.rotation else RopeConfig(10_000.0, "linear", 1e30)
        self.model: ModelConfig = make_model(
            layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, rope=rope
        )
        self.config = ShadowKVConfig(
            chunk_size=shape.chunk,
            rank=shape.rank,
            top_k=shape.top_k,
            outliers=shape.outliers,
            window=shape.window,
            dense_limit=shape.limit,
            cache_factor=shape.cache,
        )
        self.live_pages = rows * (-(-tokens // PAGE) + 5)
        self.sealed_pages = rows * (-(-tokens // SEALED_PAGE) + 1)
        self.state = CudaState(
            self.model,
            self.config,
            dtype=shape.dtype,
            landmark_format=shape.landmarks,
            value_format=shape.values,
            slots=rows,
            sealed_rows=rows,
            max_batch=batch or rows + 2,
            live_pages=self.live_pages,
            sealed_pages=self.sealed_pages,
            max_tokens=tokens,
            row_groups=shape.groups,
        )
        self.state.poison()
        self.stream = new_stream()
        self.memory = CudaMemory(self.state, DEVICE)
        self.dtype, self.value_dtype = self.memory.dtype, self.memory.value_dtype
        self.values_on_gpu = values_on_gpu
        self.slabs: dict[int, PinnedSlab] = {}
        self.values: dict[int, Tensor] = {}

    def close(self) -> None:
        synchronize()
        self.state.close()
        for slab in self.slabs.values():
            slab.close()

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        synchronize()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory ---------------------------------------------------------------------------------------------------

    def sealed_at(self, slot: int, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Page and place in the page of chunks of a row."""
        pages = torch.tensor(self.state.sealed_pages_of(slot), device=DEVICE)
        per_page = SEALED_PAGE // self.shape.chunk
        return pages[chunks // per_page], chunks % per_page

    def live_at(self, slot: int, tokens: Tensor) -> Tensor:
        """Page of tokens of a row."""
        pages = torch.tensor(self.state.live_pages_of(slot), device=DEVICE)
        return pages[tokens // PAGE % len(pages)]

    # --- rows -----------------------------------------------------------------------------------------------------

    def allocate(self, slot: int, prompt: int, total: int, *, top_k: int | None = None, dense: bool = False) -> None:
        """Reserve a row, with pinned host memory for its values, filled with NaN bytes."""
        s = self.shape
        stride = self.config.sealed_chunks(total + 1) if not dense and total > s.limit else 0
        addresses = None
        if stride:
            bytes_of_layer = s.kv_heads * stride * s.chunk * s.head_size * self.value_dtype.itemsize
            size = (s.layers, s.kv_heads, stride, s.chunk // UNIT, s.head_size, UNIT)
            if self.values_on_gpu:
                raw = torch.full((s.layers * bytes_of_layer,), 0xFF, dtype=torch.uint8, device=DEVICE)
                base = raw.data_ptr()
            else:
                base, raw = self._pinned(slot, s.layers * bytes_of_layer)
            self.values[slot] = raw.view(self.value_dtype).view(size)
            addresses = [base + i * bytes_of_layer for i in range(s.layers)]
        self.state.allocate(
            slot,
            prompt_tokens=prompt,
            total_tokens=total,
            top_k=top_k or s.top_k,
            dense=dense,
            value_addresses=addresses,
            value_stride=stride,
            stream=self.stream.cuda_stream,
        )

    def _pinned(self, slot: int, size: int) -> tuple[int, Tensor]:
        """Device address of a new pinned slab of NaN bytes, and the slab as a CPU tensor."""
        old = self.slabs.pop(slot, None)
        if old is not None:
            old.close()
        slab = self.slabs[slot] = PinnedSlab(size)
        return slab.device_address, torch.frombuffer(slab.buffer(), dtype=torch.uint8).fill_(0xFF)

    def load(self, slot: int, length: int) -> None:
        synchronize()  # what the test wrote, on whatever stream
        self.state.load_row(slot, length, stream=self.stream.cuda_stream)
        synchronize()

    def write_live(self, slot: int, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Post-RoPE keys and values [H, T, D] of tokens from ``start``."""
        at = torch.arange(start, start + keys.shape[1], device=DEVICE)
        page, place = self.live_at(slot, at), at % PAGE
        self.memory.live_keys[layer][page, :, place] = keys.to(DEVICE, self.dtype).transpose(0, 1)
        values = values.to(DEVICE, self.dtype).transpose(0, 1)
        self.memory.live_values[layer][page, :, place // UNIT, :, place % UNIT] = values

    def read_live(self, slot: int, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, T, D] float32."""
        at = torch.arange(start, end, device=DEVICE)
        page, place = self.live_at(slot, at), at % PAGE
        keys = self.memory.live_keys[layer][page, :, place]
        values = self.memory.live_values[layer][page, :, place // UNIT, :, place % UNIT]
        return keys.float().transpose(0, 1), values.float().transpose(0, 1)

    def write_sealed(
        self,
        slot: int,
        layer: int,
        a: Tensor,
        b: Tensor,
        means: Tensor,
        values: Tensor,
        outlier_ids: Tensor,
        outlier_keys: Tensor,
        outlier_values: Tensor,
    ) -> None:
        """Sealed state of one layer: A [n·C, r], B [r, H·D], means [H, n, D], values [H, n, C, D], outliers
        [H, o], [H, o, C, D], [H, o, C, D]."""
        s, row = self.shape, self.state.sealed_row_of(slot)
        n = means.shape[1]
        page, place = self.sealed_at(slot, torch.arange(n, device=DEVICE))
        a_pages = self.memory.factor_a[layer].unflatten(1, (-1, s.chunk))
        a_pages[page, place] = a.to(DEVICE, self.dtype).unflatten(0, (n, s.chunk))
        self.memory.factor_b[layer, row] = b.T.to(DEVICE, self.dtype)
        means = means.to(DEVICE).float()
        if self.memory.centres is not None and self.memory.landmark_scales is not None:
            centre = means.nan_to_num().mean(1)
            self.memory.centres[layer, row] = centre
            small, scale = quantise(means - centre[:, None], (2,))
            self.memory.landmarks[layer].view(torch.uint8)[page, :, place] = small.view(torch.uint8).transpose(0, 1)
            self.memory.landmark_scales[layer][page, :, place] = scale[:, :, 0].T
        else:
            self.memory.landmarks[layer][page, :, place] = means.to(self.dtype).transpose(0, 1)
        units = transposed_units(values.to(DEVICE))  # [H, n, C/8, D, 8]
        if self.memory.value_scales is not None:
            small, scale = quantise(units, (2, 3, 4))
            self.values[slot].view(torch.uint8)[layer, :, :n] = small.view(torch.uint8).to(self.values[slot].device)
            self.memory.value_scales[layer][page, :, place] = scale[:, :, 0, 0, 0].T
        else:
            self.values[slot][layer, :, :n] = units.to(self.values[slot].device, self.dtype)
        o = outlier_ids.shape[1]
        ids = outlier_ids.to(DEVICE)
        self.memory.outlier_ids[layer, row, :, :o] = ids.int()
        self.memory.outlier_keys[layer, row, :, :o] = outlier_keys.to(DEVICE, self.dtype)
        units = transposed_units(outlier_values.to(DEVICE, self.dtype).flatten(1, 2))
        self.memory.outlier_values[layer, row, :, : units.shape[1]] = units
        words = outlier_words(ids, n)
        first = torch.arange(words.shape[1], device=DEVICE) * 32
        page, place = self.sealed_at(slot, first)
        self.memory.excluded[layer][page, :, place // 32] = words.T

    def fill(self, slot: int, length: int, total: int, generator: torch.Generator, **how: Any) -> None:
        """A row of ``length`` random tokens; sealed where it is over the limit and not ``dense``.

        Args:
            how: ``dense``, ``top_k``; ``key_scale`` (1), ``value_scale`` (1): magnitudes; ``keys``: a function of the
                shape that makes keys and means; ``spread`` (1): of the rows of A.
        """
        s, c, d, h = self.shape, self.shape.chunk, self.shape.head_size, self.shape.kv_heads
        dense = how.get("dense", False)
        self.allocate(slot, length, total, top_k=how.get("top_k"), dense=dense)
        sealed = not dense and length + 1 > s.limit
        n = self.config.sealed_chunks(length + 1) if sealed else 0
        k_scale, v_scale = how.get("key_scale", 1.0), how.get("value_scale", 1.0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=DEVICE)

        make = how.get("keys", normal)
        for layer in range(s.layers):
            live = length - n * c
            self.write_live(slot, layer, n * c, make(h, live, d) * k_scale, normal(h, live, d) * v_scale)
            if not sealed:
                continue
            o = min(s.outliers, n)
            others = torch.rand(h, n - 1, generator=generator, device=DEVICE).argsort(1)[:, : o - 1] + 1
            ids = torch.cat((torch.zeros(h, 1, dtype=torch.long, device=DEVICE), others), 1).sort(1).values
            b = torch.linalg.qr(normal(h * d, s.rank)).Q.T
            a = normal(n * c, s.rank) * k_scale * (h * d / s.rank) ** 0.5
            means = make(h, n, d) * k_scale
            values = normal(h, n, c, d) * v_scale
            exact = make(h, o * c, d).unflatten(1, (o, c)) * k_scale
            picked = values.gather(1, ids[:, :, None, None].expand(-1, -1, c, d))
            self.write_sealed(slot, layer, a, b, means, values, ids, exact, picked)
        self.load(slot, length)

    def fill_from(self, reference: ReferenceState, slot: int, total: int) -> None:
        """The row of a reference state that has just been sealed, or is dense."""
        row = reference.rows[slot]
        dense = row.limit == float("inf")
        self.allocate(slot, row.length, total, top_k=row.top_k, dense=dense)
        first = row.published * self.shape.chunk
        for layer in range(self.shape.layers):
            self.write_live(slot, layer, first, *row.pages.read(layer, first, row.length))
            if row.layers:
                x = row.layers[layer]
                exact = (x.outliers, x.outlier_keys, x.outlier_values)
                self.write_sealed(slot, layer, x.coordinates, x.basis, x.means, x.values, *exact)
        self.load(slot, row.length)

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self, slots: Sequence[int], qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A whole generation step, qkv [L, B, width]: q, selection, out of every layer, from poisoned outputs."""
        with working_on(self.stream):
            on = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
            self.state.begin_pass("generation", slots, 0, 1, False)
            positions = [0 if i < 0 else self.state.length(i) - 1 for i in slots]
            at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
            q, selection, out = self.outputs(len(slots))
            qkv = qkv.to(DEVICE, self.dtype).contiguous()
            self.run(on, at, qkv, q, selection, out)
        self.stream.synchronize()
        assert self.state.fault(self.stream.cuda_stream) == 0
        return q, selection, out

    def outputs(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        width = s.heads * s.head_size
        q = torch.full((s.layers, batch, width), torch.nan, dtype=self.dtype, device=DEVICE)
        selection = torch.full((s.layers, batch, s.kv_heads, s.top_k), -77, dtype=torch.int32, device=DEVICE)
        return q, selection, torch.full_like(q, torch.nan)

    def run(self, slots: Tensor, at: Tensor, qkv: Tensor, q: Tensor, selection: Tensor, out: Tensor) -> None:
        """Prologue and the three ops of every layer on the rig's stream; may be captured."""
        state, stream, batch = self.state, self.stream.cuda_stream, len(slots)
        state.step_prologue(slots.data_ptr(), batch, stream)
        for i in range(self.shape.layers):
            state.landmark_topk(
                i, qkv[i].data_ptr(), at.data_ptr(), batch, q[i].data_ptr(), selection[i].data_ptr(), stream
            )
            state.key_reconstruct(i, batch, stream)
            state.sparse_attention(i, q[i].data_ptr(), batch, out[i].data_ptr(), stream)
