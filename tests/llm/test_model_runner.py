"""``ModelRunner``: what LLM answers, in tensors, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_llm import NAN_TOKEN, assert_drained, batch, params, prompt, running, wait_until
from tests.tiny_models import write_tiny
from trtllm_shadowkv import LLM, AttentionParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    GenerationError,
    RequestError,
    ShadowKVError,
    StateError,
)
from trtllm_shadowkv.request import RequestHandle
from trtllm_shadowkv.runtime.model_runner import ModelRunner

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 40}
PENALISED = {"top_p": 0.9, "min_p": 0.01, "random_seed": 1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
             "frequency_penalty": 0.1}  # fmt: skip
BAN = [[NAN_TOKEN]]
"""Bad words without which a tiny model feeds itself a token that ends the request."""
LENGTHS = (1, 7, 300, 40)


@pytest.fixture(scope="module")
def opened(engine_dir: Path) -> Iterator[ModelRunner]:
    with ModelRunner.from_dir(engine_dir, threads=1) as runner:
        yield runner


@pytest.fixture
def runner(opened: ModelRunner) -> Iterator[ModelRunner]:
    yield opened
    assert_drained(opened.llm)


def tensors(prompts: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(p, dtype=torch.int32) for p in prompts]


def generate(runner: ModelRunner, prompts: list[list[int]], new: int, **more: Any) -> Any:
    """Without end token, and without the token that the model itself must not feed back."""
    more = {"end_id": -1, "pad_id": 0, "bad_words_list": [BAN] * len(prompts), **more}
    return runner.generate(tensors(prompts), max_new_tokens=new, **more)


def everything(runner: ModelRunner, prompts: list[list[int]], new: int, **more: Any) -> Any:
    asked = {"return_dict": True, "output_sequence_lengths": True, "output_log_probs": True}
    return generate(runner, prompts, new, **{**asked, **more})


def rows(output: Tensor, prompts: list[list[int]], new: int) -> list[list[list[int]]]:
    """Generated tokens, after a check that prompts stand before them and that padding fills the rest."""
    for i, p in enumerate(prompts):
        for row in output[i].tolist():
            assert row[: len(p)] == p
            assert set(row[len(p) + new :]) <= {0}
    return [[row[len(p) : len(p) + new] for row in output[i].tolist()] for i, p in enumerate(prompts)]


def free_tokens(runner: ModelRunner, p: list[int], new: int, **more: Any) -> list[int]:
    found: list[int] = rows(generate(runner, [p], new, **more), [p], new)[0][0]
    return found


def first_new(tokens: list[int], start: int) -> int:
    """Index of a token that was not there before."""
    return next(i for i, t in enumerate(tokens) if t not in tokens[:i] and i >= start)


# --- the same as LLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "random_seed": 7}, PENALISED])
def test_a_ragged_batch_is_what_llm_answers(runner: ModelRunner, llm: LLM, sampling: dict[str, Any], n: int) -> None:
    prompts, new = [prompt(k) for k in LENGTHS], 12
    found = everything(runner, prompts, new, num_return_sequences=n, **sampling)
    named = {"seed" if name == "random_seed" else name: value for name, value in sampling.items()}
    expected = batch(llm, prompts, params(new, n=n, logprobs=0, **named))
    assert rows(found["output_ids"], prompts, new) == [[a.token_ids for a in o.outputs] for o in expected]
    assert found["sequence_lengths"].tolist() == [[len(p) + new] * n for p in prompts]
    for i, output in enumerate(expected):
        for j, answer in enumerate(output.outputs):
            assert answer.logprobs is not None
            own = [step[t] for step, t in zip(answer.logprobs, answer.token_ids, strict=True)]
            torch.testing.assert_close(found["log_probs"][i, j], torch.tensor(own), rtol=0, atol=1e-6)
            assert answer.cumulative_logprob == pytest.approx(found["log_probs"][i, j].sum().item(), rel=1e-5)
    assert {name: (t.shape, t.dtype, t.device.type) for name, t in found.items()} == {
        "output_ids": ((4, n, 300 + new), torch.int32, "cpu"),
        "sequence_lengths": ((4, n), torch.int32, "cpu"),
        "log_probs": ((4, n, new), torch.float32, "cpu"),
    }


def test_what_is_not_asked_for_does_not_come(runner: ModelRunner) -> None:
    prompts = [prompt(4)]
    alone = generate(runner, prompts, 3, output_sequence_lengths=True, output_log_probs=True)
    assert isinstance(alone, Tensor)
    with_dict = generate(runner, prompts, 3, return_dict=True)
    assert list(with_dict) == ["output_ids"]
    assert torch.equal(alone, with_dict["output_ids"])
    assert list(generate(runner, prompts, 3, return_dict=True, output_log_probs=True)) == ["output_ids", "log_probs"]
    assert runner.generate(tensors(prompts)).shape == (1, 1, 5)  # type: ignore[union-attr]


def test_prompts_are_tensors_arrays_and_lists_and_wait_their_turn(runner: ModelRunner) -> None:
    p = prompt(6)
    expected = generate(runner, [p] * 9, 4)  # four rows fit
    assert len({tuple(row) for row in expected[:, 0].tolist()}) == 1
    for form in (torch.tensor([p] * 2), [p, tuple(p)], (torch.tensor(p), torch.tensor(p, dtype=torch.int64).numpy())):
        found = runner.generate(form, max_new_tokens=4, end_id=-1, pad_id=0, bad_words_list=[BAN] * 2)  # type: ignore[arg-type]
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected[:2])


def test_a_seed_is_drawn_where_none_is_given(runner: ModelRunner) -> None:
    found = generate(runner, [prompt(9)] * 6, 12, **SAMPLED, num_return_sequences=2)
    assert len({tuple(row) for row in found.flatten(0, 1).tolist()}) > 1
    again = [generate(runner, [prompt(9)], 12, **SAMPLED) for _ in range(2)]
    assert not torch.equal(*again)


def test_a_top_p_of_zero_beside_a_top_k_cuts_nothing(runner: ModelRunner) -> None:
    p, settings = prompt(9), {"temperature": 1.0, "random_seed": 3}
    expected = free_tokens(runner, p, 12, top_k=40, **settings)
    assert free_tokens(runner, p, 12, top_k=40, top_p=0.0, **settings) == expected
    greedy = free_tokens(runner, p, 12)
    assert greedy != expected
    for more in ({"top_k": 1, "top_p": 0.0}, {"top_p": 0.0}):
        assert free_tokens(runner, p, 12, **more, **settings) == greedy


def test_attention_is_a_requests_own(runner: ModelRunner) -> None:
    p = prompt(600)
    dense = generate(runner, [p], 6, attention=AttentionParams(mode="dense"))
    assert torch.equal(dense, generate(runner, [p], 6))
    with pytest.raises(RequestError, match="prompt 0 of 1: attention top_k is 1025"):
        generate(runner, [p], 6, attention=AttentionParams(top_k=1025))


@dataclass
class SamplingConfig:
    """Some of TensorRT-LLM's fields, with its values."""

    end_id: int = -1
    pad_id: int = 0
    max_new_tokens: int = 5
    num_beams: int = 1
    num_return_sequences: int | None = None
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    top_p_decay: float | None = None
    length_penalty: float = 1.0
    early_stopping: int = 1
    min_length: int = 1
    random_seed: int | None = None
    return_dict: bool = False
    bad_words_list: Any = None


