"""Requests, settings and engines that are refused: each with one clear error."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_llm import assert_drained, batch, ids, one, params, prompt
from tests.tiny_models import write_tiny
from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, RuntimeConfig, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, EngineError, MissingDependencyError, RequestError

# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts of type NoneType"),
        (5, "prompts of type int"),
        (1.5, "prompts of type float"),
        (b"bytes", "prompts of type bytes"),
        ({1: 2}, "prompts of type dict"),
        ({"prompt": "x"}, "prompts of type dict"),
        ({1, 2}, "prompts of type set"),
        (np.array(3), "prompts of type ndarray"),
        (torch.tensor(3), "prompts of type Tensor"),
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (np.array([], int), "the prompt is empty"),
        ([[]], "prompt 0 of 1: the prompt is empty"),
        (["a", ""], "prompt 1 of 2: the prompt is empty"),
        ([1.0, 2.0], "prompt 0 of 2: a prompt of type float"),
        ([True, False], "prompt 0 of 2: a prompt of type bool"),
        (np.arange(3.0), "prompt 0 of 3: a prompt of type float64"),
        (np.array([True]), "prompt 0 of 1: a prompt of type bool"),
        ([[[1]]], "prompt 0 of 1: a prompt of type list of list"),
        ([[1], None], "prompt 1 of 2: a prompt of type NoneType"),
        ([[1, "a"]], "a prompt of type list"),
        ([[1], {"prompt": "x"}], "prompt 1 of 2: a prompt of type dict"),
        ([-1], "token id -1; expected 0 to 255"),
        ([3, 256], "token id 256; expected 0 to 255"),
        ([[3], [10**30]], "prompt 1 of 2: the prompt holds token id 1000"),
        ([7] * 6001, "6001 tokens; expected at most max_seq_len = 6000"),
        ("x" * 6001, "6001 tokens; expected at most max_seq_len = 6000"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_none_is_one_clear_error(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)


def test_every_list_of_whole_numbers_is_a_prompt(llm: LLM) -> None:
    expected = ids(one(llm, [4, 5, 6], params(4)))
    arrays = (np.arange(4, 7), np.arange(4, 7, dtype=np.uint8), torch.arange(4, 7))
    forms_of_one: tuple[Any, ...] = ((4, 5, 6), range(4, 7), *arrays, [np.int64(4), np.int32(5), 6])
    for form in forms_of_one:
        assert ids(one(llm, form, params(4))) == expected
        assert ids(llm.generate_async(form, params(4)).result()) == expected
    for forms in (np.array([[4, 5, 6]] * 2), torch.tensor([[4, 5, 6]] * 2), ([4, 5, 6], (4, 5, 6)),
                  (np.arange(4, 7), [4, 5, 6]), iter([[4, 5, 6], [4, 5, 6]])):  # fmt: skip
        assert [ids(o) for o in batch(llm, forms, params(4))] == [expected] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_tokens": 3}, "sampling_params is dict"),
        ("x", "sampling_params is str"),
        (0, "sampling_params is int"),
        (False, "sampling_params is bool"),
        (np.array([1, 2]), "sampling_params is ndarray"),
        ([], "0 sampling_params for 2 prompts"),
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
        ([SamplingParams(), "x"], r"sampling_params\[1\] is str"),
        (AttentionParams(), "sampling_params is AttentionParams"),
    ],
)
def test_parameters_of_another_kind_or_number_are_refused(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], value)
    if not isinstance(value, list):
        with pytest.raises(RequestError, match=message):
            llm.generate_async([1], value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dense", "attention is str"),
        ([], "0 attention for 2 prompts"),
        (AttentionParams(top_k=1025), "attention top_k is 1025; expected at most 1024"),
        (AttentionParams(mode="dense", top_k=5), "dense attention with a top_k"),
    ],
)
def test_attention_of_another_kind_or_beyond_what_was_built_is_refused(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], [2]], attention=value)


@pytest.mark.parametrize("value", [{"mode": "sparse"}, {"mode": 1}, {"top_k": 0}, {"top_k": True}, {"top_k": 1.5}])
def test_attention_parameters_check_themselves(value: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="attention"):
        AttentionParams(**value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop_token_ids": [256]}, "end or stop token 256"),
        ({"bad_token_ids": [999]}, "bad token 999"),
        ({"bad_token_ids": list(range(256))}, "every token of the vocabulary is forbidden"),
    ],
)
def test_sampling_that_the_model_cannot_do_is_refused(llm: LLM, value: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([5], SamplingParams(**value))


def test_one_refused_prompt_starts_none_of_the_batch(llm: LLM) -> None:
    before = next(llm._ids)
    with pytest.raises(RequestError, match="prompt 2 of 3"):
        llm.generate([[1], [2], [-3]], params(5))
    assert not llm._scheduler.busy
    assert next(llm._ids) >= before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"treads": 2}, r"unknown setting 'treads' \(did you mean 'threads'\?\)"),
        ({"threads": 0}, r"runtime\.threads is 0"),
        ({"runtime": {"threads": 2}}, "runtime is dict; expected a RuntimeConfig"),
        ({"max_stretch": 8193}, "max_stretch is 8193; expected at most"),
        ({"max_batch_size": 1024}, "max_batch_size is 1024; expected at most the engine's max_batch_size, "),
        ({"max_seq_len": 1 << 20}, "max_seq_len is 1048576; expected at most the engine's max_seq_len, "),
        ({"top_k": 8}, "top_k = 8, but the engine was built with 1024"),
        ({"window": 60}, r"shadowkv\.window is 60"),
        ({"shadowkv": {"windw": 64}}, r"did you mean 'window'"),
        ({"runtime": RuntimeConfig(shadowkv={"rank": 16})}, "rank = 16, but"),
        ({"executor": "cuda"}, "executor is 'cuda'"),
        ({"tokenizer": 5}, "a tokenizer of type int"),
        ({"tokenizer": b"x"}, "a tokenizer of type bytes"),
        ({"tokenizer": "/nowhere"}, "the tokenizer /nowhere is no directory"),
        ({"tokenizer": "/proc"}, "the tokenizer in /proc cannot be loaded"),
    ],
)  # fmt: skip
def test_settings_that_are_none_are_one_clear_error(engine_dir: Path, settings: Any, message: str) -> None:
    before = threading.active_count()
    with pytest.raises((ConfigError, EngineError), match=message) as error:
        LLM(engine_dir, **settings)
    assert "\n" not in str(error.value)
    assert threading.active_count() == before


def test_run_time_settings_may_come_in_three_ways(engine_dir: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"window": 32, "threads": 1},
        {"shadowkv": {"window": 32}, "threads": 1},
        {"runtime": RuntimeConfig(threads=1, shadowkv={"window": 32})},
    ]
    results = []
    for settings in ways:
        with LLM(engine_dir, **settings) as llm:
            assert (llm.config.window, llm.runtime.threads) == (32, 1)
            results.append(ids(one(llm, prompt(400), params(8))))
    assert results[0] == results[1] == results[2]


# --- damaged engines ----------------------------------------------------------------------------------------------


def test_an_altered_engine_does_not_load(engine_dir: Path, tmp_path: Path) -> None:

    copy = shutil.copytree(engine_dir, tmp_path / "copy")
    data = bytearray((copy / "model.onnx.data").read_bytes())
    data[1000] ^= 1
    (copy / "model.onnx.data").write_bytes(data)
    with pytest.raises(EngineError, match=r"model\.onnx\.data was altered"):
        LLM(copy)
    listed = json.loads((engine_dir / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**listed, "schema": 7}))
    with pytest.raises(EngineError, match="schema 7; expected schema 1"):
        LLM(copy)
    for path in (tmp_path / "nowhere", tmp_path, None, 5):
        with pytest.raises(EngineError):
            LLM(path)  # type: ignore[arg-type]
    with LLM(os.path.relpath(engine_dir)) as llm:
        assert len(ids(one(llm, [5], params(2)))) == 2


def test_an_engine_may_serve_fewer_and_shorter_rows(engine_dir: Path) -> None:
    with LLM(engine_dir, max_batch_size=1, max_seq_len=64, threads=1) as llm:
        assert llm._scheduler.limits.max_batch_size == 1
        answers = llm.generate([[5] * 60, [6] * 64], params(10))
        assert isinstance(answers, list)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [5, 1]
        with pytest.raises(RequestError, match="64"):
            llm.generate([5] * 65, params(1))
        assert_drained(llm)


def test_a_dense_engine_is_dense_for_every_request(tmp_path: Path) -> None:
    kv = ShadowKVConfig(attention="dense", window=32, dense_limit=64)
    engine = build_engine(write_tiny(tmp_path / "m"), tmp_path / "e", BuildConfig(max_batch_size=2, shadowkv=kv))
    with LLM(engine.path, threads=1) as llm:
        for attention in (None, AttentionParams(), AttentionParams(mode="dense")):
            answer = one(llm, [5] * 300, params(5), attention=attention).outputs[0]
            assert answer.statistics.sealed_tokens == 0
        for attention in (AttentionParams(mode="shadowkv"), AttentionParams(top_k=4)):
            with pytest.raises(RequestError, match="this engine was built dense"):
                llm.generate([5], attention=attention)
        assert_drained(llm)


def test_a_compiled_engine_that_cannot_be_used_is_no_reason_to_take_the_cpu(engine_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine_dir, tmp_path / "copy")
    (copy / "rank0.engine").write_bytes(b"compiled")
    manifest.write(copy)
    for executor in (None, "tensorrt"):
        with pytest.raises((MissingDependencyError, EngineError), match=r"driver|GPU|TensorRT|compute capability"):
            LLM(copy, executor=executor)
    with LLM(copy, executor="onnx_cpu", threads=1) as llm:
        assert len(ids(one(llm, [5], params(2)))) == 2
    with pytest.raises(EngineError, match=r"has no rank0\.engine; expected an engine for the TensorRT executor"):
        LLM(engine_dir, executor="tensorrt")
