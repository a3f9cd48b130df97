"""``model.yaml``, and the parameters of ``config.pbtxt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.triton.settings import check_settings, load_settings


def load(tmp_path: Path, text: str | None, **parameters: str) -> tuple[str, dict[str, Any]]:
    path = tmp_path / "model.yaml"
    if text is not None:
        path.write_text(text)
    return load_settings(path, parameters)


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = load(tmp_path, "engine_dir: ../engine\ntokenizer: words\n")
    assert found == (str(tmp_path / "../engine"), {"tokenizer": str(tmp_path / "words")})
    assert load(tmp_path, "engine_dir: /e\ntokenizer: /t\n") == ("/e", {"tokenizer": "/t"})
    assert load(tmp_path, "engine_dir: .\ntokenizer: null\n") == (str(tmp_path), {})


def test_parameters_win_over_the_file(tmp_path: Path) -> None:
    text = "engine_dir: /e\nthreads: 1\nmax_queue: 5\nwindow: 64\nexecutor: onnx_cpu\n"
    engine_dir, settings = load(tmp_path, text, threads="2", engine_dir="/other", window="null", max_seq_len="300")
    assert engine_dir == "/other"
    assert settings == {"threads": 2, "max_queue": 5, "executor": "onnx_cpu", "max_seq_len": 300}
    assert load(tmp_path, text, executor="") == ("/e", {"threads": 1, "max_queue": 5, "window": 64})


def test_parameters_alone(tmp_path: Path) -> None:
    found = load(tmp_path, None, engine_dir="e", host_memory="120_000_000_000", value_dtype="fp8", attention="dense")
    assert found == (
        str(tmp_path / "e"),
        {"host_memory": 120_000_000_000, "value_dtype": "fp8", "attention": "dense"},
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("0.5", 0.5), ("true", True), ("auto", "auto"), ("[1, 2]", [1, 2]), ("1e3x", "1e3x"), ("'8'", "8")],
)
def test_a_parameter_is_read_as_yaml(tmp_path: Path, text: str, value: Any) -> None:
    assert load(tmp_path, "engine_dir: /e\n", window=text) == ("/e", {"window": value})
    assert load(tmp_path, f"engine_dir: /e\nwindow: {text}\n") == ("/e", {"window": value})


@pytest.mark.parametrize("path", ["/models/a: b", "/models/a #1", "123", "yes", "[x", "/é/🙂"])
def test_a_path_in_a_parameter_stays_as_it_is(tmp_path: Path, path: str) -> None:
    engine_dir, settings = load(tmp_path, None, engine_dir=path, tokenizer=path)
    assert (engine_dir, settings["tokenizer"]) == (str(tmp_path / path), str(tmp_path / path))


@pytest.mark.parametrize("text", ["[1", "a: b: c", "2020-13-45", '"', "[" * 1500])
def test_a_parameter_that_is_no_yaml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="the parameter threads is"):
        load(tmp_path, "engine_dir: /e\n", threads=text)


def test_tritons_own_parameters_are_ignored(tmp_path: Path) -> None:
    found = load(tmp_path, "engine_dir: /e\n", EXECUTION_ENV_PATH="/venv", FORCE_CPU_ONLY_INPUT_TENSORS="no", X_1="[")
    assert found == ("/e", {})
    with pytest.raises(ConfigError, match="unknown setting 'Threads'"):
        load(tmp_path, "engine_dir: /e\n", Threads="1")
    with pytest.raises(ConfigError, match="unknown setting 'THREADS'"):  # in the file nothing is Triton's
        load(tmp_path, "engine_dir: /e\nTHREADS: 1\n")


def test_an_unknown_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.yaml: unknown setting 'treads' \(did you mean 'threads'\?\); exp"):
        load(tmp_path, "engine_dir: /e\ntreads: 1\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'windw' \(did you mean 'window'\?\)"):
        load(tmp_path, "engine_dir: /e\n", windw="1")
    with pytest.raises(ConfigError, match="unknown setting 'shadowkv'"):  # its fields stand beside the others
        load(tmp_path, "engine_dir: /e\nshadowkv: {window: 64}\n")
    with pytest.raises(ConfigError, match="unknown setting 5"):
        load(tmp_path, "engine_dir: /e\n5: 6\n")


@pytest.mark.parametrize("text", [None, "", "threads: 1\n", "engine_dir:\n", "engine_dir: ''\n", "engine_dir: [a]\n"])
def test_no_engine(tmp_path: Path, text: str | None) -> None:
    with pytest.raises(ConfigError, match=r"engine_dir is .*; expected the path of an engine directory"):
        load(tmp_path, text)


def test_an_empty_parameter_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine_dir is None"):
        load(tmp_path, "engine_dir: /e\n", engine_dir="")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine_dir: [", "is no YAML"),
        ("engine_dir: /e\nengine_dir: /f\n", "'engine_dir' is set more than once"),
        ("- engine_dir\n", "holds list; expected a mapping"),
        ("engine\n", "holds str; expected a mapping"),
        ("5\n", "holds int; expected a mapping"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path, None)


def test_where_is_named() -> None:
    check_settings({"engine_dir": "e", "max_queue": 1}, "settings")
    with pytest.raises(ConfigError, match=r"^settings: unknown setting 'max_que'"):
        check_settings({"engine_dir": "e", "max_que": 1}, "settings")