def test_a_sampling_config_holds_what_is_not_given(runner: ModelRunner) -> None:
    p = prompt(5)
    expected = free_tokens(runner, p, 5)
    found = runner.generate(tensors([p]), sampling_config=SamplingConfig(bad_words_list=[BAN]))
    assert isinstance(found, Tensor)
    assert rows(found, [p], 5) == [[expected]]
    config = {"max_new_tokens": 9, "bad_words_list": [BAN], "return_dict": True, "temperature": None}
    both = runner.generate(tensors([p]), sampling_config=config, max_new_tokens=5, end_id=-1, pad_id=0)
    assert isinstance(both, dict)
    assert torch.equal(both["output_ids"], found)
    sampled = {**SAMPLED, "random_seed": 5}
    assert free_tokens(runner, p, 5, sampling_config=SamplingConfig(), **sampled) == free_tokens(
        runner, p, 5, **sampled
    )
    for wrong in (5, SamplingConfig, [1]):
        with pytest.raises(RequestError, match="sampling_config is"):
            runner.generate(tensors([p]), sampling_config=wrong)
    with pytest.raises(RequestError, match="num_beams = 4 is not supported"):
        runner.generate(tensors([p]), sampling_config=SamplingConfig(num_beams=4))


# --- ends and words -----------------------------------------------------------------------------------------------


