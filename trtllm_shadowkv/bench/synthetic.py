"""A CUDA state full of random keys and values, of the shape of Llama-3.1-8B, and queries that drift through it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from trtllm_shadowkv.bench.drift import queries
from trtllm_shadowkv.config import PAGE_TOKENS, ShadowKVConfig
from trtllm_shadowkv.footprint import SEALED_PAGE_TOKENS
from trtllm_shadowkv.models import ModelConfig, RopeConfig
from trtllm_shadowkv.runtime.cuda_memory import CudaMemory, outlier_words
from trtllm_shadowkv.runtime.cuda_state import CudaState, PinnedSlab

HEADS, KV_HEADS, HEAD_SIZE, RANK, CHUNK = 32, 8, 128, 160, 8
TOP_K, OUTLIERS, WINDOW = 256, 48, 256
WARM_UP, MEASURED = 64, 32
SCALE = 1 / 64  # of e4m3 numbers with standard deviation 1


def llama(layers: int) -> ModelConfig:
    """Attention of Llama-3.1-8B, ``layers`` layers of it."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=14336,
        num_layers=layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        vocab_size=128256,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500_000.0),
        tied=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        bos_token_id=None,
    )


def fill_pools(m: CudaMemory) -> None:
    """Noise of standard deviation 1 in the pools of live pages and sealed rows; B's columns are orthonormal."""
    m.live_keys.normal_()
    m.live_values.normal_()
    if m.state.sealed_rows == 0:
        return
    for pool in (m.landmarks, m.factor_a, m.outlier_keys, m.outlier_values):
        if pool.dtype.itemsize == 2:
            pool.normal_()
            continue
        for layer in pool:
            for part in layer.split(256):
                part.copy_((torch.randn(part.shape, device="cuda") / SCALE).to(torch.float8_e4m3fn))
    for scales in (m.landmark_scales, m.value_scales):
        if scales is not None:
            scales.fill_(SCALE)
    b = torch.linalg.qr(torch.randn(*m.factor_b.shape[-2:], device="cuda")).Q
    m.factor_b.copy_(b.to(m.dtype))


def fill_values(memory: memoryview, dtype: torch.dtype) -> None:
    """The same noise again and again in pinned memory for values."""
    region = torch.frombuffer(memory, dtype=torch.uint8)
    noise = torch.randn(1 << 24, device="cuda")
    noise = (noise if dtype.itemsize == 2 else noise / SCALE).to(dtype)
    for part in region.split(noise.numel() * noise.itemsize):
        part.copy_(noise.view(torch.uint8)[: len(part)])


