"""``generate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import NAN_CHARACTER, Cli
from trtllm_shadowkv import LLM, SamplingParams

PRINTABLE = ["--max-tokens", "12", "--temperature", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def expected(cli_engine: Path) -> dict[str, str]:
    params = SamplingParams(max_tokens=12, temperature=1, seed=3)
    with LLM(cli_engine, threads=1) as llm:
        return {p: llm.generate(p, params).text for p in ("first", "second", "Grüße\n世界")}


def test_one_prompt_is_streamed(cli: Cli, cli_engine: Path, expected: dict[str, str]) -> None:
    outcome = cli("generate", cli_engine, "--prompt", "first", *PRINTABLE)
    assert (outcome.code, outcome.out, outcome.err) == (0, expected["first"] + "\n", "")


def test_prompts_come_from_options_files_and_standard_input(
    cli: Cli, cli_engine: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    file = tmp_path / "größe"
    file.write_text("Grüße\n世界", encoding="utf-8")
    long = expected["Grüße\n世界"]
    assert cli("generate", cli_engine, *PRINTABLE, stdin=b"first").out == expected["first"] + "\n"
    assert cli("generate", cli_engine, "--prompt-file", "-", *PRINTABLE, stdin=b"first").out == expected["first"] + "\n"
    assert cli("generate", cli_engine, "--prompt-file", file, *PRINTABLE).out == long + "\n"
    several = cli("generate", cli_engine, "--prompt", "first", "--prompt", "second", "--prompt_file", file, *PRINTABLE)
    assert several.out == f"{expected['first']}\n{expected['second']}\n{long}\n"
    lines = cli("generate", cli_engine, "--lines", *PRINTABLE, stdin=b"first\n\n  \nsecond\r\n")
    assert lines.out == f"{expected['first']}\n{expected['second']}\n"


def test_json_has_everything(cli: Cli, cli_engine: Path, expected: dict[str, str]) -> None:
    options = ["--n", "2", "--logprobs", "2", "--json", *PRINTABLE]
    outcome = cli("generate", cli_engine, "--prompt", "first", "--prompt", "second", *options)
    first, second = map(json.loads, outcome.out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("first", "second")
    assert first["prompt_token_ids"] == list(b"first")
    assert [o["index"] for o in first["outputs"]] == [0, 1]
    answer = second["outputs"][0]
    assert answer["text"] == expected["second"]
    assert answer["finish_reason"] == "length"
    assert all(str(t) in step for t, step in zip(answer["token_ids"], answer["logprobs"], strict=True))
    assert answer["statistics"]["prompt_tokens"] == 6


def test_attention_and_engine_options_reach_the_engine(cli: Cli, cli_engine: Path) -> None:
    options = ["--json", "--max-tokens", "8", "--threads", "1", "--max-stretch", "64"]
    prompt = "x" * 600

    def sealed(*more: str) -> int:
        outcome = cli("generate", cli_engine, "--prompt", prompt, *options, *more)
        return int(json.loads(outcome.out)["outputs"][0]["statistics"]["sealed_tokens"])

    assert sealed() == sealed("--budget", "3") > 500
    assert sealed("--attention", "dense") == sealed("--dense-limit", "700") == 0
    assert 300 < sealed("--window", "128", "--dense_limit", "300") < 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--prompt", ""], "prompt 1 of 2: the prompt is empty"),
        (["--prompt", "x" * 6001], "the prompt has 6001 tokens; expected at most max_seq_len = 6000"),
        (["--prompt", "a\udc80"], "the tokenizer refuses the text"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "x", "--n", "0"], "n is 0"),
        (["--prompt", "x", "--stop", ""], "stop holds ''"),
        (["--prompt", "x", "--attention", "sparse"], "--attention is 'sparse'; expected dense or shadowkv"),
        (["--prompt", "x", "--budget", "0"], "attention top_k is 0"),
        (["--prompt", "x", "--budget", "9999"], "attention top_k is 9999; expected at most 1024"),
        (["--prompt", "x", "--attention", "dense", "--budget", "4"], "dense attention with a top_k"),
        (["--prompt", "x", "--threads", "0"], "runtime.threads is 0"),
        (["--prompt", "x", "--max-stretch", "99999"], "max_stretch is 99999"),
        (["--prompt", "x", "--window", "60"], "shadowkv.window is 60"),
        (["--prompt", "x", "--max-batch-size", "9999"], "max_batch_size is 9999; expected at most the engine's"),
        (["--prompt", "x", "--max-seq-len", "6001"], "max_seq_len is 6001; expected at most the engine's"),
        (["--prompt", "x", "--device-memory", "0"], "device_memory is 0.0; expected a positive"),
        (["--prompt", "x", "--host-memory", "nan"], "host_memory is nan; expected a positive"),
        (["--prompt", "x", "--device-memory", "1e-9"], "bytes of device memory; expected at most 1"),
        (["--prompt", "x", "--value-dtype", "fp4"], "shadowkv.value_dtype is 'fp4'; expected 'auto' or 'fp8'"),
        (["--prompt", "x", "--landmark-dtype", "fp8"], "landmark_dtype is 'fp8' on the executor onnx_cpu"),
        (["--prompt-file", "/nowhere"], "cannot read /nowhere"),
        (["--prompt-file", "/"], "cannot read /"),
        (["--lines"], "there is no prompt"),
        ([], "the prompt is empty"),
    ],
)
def test_a_request_that_cannot_be_is_one_line(cli: Cli, cli_engine: Path, options: list[str], message: str) -> None:
    outcome = cli("generate", cli_engine, *options)
    assert message in outcome.error
    assert outcome.out == ""


def test_input_that_is_no_text_is_one_line(cli: Cli, cli_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ok\xff")
    assert "is no UTF-8 at byte 2" in cli("generate", cli_engine, "--prompt-file", tmp_path / "file").error
    assert "- is no UTF-8 at byte 0" in cli("generate", cli_engine, stdin=b"\xff").error


def test_an_engine_that_is_none_is_one_line(cli: Cli, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert "expected an engine directory" in cli("generate", path, "--prompt", "x").error


def test_a_request_that_fails_is_an_error_and_the_others_are_shown(
    cli: Cli, cli_engine: Path, expected: dict[str, str]
) -> None:
    single = cli("generate", cli_engine, "--prompt", NAN_CHARACTER, *PRINTABLE)
    assert "NaN logits" in single.error
    assert single.out == ""
    prompts = ["--prompt", "first", "--prompt", f"a{NAN_CHARACTER}b", "--prompt", "second"]
    several = cli("generate", cli_engine, *prompts, *PRINTABLE)
    assert "NaN logits" in several.error
    assert several.out == f"{expected['first']}\n{expected['second']}\n"
    objects = [
        json.loads(line) for line in cli("generate", cli_engine, *prompts, "--json", *PRINTABLE).out.splitlines()
    ]
    assert [o["prompt"] for o in objects] == ["first", "second"]


def test_bars_are_shown_on_a_terminal_and_never_in_the_output(
    cli: Cli, cli_engine: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = cli("generate", cli_engine, "--prompt", "first", "--prompt", "second", *PRINTABLE)
    assert outcome.out == f"{expected['first']}\n{expected['second']}\n"
    assert "requests: 100%" in outcome.err
    long = cli("generate", cli_engine, "--prompt", "x" * 2500, "--max-stretch", "16", "--max-tokens", "1")
    assert "prompt: " in long.err
    assert "/2500" in long.err
    assert "prompt" not in long.out
    assert cli("generate", cli_engine, "--prompt", "first", *PRINTABLE).err == ""  # too short to be worth a bar


def test_an_executor_by_name(cli: Cli, cli_engine: Path) -> None:
    arguments = ("generate", cli_engine, "--prompt", "first", *PRINTABLE)
    assert cli(*arguments, "--executor", "onnx_cpu").out == cli(*arguments).out
    assert "has no rank0.engine; expected an engine" in cli(*arguments, "--executor", "tensorrt").err
    assert "executor is 'cpu'; expected 'onnx_cpu' or 'tensorrt'" in cli(*arguments, "--executor", "cpu").err