def test_end_id_ends_an_answer_and_is_no_part_of_it(runner: ModelRunner) -> None:
    prompts, new = [prompt(12), prompt(30)], 40
    free = [free_tokens(runner, p, new) for p in prompts]
    at = first_new(free[0], 4)
    end = free[0][at]
    until = [f.index(end) if end in f else new for f in free]
    found = everything(runner, prompts, new, end_id=end, pad_id=None)
    assert found["sequence_lengths"].tolist() == [[len(p) + u] for p, u in zip(prompts, until, strict=True)]
    for i, p in enumerate(prompts):
        assert found["output_ids"][i, 0].tolist() == p + free[i][: until[i]] + [end] * (30 + new - len(p) - until[i])
        assert (found["log_probs"][i, 0] != 0).tolist() == [j < until[i] for j in range(new)]
    padded = everything(runner, prompts, new, end_id=end, pad_id=-7)
    assert padded["output_ids"][0, 0, 12 + at :].tolist() == [-7] * (30 + new - 12 - at)
    at_once = everything(runner, prompts[:1], 5, end_id=free[0][0])
    assert (at_once["sequence_lengths"].tolist(), at_once["log_probs"].abs().sum()) == ([[12]], 0)
    later = free_tokens(runner, prompts[0], new, end_id=end, min_tokens=at + 2)
    assert later[:at] == free[0][:at]
    assert end not in later[: at + 2]


def test_the_models_own_end_token_ends_an_answer_unless_another_is_given(runner: ModelRunner) -> None:
    settings = {"temperature": 5.0, "random_seed": 1, "return_dict": True, "output_sequence_lengths": True}
    prompts = [prompt(5, seed=s) for s in range(4)]
    found = generate(runner, prompts, 400, end_id=None, pad_id=None, **settings)
    lengths = found["sequence_lengths"][:, 0].tolist()
    assert min(lengths) < 405, "no answer met the end token in 1,600 tokens"
    free = generate(runner, prompts, 400, end_id=3, **settings)
    for i, length in enumerate(lengths):
        row = found["output_ids"][i, 0].tolist()
        assert 2 not in row[5:length]
        assert set(row[length:]) <= {2}
        common = min(length, free["sequence_lengths"][i, 0].item())
        assert free["output_ids"][i, 0].tolist()[:common] == row[:common]
    assert (free["output_ids"][:, :, 5:] == 2).any()
    late = generate(runner, prompts, 400, end_id=None, min_tokens=400, **settings)
    assert late["sequence_lengths"].tolist() == [[405]] * 4


def test_padding_needs_a_token(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace('"eos_token_id": 2', '"eos_token_id": null'))
    (model / "generation_config.json").unlink(missing_ok=True)
    engine = build_engine(model, tmp_path / "e", BuildConfig(max_batch_size=2))
    with ModelRunner.from_dir(engine.path, threads=1) as runner:
        with pytest.raises(RequestError, match=r"the model names no end token; pass a pad_id"):
            runner.generate([torch.tensor([5])])
        assert runner.generate([torch.tensor([5])], pad_id=0).shape == (1, 1, 2)  # type: ignore[union-attr]


def test_a_stop_word_of_any_length_ends_an_answer_and_is_part_of_it(runner: ModelRunner) -> None:
    p, new = prompt(12), 40
    free = free_tokens(runner, p, new)
    at = first_new(free, 6)
    never = [[t for t in (free[at], free[at - 2])], [255, 254]]
    for size in (1, 2, 4):
        word = free[at - size + 1 : at + 1]
        found = everything(runner, [p, p], new, stop_words_list=[[*never, word], None])
        assert found["sequence_lengths"].tolist() == [[12 + at + 1], [12 + new]]
        assert rows(found["output_ids"], [p, p], new)[0][0] == free[: at + 1] + [0] * (new - at - 1)
        assert rows(found["output_ids"], [p, p], new)[1][0] == free
        assert (found["log_probs"][0, 0] != 0).sum() == at + 1
    begins_in_prompt = everything(runner, [p], new, stop_words_list=[[[*p[-2:], free[0]]]])
    assert begins_in_prompt["sequence_lengths"].tolist() == [[13]]
    in_prompt = everything(runner, [p], 3, stop_words_list=[[p[-2:]]])
    assert in_prompt["sequence_lengths"].tolist() == [[15]]
    unhindered = everything(runner, [p], new, stop_words_list=[[free[at : at + 1]]], min_tokens=new)
    assert unhindered["sequence_lengths"].tolist() == [[12 + at + 1]]


