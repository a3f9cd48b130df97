"""Bytes of one sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.footprint import sequence_bytes
from trtllm_shadowkv.hardware import MODELS, ModelShape

LLAMA = MODELS["llama-3.1-8b"]
SMALL = ModelShape(
    num_layers=3, num_heads=6, num_kv_heads=2, head_size=16, hidden_size=96, intermediate_size=128, vocab_size=100
)


def elements(*shapes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


class TestSequenceBytes:
    @pytest.mark.parametrize(("element", "value", "landmark"), [(2, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 4, 4)])
    def test_every_part_by_its_shape(self, element: int, value: int, landmark: int) -> None:
        kv = ShadowKVConfig(rank=16, top_k=20, outliers=5, cache_factor=3, chunk_size=16, window=64, dense_limit=128)
        need = sequence_bytes(
            SMALL, kv, 1150, prompt=1000, element_bytes=element, value_bytes=value, landmark_bytes=landmark
        )
        layers, heads, d, c = 3, 2, 16, 16
        chunks = (1150 - 64) // 16  # 67, whose 1,072 tokens take 3 pages of 512
        assert need.factor_a == elements((layers, 1536, 16)) * element
        assert need.factor_b == elements((layers, 16, heads * d)) * element
        assert need.landmarks == elements((layers, heads, 1536 // c, d)) * landmark
        assert need.outliers == elements((layers, heads, 5, c, d)) * 2 * element
        assert need.cache == elements((layers, heads, 60, c, d)) * (element + value)
        # 64 + 15 tokens that may begin 112 tokens into a page of 128
        assert need.live == elements((layers, 2 * 128, heads, d)) * 2 * element
        scales = elements((layers, heads, 1536 // c)) * 4
        centre = elements((layers, heads, d)) * 4
        assert need.scales == scales * (value == 1) + (scales + centre) * (landmark == 1)
        assert need.values == need.host == elements((layers, heads, chunks, c, d)) * value
        assert need.prefill == elements((layers, 8 * 128, heads, d)) * 2 * element
        on_gpu = (need.factor_a, need.factor_b, need.landmarks, need.outliers, need.cache, need.live, need.scales)
        assert need.gpu == sum(on_gpu)

    def test_design_figures(self) -> None:
        need = sequence_bytes(LLAMA, ShadowKVConfig(), 124928)
        assert need.landmarks == pytest.approx(1.0e9, rel=0.03)
        assert need.outliers == pytest.approx(50e6, rel=0.03)
        assert need.values == pytest.approx(8.2e9, rel=0.01)
        assert need.prefill == pytest.approx(16.4e9, rel=0.01)
        assert sequence_bytes(LLAMA, ShadowKVConfig(), 124928, value_bytes=1).values * 2 == need.values

    def test_dense_rows_hold_live_pages_only(self) -> None:
        kv = ShadowKVConfig()
        for settings, tokens in ((kv, 4096), (kv, 1), (replace(kv, attention="dense"), 100_000)):
            need = sequence_bytes(LLAMA, settings, tokens)
            pages = -(-tokens // 128)
            assert need.gpu == need.live == pages * 128 * 32 * 8 * 128 * 2 * 2
            assert need.host == need.prefill == 0

    def test_row_that_outgrows_the_dense_limit(self) -> None:
        need = sequence_bytes(LLAMA, ShadowKVConfig(), 4097, prompt=10)
        assert need.host > 0
        assert need.prefill == 4096 * 32 * 8 * 128 * 2 * 2

    def test_fewer_chunks_than_settings_ask_for(self) -> None:
        kv = ShadowKVConfig(rank=16, top_k=1000, outliers=1000, window=64, dense_limit=71)
        need = sequence_bytes(SMALL, kv, 72)  # one sealed chunk
        one = 3 * 8 * 2 * 16 * 4
        assert need.outliers == need.cache == one
        assert need.values == one // 2

    def test_grows_with_tokens(self) -> None:
        kv = ShadowKVConfig()
        sizes = [sequence_bytes(LLAMA, kv, tokens).gpu for tokens in range(4097, 20_000, 501)]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]

    @pytest.mark.parametrize(
        "bad",
        [
            {"tokens": 0},
            {"tokens": -5},
            {"prompt": 0},
            {"prompt": 5001},
            {"value_bytes": 3},
            {"landmark_bytes": 0},
            {"element_bytes": 1},
            {"kv": ShadowKVConfig(rank=48)},
        ],
    )
    def test_refused(self, bad: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {"shape": SMALL, "kv": ShadowKVConfig(rank=16), "tokens": 5000, **bad}
        with pytest.raises(ConfigError):
            sequence_bytes(**arguments)
