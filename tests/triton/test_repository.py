"""What ``triton-repository`` writes, and what it refuses."""

from __future__ import annotations

import io
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
)

from tests.conftest import BuildTiny
from trtllm_shadowkv.errors import ConfigError, EngineError
from trtllm_shadowkv.triton import repository
from trtllm_shadowkv.triton.repository import write_repository
from trtllm_shadowkv.triton.settings import load_settings

OWN = Path(repository.__file__).parent


@pytest.fixture(scope="module")
def engine(build_tiny: BuildTiny) -> Path:
    return build_tiny().engine.path


@cache
def model_config() -> Any:
    """The part of Triton's ModelConfig that is used here, as its text format names it."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="part.proto", package="part", syntax="proto3")

    def message(name: str, parent: Any = None, /, **fields: tuple[Any, bool]) -> Any:
        made = (file.message_type if parent is None else parent.nested_type).add(name=name)
        for number, (field_name, (kind, repeated)) in enumerate(fields.items(), 1):
            one = made.field.add(name=field_name, number=number)
            one.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                one.type_name = f".part.{kind}"
                one.type = field.TYPE_ENUM if kind in ("DataType", "Kind") else field.TYPE_MESSAGE
            else:
                one.type = kind
        return made

    string, boolean, number = field.TYPE_STRING, field.TYPE_BOOL, field.TYPE_INT64
    for name, values in (
        ("DataType", ["STRING", "INT32", "INT64", "UINT64", "FP32", "BOOL"]),
        ("Kind", ["AUTO", "CPU"]),
    ):
        enum = file.enum_type.add(name=name)
        for i, value in enumerate(values):
            enum.value.add(name=f"{'TYPE' if name == 'DataType' else 'KIND'}_{value}", number=i)
    tensor: dict[str, Any] = {"name": (string, False), "data_type": ("DataType", False), "dims": (number, True)}
    message("Input", **tensor, optional=(boolean, False))
    message("Output", **tensor)
    message("Group", count=(number, False), kind=("Kind", False))
    message("Policy", decoupled=(boolean, False))
    message("Parameter", string_value=(string, False))
    config = message(
        "ModelConfig",
        name=(string, False),
        backend=(string, False),
        max_batch_size=(number, False),
        model_transaction_policy=("Policy", False),
        instance_group=("Group", True),
        input=("Input", True),
        output=("Output", True),
        parameters=("ModelConfig.ParametersEntry", True),
    )
    entry = message("ParametersEntry", config, key=(string, False), value=("Parameter", False))
    entry.options.map_entry = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("part.ModelConfig"))


def parsed(model: Path) -> Any:
    return text_format.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), model_config()())


def parameters(model: Path) -> dict[str, str]:
    return {key: value.string_value for key, value in parsed(model).parameters.items()}


def settings(model: Path) -> Any:
    return yaml.safe_load((model / "1/model.yaml").read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_venv(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python3").write_text("#!/bin/sh\n")
    (folder / "bin/python3").chmod(0o755)
    return folder


def make_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


# --- what is written ----------------------------------------------------------------------------------------------


def test_files_and_what_is_in_them(engine: Path, tmp_path: Path) -> None:
    model = write_repository(engine, tmp_path / "new/repo")
    assert model == tmp_path / "new/repo/shadowkv"
    assert sorted(files(tmp_path / "new/repo")) == [
        "shadowkv/1/model.py",
        "shadowkv/1/model.yaml",
        "shadowkv/config.pbtxt",
    ]
    assert (model / "1/model.py").read_bytes() == (OWN / "model.py").read_bytes()
    assert settings(model) == {"engine_dir": str(engine.resolve())}
    assert load_settings(model / "1/model.yaml", {}) == (str(engine.resolve()), {})
    config = parsed(model)
    assert (config.backend, config.max_batch_size, config.name) == ("python", 0, "")
    assert config.model_transaction_policy.decoupled
    assert [group.count for group in config.instance_group] == [1]
    assert (len(config.input), len(config.output)) == (28, 12)
    assert all(tensor.optional for tensor in config.input)
    assert parameters(model) == {"python": sys.executable}


def test_paths_become_absolute(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(engine)
    make_venv(tmp_path / "venv")
    make_python(tmp_path / "bin/py")
    model = write_repository("link", "repo", venv="venv", python="bin/py")
    assert settings(tmp_path / model)["engine_dir"] == str(engine.resolve())
    assert parameters(tmp_path / model) == {
        "python": str(tmp_path / "bin/py"),
        "EXECUTION_ENV_PATH": str(tmp_path / "venv"),
    }


def test_an_interpreter_by_name(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_python(tmp_path / "bin/shadowkv-python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert parameters(write_repository(engine, tmp_path / "repo", python="shadowkv-python")) == {"python": str(made)}


def test_a_virtual_environments_interpreter_is_not_resolved(engine: Path, tmp_path: Path) -> None:
    target = make_python(tmp_path / "real")
    link = tmp_path / "python"
    link.symlink_to(target)
    assert parameters(write_repository(engine, tmp_path / "repo", python=str(link)))["python"] == str(link)


def test_settings_go_into_the_file(engine: Path, tmp_path: Path) -> None:
    given = {"threads": 2, "value_dtype": "fp8", "max_queue": 5, "tokenizer": "/t: é", "executor": "onnx_cpu"}
    model = write_repository(engine, tmp_path, settings=given)
    assert settings(model) == {"engine_dir": str(engine.resolve()), **given}
    assert load_settings(model / "1/model.yaml", {}) == (str(engine.resolve()), given)


@pytest.mark.parametrize(
    "name",
    [
        'with "quotes"',
        "it's a name",
        "back\\slash",
        "trailing\\",
        "é",
        "日本",
        "🙂",
        "#{}: [x]",
        "new\nline",
        "\x01\x7f\x85",
    ],
)
def test_any_path_can_be_written(engine: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / name / "engine"
    shutil.copytree(engine, copy, copy_function=os.link)
    venv, python = make_venv(tmp_path / name / "venv"), make_python(tmp_path / name / "python")
    model = write_repository(copy, tmp_path / "repo", venv=venv, python=str(python))
    assert parameters(model) == {"python": str(python), "EXECUTION_ENV_PATH": str(venv)}
    assert load_settings(model / "1/model.yaml", {})[0] == str(copy.resolve())
    assert (model / "config.pbtxt").read_bytes().isascii()  # \u is not an escape to all parsers


@pytest.mark.parametrize("name", ["my models", "it's", "$HOME", "a;b", "new\nline", 'with "quotes"'])
def test_a_path_that_triton_cannot_pass_on(engine: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"the path of the model is .*; expected letters, digits"):
        write_repository(engine, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_rest_of_the_configuration_is_as_it_was(engine: Path, tmp_path: Path) -> None:
    model = write_repository(engine, tmp_path)
    lines = (model / "config.pbtxt").read_text().splitlines()
    own = (OWN / "config.pbtxt").read_text().splitlines()
    assert lines[:-1] == own[:-1]
    assert own[-1].startswith("parameters")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": -3}, "runtime.threads is -3"),
        ({"max_batch_size": 99}, "max_batch_size is 99; expected at most"),
        ({"max_queue": 0}, "runtime.max_queue is 0"),
        ({"executor": "cuda"}, "executor is 'cuda'; expected 'onnx_cpu' or 'tensorrt'"),
        ({"value_dtype": "int4"}, "value_dtype is 'int4'"),
        ({"top_k": 5}, "fixed when an engine is built"),
    ],
)
def test_settings_that_would_not_load(engine: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_repository(engine, tmp_path / "repo", settings=settings)
    assert not (tmp_path / "repo").exists()


def test_an_executor_that_the_engine_is_not_built_for(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no rank0\.engine; .*--backend tensorrt"):
        write_repository(engine, tmp_path / "repo", settings={"executor": "tensorrt"})
    assert not (tmp_path / "repo").exists()


def test_interpreters_that_lack_a_package(engine: Path, tmp_path: Path) -> None:
    failing = make_python(tmp_path / "python")
    failing.write_text("#!/bin/sh\necho ModuleNotFoundError: $2 >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="cannot import trtllm_shadowkv: ModuleNotFoundError: import trtllm_shadowkv"):
        write_repository(engine, tmp_path / "repo", python=str(failing))
    venv = make_venv(tmp_path / "venv")
    failing.replace(venv / "bin/python3")
    with pytest.raises(ConfigError, match="bin/python3 cannot import numpy"):
        write_repository(engine, tmp_path / "repo", venv=venv)
    assert not (tmp_path / "repo").exists()


def test_the_engine_directory_is_no_repository(engine: Path) -> None:
    with pytest.raises(ConfigError, match="is the engine's directory"):
        write_repository(engine, engine)


# --- other models, and other folders ------------------------------------------------------------------------------


def test_a_model_is_replaced(engine: Path, tmp_path: Path) -> None:
    write_repository(engine, tmp_path, venv=make_venv(tmp_path / "venv"), settings={"threads": 2})
    (tmp_path / "shadowkv/1/__pycache__").mkdir()
    (tmp_path / "shadowkv/1/__pycache__/model.pyc").write_text("")
    (tmp_path / "shadowkv/1/model.py").write_text("of an older version")
    model = write_repository(engine, tmp_path, settings={"window": 32})
    assert settings(model) == {"engine_dir": str(engine.resolve()), "window": 32}
    assert parameters(model) == {"python": sys.executable}
    assert (model / "1/model.py").read_bytes() == (OWN / "model.py").read_bytes()


def test_other_models_stay(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "other/1").mkdir(parents=True)
    (tmp_path / "other/1/model.onnx").write_bytes(b"x")
    (tmp_path / "other/config.pbtxt").write_text('backend: "onnxruntime"')
    first = write_repository(engine, tmp_path, model_name="a")
    before = files(tmp_path)
    write_repository(engine, tmp_path, model_name="b.2-x_Y", settings={"threads": 1})
    after = files(tmp_path)
    assert {name: data for name, data in after.items() if not name.startswith("b.2-x_Y/")} == before
    assert first.name == "a"


@pytest.mark.parametrize(
    "content",
    [
        ["notes.txt"],
        ["1/model.onnx", "config.pbtxt"],
        ["1/model.py", "config.pbtxt"],  # of another Python model
        ["config.pbtxt"],
        ["1/model.yaml", "1/weights.bin", "config.pbtxt"],
        ["1/model.py", "1/model.yaml", "2/model.py", "config.pbtxt"],
    ],
)
def test_a_folder_of_something_else_is_left_alone(engine: Path, tmp_path: Path, content: list[str]) -> None:
    for name in content:
        path = tmp_path / "shadowkv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    before = files(tmp_path)
    with pytest.raises(EngineError, match="shadowkv holds something else; expected a new folder"):
        write_repository(engine, tmp_path)
    assert files(tmp_path) == before


def test_a_file_in_the_way(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "shadowkv").write_text("precious")
    with pytest.raises(EngineError, match="holds something else"):
        write_repository(engine, tmp_path)
    with pytest.raises(EngineError, match="cannot be written"):
        write_repository(engine, tmp_path / "shadowkv")
    assert (tmp_path / "shadowkv").read_text() == "precious"


def test_what_a_full_disk_left_is_written_again(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((Path, "write_text"), (shutil, "copyfile"), (Path, "mkdir")):

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(EngineError, match=r"cannot be written: .*No space left"):
                write_repository(engine, tmp_path)
        write_repository(engine, tmp_path)
        shutil.rmtree(tmp_path / "shadowkv")
    (tmp_path / "shadowkv/1").mkdir(parents=True)
    write_repository(engine, tmp_path)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a\n", "é", "../x", 'a"'])
def test_names_of_models_that_are_refused(engine: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"the model's name is .*; expected letters, digits"):
        write_repository(engine, tmp_path / "repo", model_name=name)
    assert not (tmp_path / "repo").exists()


def test_a_name_that_no_file_can_have(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be written"):
        write_repository(engine, tmp_path, model_name="a" * 300)


def test_what_is_not_there_is_refused(engine: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    with pytest.raises(EngineError, match="nowhere"):
        write_repository(tmp_path / "nowhere", repo)
    with pytest.raises(EngineError):
        write_repository(tmp_path, repo)
    for python in (str(tmp_path / "nowhere"), "no-such-python", str(tmp_path), ""):
        with pytest.raises(ConfigError, match="no such interpreter"):
            write_repository(engine, repo, python=python)
    with pytest.raises(ConfigError, match=r"nowhere is no virtual environment; expected a folder with bin/python3"):
        write_repository(engine, repo, venv=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"settings: unknown setting 'treads' \(did you mean 'threads'\?\)"):
        write_repository(engine, repo, settings={"treads": 1})
    assert not repo.exists()


def test_a_path_that_is_no_utf8(engine: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ConfigError, match=r"the path '.*\\udcff/venv' is no UTF-8"):
        write_repository(engine, tmp_path / "repo", venv=make_venv(odd / "venv"))
    assert not (tmp_path / "repo").exists()


# --- the command --------------------------------------------------------------------------------------------------


def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    from trtllm_shadowkv.cli.main import main

    monkeypatch.setattr(sys, "argv", ["trtllm-shadowkv", "triton-repository", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_in_short(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "repo"
    code, out, err = command(monkeypatch, capfd, "--engine-dir", engine, "--output-dir", repo)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{repo}/shadowkv: config.pbtxt, 1/model.py, 1/model.yaml",
        f"tritonserver --model-repository={repo} --model-control-mode=explicit --load-model=shadowkv",
    ]
    assert settings(repo / "shadowkv") == {"engine_dir": str(engine.resolve())}


def test_the_command_with_every_option(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    venv, python = make_venv(tmp_path / "my venv"), make_python(tmp_path / "my python")
    options = {
        "model-name": "m",
        "executor": "onnx_cpu",
        "threads": 2,
        "max-batch-size": 3,
        "max-seq-len": 500,
        "max-stretch": 64,
        "max-queue": 9,
        "dense-limit": 128,
        "window": 32,
        "value-dtype": "fp8",
        "landmark-dtype": "auto",
    }
    code, out, err = command(
        monkeypatch,
        capfd,
        *(x for name, value in options.items() for x in (f"--{name}", value)),
        *("--engine-dir", engine, "--output-dir", tmp_path / "repo", "--venv", venv, "--python", python),
        *("--device-memory", "1.5", "--host-memory", 120),
    )
    assert (code, err) == (0, "")
    assert "--load-model=m" in out
    model = tmp_path / "repo/m"
    assert settings(model) == {
        "engine_dir": str(engine.resolve()),
        **{name.replace("-", "_"): value for name, value in options.items() if name != "model-name"},
        "device_memory": 1_500_000_000,
        "host_memory": 120_000_000_000,
    }
    assert parameters(model) == {"python": str(python), "EXECUTION_ENV_PATH": str(venv)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-name", "a b"], "the model's name is 'a b'"),
        (["--python", "no-such-python"], "there is no such interpreter"),
        (["--venv", "/nowhere"], "/nowhere is no virtual environment"),
        (["--device-memory", "-1"], "device_memory"),
        (["--engine-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_errors_of_the_command_are_one_line(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    code, out, err = command(monkeypatch, capfd, "--engine-dir", engine, "--output-dir", tmp_path / "repo", *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "repo").exists()