def test_stop_words_end_each_of_several_answers_where_it_meets_them(runner: ModelRunner) -> None:
    settings = {**SAMPLED, "random_seed": 3, "num_return_sequences": 4}
    p, new = prompt(20), 24
    free = rows(generate(runner, [p], new, **settings), [p], new)[0]
    word = free[1][7:9]
    found = everything(runner, [p], new, stop_words_list=[[word]], **settings)
    for j, tokens in enumerate(free):
        ends = [i + 1 for i in range(1, new) if tokens[i - 1 : i + 1] == word] or [new]
        assert found["sequence_lengths"][0, j] == 20 + ends[0]
        assert found["output_ids"][0, j, 20 : 20 + ends[0]].tolist() == tokens[: ends[0]]
    assert found["sequence_lengths"][0, 1] <= 29


@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "random_seed": 4}])
def test_a_bad_word_of_any_length_is_never_completed(runner: ModelRunner, sampling: dict[str, Any]) -> None:
    p, new = prompt(12), 24
    free = free_tokens(runner, p, new, **sampling)
    for size in (1, 2, 3):
        word = free[6 : 6 + size]
        found = free_tokens(runner, p, new, bad_words_list=[[*BAN, word]], **sampling)
        assert all(found[i : i + size] != word for i in range(new))
        assert found[: 5 + size] == free[: 5 + size] or word[-1] in free[: 5 + size]
    begins_in_prompt = free_tokens(runner, p, new, bad_words_list=[[*BAN, [*p[-2:], free[0]]]], **sampling)
    assert begins_in_prompt[0] != free[0]
    other = rows(generate(runner, [p, p], new, bad_words_list=[[*BAN, free[6:8]], BAN], **sampling), [p, p], new)
    assert other[1][0] == free


# --- streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_ends_with_the_whole_and_each_yield_extends_the_one_before(runner: ModelRunner, n: int) -> None:
    prompts, new = [prompt(k) for k in LENGTHS], 16
    settings = {**SAMPLED, "random_seed": 11, "num_return_sequences": n, "stop_words_list": [[[9]], None, None, None]}
    whole = everything(runner, prompts, new, **settings)
    yields = list(everything(runner, prompts, new, streaming=True, **settings))
    assert len(yields) > 5
    for name, tensor in whole.items():
        assert torch.equal(yields[-1][name], tensor), name
    for before, after in zip([None, *yields], yields, strict=False):
        for i, p in enumerate(prompts):
            for j in range(n):
                length = int(after["sequence_lengths"][i, j])
                assert torch.equal(after["output_ids"][i, j, :length], whole["output_ids"][i, j, :length])
                assert not after["output_ids"][i, j, length:].any()
                known = length - len(p)
                assert torch.equal(after["log_probs"][i, j, :known], whole["log_probs"][i, j, :known])
                assert not after["log_probs"][i, j, known:].any()
                assert before is None or int(before["sequence_lengths"][i, j]) <= length


def test_a_stream_yields_tensors_of_one_shape_and_once_for_an_answer_of_nothing(runner: ModelRunner) -> None:
    p = prompt(12)
    free = free_tokens(runner, p, 6)
    yields = list(generate(runner, [p], 6, streaming=True, return_all_generated_tokens=True))
    assert all(isinstance(y, Tensor) and y.shape == (1, 1, 18) and y.dtype == torch.int32 for y in yields)
    assert rows(yields[-1], [p], 6) == [[free]]
    nothing = list(everything(runner, [p], 6, streaming=True, end_id=free[0]))
    assert nothing[-1]["sequence_lengths"].tolist() == [[12]]


def test_a_stream_is_checked_at_once_and_aborted_when_it_is_closed(runner: ModelRunner) -> None:
    with pytest.raises(RequestError, match="prompt 1 of 2: the prompt is empty"):
        generate(runner, [[5], []], 4, streaming=True)
    stream = generate(runner, [prompt(10)] * 2, 5000, streaming=True)
    next(stream)
    stream.close()
    assert_drained(runner.llm)
    generate(runner, [prompt(10)] * 2, 5000, streaming=True)  # nobody takes it
    assert_drained(runner.llm)


