"""The issue's own measure of speed: no slower than transformers where it counts, both in the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtllm_shadowkv.bench.cpu import Contest, measure
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig


@pytest.mark.alone
def test_at_least_as_fast_as_transformers(demo_model: Path, tmp_path: Path) -> None:
    build = BuildConfig(shadowkv=ShadowKVConfig(top_k=64, rank=96, outliers=8, dense_limit=1024))
    engine = build_engine(demo_model, tmp_path / "engine", build)
    ids = np.random.default_rng(0).integers(0, engine.model.vocab_size, 5000).tolist()
    found = measure(Contest(demo_model, engine.path, ids, steps=20), repeats=2, steps=20)
    print(found)
    assert found["prefill_ratio"] >= 0.8
    assert found["decode_ratio_dense"] >= 1
    assert found["decode_ratio_shadowkv"] >= 1
