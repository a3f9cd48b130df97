"""The ``plan`` command."""

from __future__ import annotations

import json
import re
from itertools import cycle

import pytest
import typer
from typer.testing import CliRunner

from trtllm_shadowkv.cli.plan import plan
from trtllm_shadowkv.errors import ShadowKVError
from trtllm_shadowkv.hardware import GPUS, MODELS

APP = typer.Typer()
APP.command("plan")(plan)
SHAPE = "--num-layers 32 --num-heads 32 --num-kv-heads 8 --head-size 128 --hidden-size 4096 --intermediate-size 14336"
BOARD = "--gpu-memory 141 --gpu-bandwidth 4200 --link-bandwidth 50 --tensor-tflops 989"


def run(line: str) -> str:
    result = CliRunner().invoke(APP, line.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


class TestCommand:
    def test_report(self) -> None:
        text = run("--model llama-3.1-8b --context-length 124928 --value-dtype fp8 --landmark-dtype fp8")
        for words in (
            "GB = 1e9 bytes",
            "llama-3.1-8b on h200, 124,928 tokens",
            "scales of fp8",
            "tokens/s",
            "ShadowKV gains",
            "one layer's attention",
            "+ values in spare GPU memory",
        ):
            assert words in text
        row = next(line.split() for line in text.splitlines() if line.startswith("  ShadowKV"))
        assert row[1:4] == ["30", "30", "host"]
        assert max(len(line) for line in text.split("\n\n")[1].splitlines()) < 100

    def test_numbers_equal_names(self) -> None:
        named = json.loads(run("--model llama-3.1-8b --gpu h200 --json"))
        given = json.loads(run(f"{SHAPE} --vocab-size 128256 {BOARD} --json"))
        assert named["step"] == given["step"] and named["bytes"] == given["bytes"]
        assert given["gpu"]["source"] == "given"

    def test_the_papers_formulas(self) -> None:
        """The paper's example: an A100 of 2 TB/s and 31.5 GB/s, 128K tokens, hit rate 0.6."""
        board = "--gpu-memory 80 --gpu-bandwidth 2000 --link-bandwidth 31.5 --tensor-tflops 312"
        line = f"--model llama-3.1-8b {board} --context-length 131072 --hit-rate 0.6"
        assert "6.26x less" in run(line) and "7.2 TB/s" in run(line)
        figures = json.loads(run(f"{line} --json"))["paper"]
        assert figures["memory_saving"] == pytest.approx(6.26, abs=0.005)
        assert figures["equivalent_bandwidth"] == pytest.approx(7.16e12, rel=1e-3)

    def test_json_is_strict(self) -> None:
        for line in ("", "--context-length 1048576", "--context-length 100", "--batch-size 3 --spare-gpu-values"):
            found = json.loads(run(f"--model llama-3.1-8b --json {line}"), parse_constant=pytest.fail)
            assert found["verdict"]["text"] and found["bytes"]["gpu"] > 0

    @pytest.mark.parametrize("model", MODELS)
    def test_every_model_and_gpu(self, model: str) -> None:
        for gpu, tokens in zip(GPUS, cycle((1, 4097, 131072, 4_000_000)), strict=False):
            assert "GPU" in run(f"--model {model} --gpu {gpu} --context-length {tokens}")

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("", "no model is given"),
            ("--model x --model-dir y", "given twice"),
            ("--model llama-3.1-8b --num-layers 3", "given twice"),
            (SHAPE, "--vocab-size missing"),
            ("--model lama", "did you mean"),
            ("--model llama-3.1-8b --gpu h20", "did you mean 'h200'"),
            ("--model llama-3.1-8b --gpu-memory 24", "bandwidth, link, tensor is not given"),
            ("--model llama-3.1-8b --gpu h200 --gpu-memory nan", "memory is nan"),
            ("--model llama-3.1-8b --gpu h200 --link-bandwidth=-1", "link is -1e+09"),
            ("--model llama-3.1-8b --host-memory 0", "--host-memory is 0"),
            ("--model llama-3.1-8b --host-memory inf", "--host-memory is inf"),
            ("--model llama-3.1-8b --context-length 0", "context is 0"),
            ("--model llama-3.1-8b --context-length=-7", "context is -7"),
            ("--model llama-3.1-8b --rank 100", "multiple of 16"),
            ("--model smollm2-135m --rank 208", "at most num_kv_heads"),
            ("--model llama-3.1-8b --top-k 0", "top_k is 0"),
            ("--model llama-3.1-8b --chunk-size 7", "chunk_size is 7"),
            ("--model llama-3.1-8b --window 12", "multiple of chunk_size"),
            ("--model llama-3.1-8b --hit-rate 2", "hit rate is 2"),
            ("--model llama-3.1-8b --value-dtype bf16", "did you mean 'bfloat16'"),
            ("--model llama-3.1-8b --landmark-dtype float32", "--landmark-dtype is 'float32'"),
            ("--model llama-3.1-8b --batch-size 0", "batch size is 0"),
            ("--model-dir /nonexistent-folder", "cannot read"),
        ],
    )
    def test_bad_input_is_one_clear_line(self, line: str, words: str) -> None:
        with pytest.raises(ShadowKVError, match=re.escape(words)) as error:
            CliRunner().invoke(APP, line.split(), catch_exceptions=False)
        assert "\n" not in str(error.value)

    def test_bad_numbers(self) -> None:
        assert CliRunner().invoke(APP, ["--model", "llama-3.1-8b", "--rank", "many"]).exit_code == 2