# --- failures and life --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_failed_request_is_one_error_and_ends_the_others(runner: ModelRunner, streaming: bool) -> None:
    bad = [*prompt(20), NAN_TOKEN]
    with pytest.raises(GenerationError, match="NaN logits"):
        list(generate(runner, [bad, prompt(10)], 30, streaming=streaming))
    assert_drained(runner.llm)


def test_settings_reach_the_engine_and_properties_say_what_it_is(engine_dir: Path) -> None:
    nothing: dict[str, Any] = {
        "rank": 0, "lora_dir": None, "lora_ckpt_source": "hf", "max_beam_width": 1, "debug_mode": False,
        "kv_cache_free_gpu_memory_fraction": None, "medusa_choices": None, "gpu_weights_percent": 1.0,
        "cuda_graph_mode": False, "enable_chunked_context": True, "multi_block_mode": True, "is_enc_dec": False,
    }  # fmt: skip
    with ModelRunner.from_dir(
        str(engine_dir), max_batch_size=2, max_input_len=100, max_output_len=50, threads=1, window=128,
        host_memory=1 << 24, executor="onnx_cpu", **nothing,
    ) as runner:  # fmt: skip
        assert (runner.max_batch_size, runner.max_input_len, runner.max_output_len) == (2, 100, 50)
        assert runner.max_seq_len == runner.max_sequence_length == 150
        assert (runner.llm.config.window, runner.llm.runtime.host_memory) == (128, 1 << 24)
        assert (runner.vocab_size, runner.hidden_size, runner.num_heads, runner.num_layers) == (256, 64, 4, 2)
        assert (runner.dtype, runner.max_beam_width, runner.device.type) == (torch.float32, 1, "cpu")
        assert not runner.gather_context_logits | runner.gather_generation_logits
        assert runner.remove_input_padding
        for length, new, message in (
            (101, 1, "prompt 0 of 1: it has 101 tokens; expected at most max_input_len = 100"),
            (100, 51, "max_new_tokens is 51; expected a whole number from 1 to 50"),
        ):
            with pytest.raises(RequestError, match=message):
                generate(runner, [prompt(length)], new)
        assert generate(runner, [prompt(100)], 50).shape == (1, 1, 150)
    with ModelRunner.from_dir(engine_dir, max_input_len=100, threads=1) as runner:
        assert (runner.max_input_len, runner.max_output_len, runner.max_seq_len) == (100, 6000, 6000)


def test_a_closed_runner_answers_nobody(engine_dir: Path) -> None:
    runner = ModelRunner.from_dir(engine_dir, threads=1)
    handles: list[RequestHandle] = []
    prepare = runner.llm.prepare
    runner.llm.prepare = lambda *args: handles.append(prepare(*args)) or handles[-1]  # type: ignore[func-returns-value, method-assign]

    def close() -> None:
        wait_until(lambda: bool(handles), "there is a request")
        running(handles[0])
        runner.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(StateError, match="closed while it generated"):
        generate(runner, [prompt(10)], 5000)
    closer.join()
    runner.close()
    for streaming in (False, True):
        with pytest.raises(StateError, match="the LLM is closed"):
            generate(runner, [prompt(10)], 5, streaming=streaming)


