"""A tiny engine to talk to, and short names for what tests ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tiny
from tests.tiny_tokenizer import write_tokenizer
from trtllm_shadowkv import LLM, RequestOutput, SamplingParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.request import RequestHandle
from trtllm_shadowkv.runtime.state import Footprint

NAN_TOKEN = 250
"""A token whose embedding is NaN: prompts that hold it fail, and no others."""
SAMPLED = {"temperature": 1.0, "top_k": 40, "ignore_eos": True}


def build_tiny_llm(parent: Path, nan_token: int = NAN_TOKEN) -> Path:
    """A tiny engine with a tokenizer: rows are sealed from 256 tokens on, with rank and budget at their maxima."""
    model = write_tiny(parent / "model", max_positions=6000)
    write_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][nan_token] = float("nan")
    save_file(tensors, model / "model.safetensors")
    kv = ShadowKVConfig(top_k=1024, outliers=8, window=64, dense_limit=256)
    return build_engine(model, parent / "engine", BuildConfig(max_batch_size=4, shadowkv=kv)).path


def assert_drained(llm: LLM) -> None:
    scheduler = llm._scheduler
    deadline = time.monotonic() + 180
    while scheduler.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.busy
    assert (scheduler.used, llm.value_pool.used) == (Footprint(), 0)
    assert sorted(scheduler._free_slots) == list(range(llm.engine.build.max_batch_size))
    assert scheduler.executor.state.rows == {}  # type: ignore[attr-defined]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 240, length).tolist()  # type: ignore[no-any-return]


def params(tokens: int, **more: Any) -> SamplingParams:
    """Without end token, and without the token that the model itself must not feed back."""
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True, "bad_token_ids": [NAN_TOKEN], **more})


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def batch(llm: LLM, prompts: list[Any], *args: Any, **kwargs: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, *args, **kwargs)
    assert isinstance(outputs, list)
    return outputs


def one(llm: LLM, prompt: Any, *args: Any, **kwargs: Any) -> RequestOutput:
    output = llm.generate(prompt, *args, **kwargs)
    assert isinstance(output, RequestOutput)
    return output


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.0005)


def running(handle: RequestHandle) -> None:
    """Wait until a request's tokens come."""
    wait_until(lambda: len(handle.answers[0].output_ids) > 2, "tokens came")
