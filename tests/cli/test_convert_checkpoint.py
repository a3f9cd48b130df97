"""``convert-checkpoint``, and ``build --checkpoint-dir``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.tiny_models import write_tiny
from trtllm_shadowkv.engine_directory import EngineDirectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("cli_convert") / "tiny", vocab=101)


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_from_a_model_over_a_checkpoint_to_an_engine(cli: Cli, model: Path, tmp_path: Path, spelling: str) -> None:
    ckpt, s = tmp_path / "ckpt", spelling
    outcome = cli("convert-checkpoint", f"--model{s}dir", model, f"--output{s}dir", ckpt, f"--tp{s}size", 4)
    assert (outcome.code, outcome.err) == (0, "")
    size = sum(path.stat().st_size for path in ckpt.glob("rank*"))
    assert outcome.out == f"{ckpt}: config.json and rank0.safetensors to rank3.safetensors, {size:,} bytes\n"
    outcome = cli("build", f"--checkpoint{s}dir", ckpt, f"--output{s}dir", tmp_path / "e", "--dtype", "float16")
    assert (outcome.code, outcome.err) == (0, "")
    assert cli("build", "--model-dir", model, "--output-dir", tmp_path / "h", "--dtype", "float16").code == 0
    data = [(tmp_path / engine / "model.onnx.data").read_bytes() for engine in "eh"]
    assert data[0] == data[1]
    assert EngineDirectory.open(tmp_path / "e").model == EngineDirectory.open(tmp_path / "h").model


def test_one_rank_and_a_dtype(cli: Cli, model: Path, tmp_path: Path) -> None:
    outcome = cli("convert-checkpoint", "--model-dir", model, "--output-dir", tmp_path / "c", "--dtype", "bfloat16")
    assert outcome.code == 0, outcome.err
    assert "config.json and rank0.safetensors, " in outcome.out
    assert '"dtype": "bfloat16"' in (tmp_path / "c" / "config.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "dtype is 'int8'; expected one of auto, float32"),
        (["--tp-size", "0"], "tp_size is 0; expected a whole number of ranks, 1 or more"),
        (["--tp-size", "3"], "4 attention heads with tp_size 3"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(
    cli: Cli, model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in cli("convert-checkpoint", "--model-dir", model, "--output-dir", tmp_path / "c", *options).error
    assert not list(tmp_path.iterdir())


def test_one_kind_of_input(cli: Cli, model: Path, tmp_path: Path) -> None:
    both = cli("build", "--model-dir", model, "--checkpoint-dir", model, "--output-dir", tmp_path / "e")
    assert both.code == 2
    assert "exclude each other" in both.err
    neither = cli("build", "--output-dir", tmp_path / "e")
    assert neither.code == 2
    assert "--checkpoint-dir" in neither.err
    refresh = cli("build", "--refresh", tmp_path / "e", "--checkpoint-dir", model)
    assert refresh.code == 2
    assert "checkpoint_dir" in refresh.err


def test_a_damaged_checkpoint_is_one_line_and_nothing_is_written(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("convert-checkpoint", "--model-dir", model, "--output-dir", tmp_path / "c", "--tp-size", 2).code == 0
    (tmp_path / "c" / "rank1.safetensors").unlink()
    error = cli("build", "--checkpoint-dir", tmp_path / "c", "--output-dir", tmp_path / "e").error
    assert "has no rank1.safetensors; expected 2 such files" in error
    shutil.copyfile(tmp_path / "c" / "rank0.safetensors", tmp_path / "c" / "rank1.safetensors")
    weights = (tmp_path / "c" / "rank0.safetensors").read_bytes()
    (tmp_path / "c" / "rank0.safetensors").write_bytes(weights.replace(b"mlp.fc", b"mlp.cf", 1))
    error = cli("build", "--checkpoint-dir", tmp_path / "c", "--output-dir", tmp_path / "e").error
    assert "transformer.layers.0.mlp.fc.weight of rank0.safetensors is missing" in error
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_wrong_kind_of_directory_is_one_line(cli: Cli, model: Path, tmp_path: Path) -> None:
    error = cli("build", "--checkpoint-dir", model, "--output-dir", tmp_path / "e").error
    assert "is a Hugging Face model; expected a TensorRT-LLM checkpoint; give it as --model-dir" in error
    assert "no_such" in cli("build", "--checkpoint-dir", tmp_path / "no_such", "--output-dir", tmp_path / "e").error