# --- refusals -----------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[ShadowKVError]) -> bool:
    return len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 1}, "from_dir: rank = 1 is not supported by this engine; one process"),
        ({"lora_dir": "lora"}, "lora_dir = 'lora' is not supported by this engine; merge"),
        ({"lora_dir": ["lora"]}, r"lora_dir = \['lora'\] is not supported"),
        ({"max_beam_width": 4}, "max_beam_width = 4 is not supported by this engine; use num_return_sequences"),
        ({"medusa_choices": [[0]]}, r"medusa_choices = \[\[0\]\] is not supported by this engine; leave it out"),
        ({"eagle_choices": [[0]]}, "eagle_choices"),
        ({"eagle_use_dynamic_tree": True}, "eagle_use_dynamic_tree = True"),
        ({"eagle_posterior_threshold": 0.1}, "eagle_posterior_threshold = 0.1"),
        ({"eagle_dynamic_tree_max_top_k": 3}, "eagle_dynamic_tree_max_top_k = 3"),
        ({"lookahead_config": [1, 2, 3]}, "lookahead_config"),
        ({"kv_cache_free_gpu_memory_fraction": 0.9}, "kv_cache_free_gpu_memory_fraction = 0.9 .*; use device_memory="),
        ({"max_tokens_in_paged_kv_cache": 4096}, "max_tokens_in_paged_kv_cache = 4096 .*; use device_memory="),
        ({"cross_kv_cache_fraction": 0.5}, "cross_kv_cache_fraction"),
        ({"max_attention_window_size": [512]}, r"max_attention_window_size = \[512\] .*; use window=TOKENS"),
        ({"sink_token_length": 4}, "sink_token_length = 4"),
        ({"debug_mode": True}, "debug_mode = True"),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent = 0.5"),
        ({"kv_cache_enable_block_reuse": True}, "kv_cache_enable_block_reuse = True"),
        ({"is_enc_dec": True}, "is_enc_dec = True"),
        ({"multi_block_mode": False}, "multi_block_mode = False"),
        ({"logits_processor_map": {"a": 1}}, "logits_processor_map"),
        ({"device_ids": [1]}, r"device_ids = \[1\] .*CUDA_VISIBLE_DEVICES"),
        ({"is_orchestrator_mode": True}, "is_orchestrator_mode = True"),
        ({"gather_generation_logits": True}, "gather_generation_logits = True .*; ask generate for output_log_probs"),
        ({"use_gpu_direct_storage": True}, "use_gpu_direct_storage"),
        ({"use_variable_beam_width_search": True}, "use_variable_beam_width_search"),
        ({"mm_embedding_offloading": True}, "mm_embedding_offloading"),
        ({"stream": torch.zeros(2, 2)}, "stream = tensor"),
        ({"windw": 64}, r"unknown setting 'windw' \(did you mean 'window'\?\)"),
        ({"max_batch_size": 5}, "max_batch_size is 5; expected at most the engine's max_batch_size, 4"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_input_len": 0}, "max_input_len is 0; expected a whole number"),
        ({"max_output_len": 1.5}, "max_output_len is 1.5; expected a whole number"),
        ({"max_input_len": 6000, "max_output_len": 1}, "max_seq_len is 6001; expected at most the engine's"),
        ({"max_input_len": 60, "max_output_len": 1, "max_seq_len": 61}, "max_seq_len beside max_input_len"),
        ({"executor": "tensor"}, "executor is 'tensor'"),
        ({"value_dtype": "fp8"}, "value_dtype is 'fp8' on the executor onnx_cpu"),
        ({"top_k": 3}, "top_k = 3, but the engine was built with 1024"),
    ],
)  # fmt: skip
def test_from_dir_refuses_by_name(engine_dir: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ModelRunner.from_dir(engine_dir, **settings)
    assert one_line(error)


def test_from_dir_needs_an_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        ModelRunner.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 2}, "generate: num_beams = 2 is not supported by this engine; use num_return_sequences"),
        ({"beam_width_array": [2]}, "beam_width_array"),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate = 0.5 is not supported by this engine"),
        ({"length_penalty": 1.5}, "length_penalty = 1.5"),
        ({"early_stopping": 2}, "early_stopping = 2"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3 .*; use repetition_penalty"),
        ({"top_p_decay": 0.9}, "top_p_decay = 0.9"),
        ({"top_p_min": 0.1}, "top_p_min = 0.1"),
        ({"top_p_reset_ids": 5}, "top_p_reset_ids = 5"),
        ({"stopping_criteria": print}, "stopping_criteria = .*; use stop_words_list"),
        ({"logits_processor_names": ["a"]}, "logits_processor_names"),
        ({"lora_uids": [0]}, "lora_uids"),
        ({"lookahead_config": [1, 2, 3]}, "lookahead_config"),
        ({"prompt_table": torch.zeros(3, 4)}, "prompt_table = tensor"),
        ({"prompt_tasks": "0"}, "prompt_tasks = '0'"),
        ({"output_generation_logits": True}, "output_generation_logits = True .*; ask for output_log_probs"),
        ({"output_cum_log_probs": True}, "output_cum_log_probs = True .*sum them"),
        ({"position_ids": [torch.tensor([0])]}, "position_ids"),
        ({"encoder_input_ids": [torch.tensor([0])]}, "encoder_input_ids"),
        ({"draft_tokens_list": [[1]]}, "draft_tokens_list"),
        ({"temprature": 1.0}, r"generate: unknown parameter 'temprature' \(did you mean 'temperature'\?\)"),
        ({"max_tokens": 3}, r"unknown parameter 'max_tokens' \(did you mean 'max_new_tokens'\?\)"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected a whole number from 1 to 6000"),
        ({"max_new_tokens": 6000}, "its 1 tokens and max_new_tokens = 6000 are 6001; expected at most max_seq_len"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens is a value of type int"),
        ({"end_id": 256}, "end_id is 256; expected a whole number from -1 to 255"),
        ({"end_id": [2]}, r"end_id is \[2\]"),
        ({"pad_id": 2.0}, "pad_id is 2.0"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"random_seed": -1}, "random_seed is -1"),
        ({"temperature": -1}, "temperature is -1; expected a finite number"),
        ({"top_k": [5]}, r"top_k is \[5\]"),
        ({"min_tokens": 5}, "min_tokens is 5; expected at most max_new_tokens = 1; raise max_new_tokens"),
        ({"stop_words_list": torch.zeros(1, 2, 3)}, "stop_words_list is Tensor; expected for each prompt"),
        ({"stop_words_list": []}, "stop_words_list has 0 entries for 1 prompts"),
        ({"stop_words_list": [[3]]}, r"stop_words_list\[0\] is \[3\]; expected words"),
        ({"bad_words_list": [[[]]]}, r"bad_words_list\[0\] is \[\[\]\]; expected words"),
        ({"bad_words_list": ["no"]}, r"bad_words_list\[0\] is 'no'"),
        ({"stop_words_list": [[[256]]]}, r"a token id in stop_words_list\[0\] is 256; expected a whole number"),
        ({"bad_words_list": [[["a"]]]}, r"a token id in bad_words_list\[0\] is 'a'"),
        ({"bad_words_list": [[[i] for i in range(256)]]}, "prompt 0 of 1: every token of the vocabulary is forbidden"),
    ],
)  # fmt: skip
def test_generate_refuses_by_name(runner: ModelRunner, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        runner.generate([torch.tensor([5])], **asked)
    assert one_line(error)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (torch.tensor([5, 6]), "batch_input_ids is one prompt, or none; expected a list of 1-D integer tensors"),
        ([5, 6], "batch_input_ids is one prompt"),
        ([], "batch_input_ids is one prompt, or none"),
        (iter([]), "batch_input_ids is empty"),
        ("text", "batch_input_ids is a text"),
        ([torch.tensor([5]), "text"], "batch_input_ids is a text"),
        (None, "prompts of type NoneType"),
        ([torch.tensor([5.0])], "prompt 0 of 1: a prompt of type Tensor"),
        ([torch.tensor([5]), torch.tensor([], dtype=torch.int32)], "prompt 1 of 2: the prompt is empty"),
        ([torch.tensor([5]), torch.tensor([300])], "prompt 1 of 2: the prompt holds token id 300"),
        ([torch.ones(5999, dtype=torch.int32)], "its 5999 tokens and max_new_tokens = 4 are 6003"),
        ([torch.ones(6001, dtype=torch.int32)], "6001 tokens; expected at most max_seq_len = 6000"),
    ],
)
def test_what_is_no_batch_is_one_clear_error(runner: ModelRunner, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        runner.generate(prompts, max_new_tokens=4)
    assert one_line(error)


def test_a_request_that_can_never_fit_is_refused(engine_dir: Path) -> None:
    with (
        ModelRunner.from_dir(engine_dir, threads=1, device_memory=1 << 17) as runner,
        pytest.raises(CapacityError, match=r"prompt 1 of 2: .* bytes of device memory"),
    ):
        generate(runner, [[5], prompt(1000)], 4)


def test_arguments_that_ask_for_nothing_change_nothing(runner: ModelRunner) -> None:
    p = prompt(7)
    nothing: dict[str, Any] = {
        "num_beams": 1, "length_penalty": 1.0, "early_stopping": True, "beam_search_diversity_rate": 0.0,
        "no_repeat_ngram_size": None, "lora_uids": None, "prompt_table": None, "output_generation_logits": False,
        "return_all_generated_tokens": False, "stopping_criteria": None, "top_p_decay": None, "min_p": None,
    }  # fmt: skip
    assert torch.equal(generate(runner, [p], 5, **nothing), generate(runner, [p], 5))