def choose_outliers(m: CudaMemory, row: int) -> None:
    """Chunk 0 and random other chunks as the outliers of a sealed row that is loaded, the same in all layers and heads;
    nothing else may be at work on the state."""
    state, outliers = m.state, m.outlier_ids.shape[-1]
    generator = torch.Generator(device="cuda").manual_seed(row)
    n = state.row(row).published
    ids = torch.rand(n - 1, device="cuda", generator=generator).argsort()[: outliers - 1] + 1
    ids = torch.cat((torch.zeros(1, dtype=torch.long, device="cuda"), ids)).sort().values
    m.outlier_ids[:, state.sealed_row_of(row)] = ids.int()
    words = outlier_words(ids[None], n)[0]
    pages = torch.tensor(state.sealed_pages_of(row), device="cuda")
    per_page = SEALED_PAGE_TOKENS // state.config.chunk_size // 32
    at = torch.arange(len(words), device="cuda")
    for layer in m.excluded:
        layer[pages[at // per_page], :, at % per_page] = words[:, None].expand(-1, layer.shape[1])


@dataclass(frozen=True)
class Case:
    """What is measured together: rows, tokens of each, formats ("bf16" or "fp8"), and the drift of the queries.

    Attributes:
        factor: slots of the chunk cache in units of k; 1: nothing but the previous step is kept.
        profile: of :mod:`trtllm_shadowkv.bench.drift`.
        dense: exact attention over all tokens instead.
        layers: enough that one layer's landmarks leave the L2 cache before their turn comes again.
    """

    batch: int
    context: int
    values: str
    landmarks: str
    factor: int
    profile: str
    dense: bool = False

    @property
    def layers(self) -> int:
        return 1 if self.dense else max(2, 16 // self.batch)


class SyntheticRows:
    """``case.batch`` rows of ``case.context`` tokens in ``case.layers`` layers, and their next steps.

    Args:
        pool: pinned memory for the values; the rows' regions are spread over all of it.
        groups: row groups of a layer; 0: the state's own choice.

    Attributes:
        qkv: [steps, layers, batch, (Hq + 2·Hkv)·D] bfloat16, WARM_UP + MEASURED steps.
        q, out: [batch, Hq·D]; selection: [batch, Hkv, TOP_K]; positions: [batch].
    """

    def __init__(self, case: Case, pool: PinnedSlab, pool_bytes: int, groups: int = 0) -> None:
        self.case, layers, b, s = case, case.layers, case.batch, case.context
        e4m3 = {"bf16": "element", "fp8": "e4m3"}
        config = ShadowKVConfig(
            chunk_size=CHUNK, rank=RANK, top_k=TOP_K, outliers=OUTLIERS, window=WINDOW, cache_factor=case.factor
        )
        total = s + WARM_UP + MEASURED
        prompt_pages = -(-total // PAGE_TOKENS)
        self.state = CudaState(
            llama(layers),
            config,
            dtype="bfloat16",
            landmark_format=e4m3[case.landmarks],
            value_format=e4m3[case.values],
            slots=b,
            sealed_rows=0 if case.dense else b,
            max_batch=b,
            live_pages=b * prompt_pages if case.dense else prompt_pages + 5 * b,
            sealed_pages=0 if case.dense else b * (-(-total // SEALED_PAGE_TOKENS) + 1),
            max_tokens=total,
            row_groups=groups,
        )
        self.stream = torch.cuda.Stream()
        self.memory = CudaMemory(self.state)
        fill_pools(self.memory)
        for row in range(b):
            self._enter(row, total, pool, pool_bytes)
        width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        steps = WARM_UP + MEASURED
        self.qkv = torch.randn(steps, layers, b, width, device="cuda", dtype=torch.bfloat16)
        if not case.dense:
            for i in range(layers):
                q = queries(steps, b, HEADS, HEAD_SIZE, profile=case.profile, seed=i, device="cuda")
                self.qkv[:, i, :, : HEADS * HEAD_SIZE] = q.flatten(2).to(torch.bfloat16)
        self.q = torch.empty(b, HEADS * HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.selection = torch.empty(b, KV_HEADS, TOP_K, device="cuda", dtype=torch.int32)
        self.positions = torch.full((b,), s, device="cuda", dtype=torch.int32)
        slots = torch.arange(b, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        self.state.begin_pass("generation", list(range(b)), 0, 1, False)
        self.state.step_prologue(slots.data_ptr(), b, self.stream.cuda_stream)
        torch.cuda.synchronize()

    def _enter(self, row: int, total: int, pool: PinnedSlab, pool_bytes: int) -> None:
        case, state, m, stream = self.case, self.state, self.memory, self.stream.cuda_stream
        addresses, stride = None, 0
        if not case.dense:
            stride = state.config.sealed_chunks(total + 1)
            layer_bytes = KV_HEADS * stride * CHUNK * HEAD_SIZE * m.value_dtype.itemsize
            begin = pool_bytes // case.batch * row // 4096 * 4096
            assert layer_bytes * case.layers <= pool_bytes // case.batch, "the pool is too small"
            addresses = [pool.device_address + begin + i * layer_bytes for i in range(case.layers)]
            fill_values(pool.buffer()[begin : begin + layer_bytes * case.layers], m.value_dtype)
        state.allocate(
            row,
            prompt_tokens=case.context,
            total_tokens=total,
            top_k=TOP_K,
            dense=case.dense,
            value_addresses=addresses,
            value_stride=stride,
            stream=stream,
        )
        state.load_row(row, case.context, stream=stream)
        torch.cuda.synchronize()
        if not case.dense:
            choose_outliers(m, row)

    def layer(self, step: int, layer: int) -> None:
        """One layer of one step, from q, k, v to the attention's output, on ``stream``; may be captured."""
        state, b, stream = self.state, self.case.batch, self.stream.cuda_stream
        x = self.qkv[step, layer]
        q, selection = self.q.data_ptr(), self.selection.data_ptr()
        state.landmark_topk(layer, x.data_ptr(), self.positions.data_ptr(), b, q, selection, stream)
        state.key_reconstruct(layer, b, stream)
        state.sparse_attention(layer, q, b, self.out.data_ptr(), stream)

    def run(self, steps: range) -> None:
        """Every layer of these steps; may be captured."""
        for step, layer in itertools.product(steps, range(self.case.layers)):
            self.layer(step, layer)

    def lookups(self) -> tuple[int, int]:
        """Hits and misses of all rows so far."""
        rows = [self.state.statistics(i, self.stream.cuda_stream) for i in range(self.case.batch)]
        return sum(r.hits for r in rows), sum(r.misses for r in rows)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.state.close()
        del self.memory, self.qkv
        torch.cuda.empty_cache()

    def __enter__(self) -> SyntheticRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
