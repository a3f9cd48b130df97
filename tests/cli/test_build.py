"""``build`` and ``verify``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.tiny_models import write_tiny
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.engine_directory import EngineDirectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("cli_model") / "tiny")


def test_defaults(cli: Cli, model: Path, tmp_path: Path) -> None:
    outcome = cli("build", "--model-dir", model, "--output-dir", tmp_path / "e")
    assert (outcome.code, outcome.err) == (0, "")
    assert "LlamaForCausalLM, float32, up to 32 x 16384 tokens" in outcome.out
    assert "attention: shadowkv, 256 chunks of 8 tokens, rank 32" in outcome.out
    assert "CPU executor" in outcome.out
    verified = cli("verify", tmp_path / "e")
    assert verified.code == 0
    assert "files as their manifest says" in verified.out


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_every_option_in_both_spellings(cli: Cli, model: Path, tmp_path: Path, spelling: str) -> None:
    options = {
        "model-dir": model,
        "output-dir": tmp_path / "e",
        "dtype": "bfloat16",
        "attention": "dense",
        "max-batch-size": 5,
        "max-seq-len": 600,
        "max-num-tokens": 100,
    }
    arguments = [x for name, value in options.items() for x in (f"--{name.replace('-', spelling)}", value)]
    outcome = cli("build", *arguments)
    assert outcome.code == 0, outcome.err
    assert "attention: dense" in outcome.out
    build = EngineDirectory.open(tmp_path / "e").build
    assert (build.dtype, build.shadowkv.dense) == ("bfloat16", True)
    assert (build.max_batch_size, build.max_seq_len, build.max_num_tokens) == (5, 600, 100)
    only = cli("build", *arguments, f"--engine{spelling}only")
    assert "engine_only keeps nothing but a compiled TensorRT engine" in only.error
    assert EngineDirectory.open(tmp_path / "e").build == build


def test_options_win_over_the_file(cli: Cli, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max_batch_size: 7\ndtype: float16\nshadowkv:\n  window: 128\n  top_k: 32\n")
    outcome = cli(
        "build", "--model-dir", model, "--output-dir", tmp_path / "e", "--config", config, "--dtype", "float32"
    )
    assert outcome.code == 0, outcome.err
    build = EngineDirectory.open(tmp_path / "e").build
    assert (build.max_batch_size, build.dtype, build.shadowkv.window, build.shadowkv.top_k) == (7, "float32", 128, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "dtype is 'int8'; expected float32, float16 or bfloat16"),
        (["--attention", "sparse"], "shadowkv.attention is 'sparse'"),
        (["--max-batch-size", "0"], "build.max_batch_size is 0"),
        (["--max-seq-len", "999999"], "max_seq_len is 999999; expected at most"),
        (["--max-num-tokens", "-5"], "build.max_num_tokens is -5"),
        (["--config", "/nowhere.yaml"], "cannot read the configuration /nowhere.yaml"),
        (["--backend", "cuda"], "backend is 'cuda'; expected onnx, tensorrt or tensorrt-rtx"),
        (["--backend", "tensorrt"], "dtype is 'float32' with backend 'tensorrt'; expected float16 or bfloat16"),
        (["--backend", "tensorrt-rtx"], "dtype is 'float32' with backend 'tensorrt-rtx'; expected float16"),
        (["--compute-capability", "70"], "compute_capabilities is 70; expected a whole number from 80"),
        (["--compute-capability", "80"], "compute_capabilities 80 with backend 'onnx'; expected none"),
        (["--engine-only"], "backend 'onnx' compiles none; build without it, or with --backend tensorrt"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(
    cli: Cli, model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in cli("build", "--model-dir", model, "--output-dir", tmp_path / "e", *options).error
    assert not list(tmp_path.iterdir())


def test_an_unknown_setting_names_the_nearest(cli: Cli, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("shadowkv:\n  dense_limits: 5\n")
    error = cli("build", "--model-dir", model, "--output-dir", tmp_path / "e", "--config", config).error
    assert "unknown setting 'dense_limits' (did you mean 'dense_limit'?)" in error


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_an_incomplete_model_is_one_line(cli: Cli, model: Path, tmp_path: Path, missing: str) -> None:
    copy = shutil.copytree(model, tmp_path / "m")
    (copy / missing).unlink()
    assert missing in cli("build", "--model-dir", copy, "--output-dir", tmp_path / "e").error
    assert not (tmp_path / "e").exists()


def test_refresh_and_verify(cli: Cli, model: Path, tmp_path: Path) -> None:
    engine = tmp_path / "größe e"
    assert cli("build", "--model_dir", model, "--output_dir", f"{engine}/").code == 0
    before = EngineDirectory.open(engine)
    outcome = cli("build", "--refresh", engine)
    assert (outcome.code, outcome.err) == (0, "")
    assert EngineDirectory.open(engine) == before
    data = bytearray((engine / "model.onnx.data").read_bytes())
    data[12345] ^= 1
    (engine / "model.onnx.data").write_bytes(data)
    for arguments in (["verify", engine], ["build", "--refresh", engine]):
        assert "model.onnx.data was altered after the build" in cli(*arguments).error
    for arguments in (["verify", tmp_path / "nowhere"], ["build", "--refresh", tmp_path / "nowhere"]):
        assert "is no directory" in cli(*arguments).error
    manifest = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").write_text(json.dumps({**manifest, "schema": 3}))
    assert "schema 3; expected schema 1 of this version; build the engine again" in cli("verify", engine).error
    assert cli("build", "--model-dir", model, "--output-dir", engine).code == 0
    assert EngineDirectory.open(engine).build.max_batch_size == BuildConfig().max_batch_size


def test_a_bar_is_shown_on_a_terminal(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = cli("build", "--model-dir", model, "--output-dir", tmp_path / "e")
    assert "weights: 100%" in outcome.err
    assert "weights" not in outcome.out


RTX = ("--backend", "tensorrt-rtx", "--dtype", "bfloat16", "--compute-capability", "80", "--compute-capability", "120")


def test_an_engine_is_compiled_by_options_and_by_the_file(rtx: None, cli: Cli, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", head_dim=64)
    here = ("build", "--model-dir", model, "--output-dir", tmp_path / "e")
    outcome = cli(*here, *RTX)
    assert (outcome.code, outcome.err) == (0, "")
    assert "engine: tensorrt-rtx 1." in outcome.out
    assert " for compute capability 8.0+12.0, " in outcome.out
    refreshed = cli("build", "--refresh", tmp_path / "e")
    assert (refreshed.code, refreshed.err) == (0, "")
    assert refreshed.out == outcome.out
    config = tmp_path / "config.yaml"
    config.write_text("backend: tensorrt-rtx\ncompute_capabilities: [89]\ndtype: float16\n")
    shown = cli(*here, "--config", config, "--engine-only", "--verbose")
    assert shown.code == 0
    assert "for compute capability 8.9, " in shown.out
    assert "[I] Successfully created plugin: ShadowKVSparseAttention" in shown.err
    assert not (tmp_path / "e/model.onnx").exists()


def test_a_failing_compiler_is_one_line(rtx: None, cli: Cli, model: Path, tmp_path: Path) -> None:
    error = cli("build", "--model-dir", model, "--output-dir", tmp_path / "e", *RTX).error
    assert "head_size is 16" in error
    assert not list(tmp_path.iterdir())


def test_a_bar_is_shown_while_it_compiles(rtx: None, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "m", head_dim=64)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = cli("build", "--model-dir", model, "--output-dir", tmp_path / "e", *RTX)
    assert outcome.err.index("weights: 100%") < outcome.err.index("TensorRT: 100%")


def test_the_module_is_the_command(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_shadowkv.build"]
    output = tmp_path / "e"
    done = subprocess.run([*command, "--model-dir", model, "--output-dir", output], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert EngineDirectory.open(output).has_onnx
    wrong = subprocess.run([*command, "--refresh", tmp_path / "nowhere"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert "Usage: trtllm-shadowkv build [OPTIONS]" in usage.stdout
