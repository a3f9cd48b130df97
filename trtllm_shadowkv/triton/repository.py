"""Writes a model repository that Triton Inference Server can start from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from trtllm_shadowkv.config import RuntimeConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError, EngineError

_HERE = Path(__file__).parent
_WORD = re.compile(r"[\w/.+@,=:~%-]+")
"""A path that the server's python backend passes on unharmed: with a space it waits for its process for ever."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_repository(
    engine_dir: str | Path,
    output_dir: str | Path,
    *,
    model_name: str = "shadowkv",
    python: str | None = None,
    venv: str | Path | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Add a model to a repository, or replace one that this function wrote.

    Args:
        engine_dir: what the model serves; the repository names it by its absolute path.
        output_dir: the repository, new or with other models in it.
        model_name: folder of the model, and its name in requests.
        python: interpreter that this package is installed for; None: the one that runs.
        venv: virtual environment for the server's own part of the model, with NumPy older than 2; None: the server's
            interpreter has that.
        settings: more of model.yaml, see :func:`trtllm_shadowkv.triton.settings.load_settings`.

    Returns:
        The model's folder.

    Raises:
        EngineError: no engine, none for the executor, or a folder of something else in the way.
        ConfigError: a name that Triton does not take, an unknown setting, no such interpreter or environment.
    """
    from trtllm_shadowkv.llm_settings import merged_settings
    from trtllm_shadowkv.runtime.executors.opening import chosen
    from trtllm_shadowkv.triton.settings import OF_LLM, check_settings

    if not _NAME.fullmatch(model_name):
        raise ConfigError(f"the model's name is {model_name!r}", "letters, digits, '_', '-' and '.'")
    python = sys.executable if python is None else shutil.which(python)
    if python is None:
        raise ConfigError("there is no such interpreter", "a Python that trtllm-shadowkv is installed for")
    engine = EngineDirectory.open(engine_dir)
    content = {"engine_dir": str(engine.path.resolve()), **(settings or {})}
    check_settings(content, "settings")
    for_llm = {name: value for name, value in content.items() if name not in OF_LLM}
    merged_settings(engine, RuntimeConfig(), for_llm)
    chosen(content.get("executor"), engine)
    if Path(output_dir).resolve() == engine.path.resolve():
        raise ConfigError(f"{output_dir} is the engine's directory", "a directory for the repository")
    if python != sys.executable:
        _check(python, "trtllm_shadowkv")
    model = Path(output_dir) / model_name
    if not _WORD.fullmatch(os.path.abspath(model)):
        raise ConfigError(
            f"the path of the model is {os.path.abspath(model)!r}",
            "letters, digits and any of /._-+@,=:~%",
            "choose another output directory: a shell of Triton's takes spaces and others apart",
        )
    config = (_HERE / "config.pbtxt").read_text().replace('"python3"', _pbtxt(os.path.abspath(python)))
    if venv is not None:
        if not (Path(venv) / "bin/python3").exists():
            raise ConfigError(f"{venv} is no virtual environment", "a folder with bin/python3")
        _check(Path(venv) / "bin/python3", "numpy")
        path = _pbtxt(os.path.abspath(venv))
        config += f'parameters: {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: {path} }} }}\n'
    try:
        if not _replaceable(model):
            raise EngineError(f"{model} holds something else", "a new folder, or one that triton-repository wrote")
        (model / "1").mkdir(parents=True, exist_ok=True)
        (model / "1/model.yaml").write_text(_yaml(content), encoding="utf-8")  # first: it marks the folder as ours
        shutil.copyfile(_HERE / "model.py", model / "1/model.py")
        (model / "config.pbtxt").write_text(config, encoding="utf-8")
    except OSError as e:
        raise EngineError(f"{model} cannot be written: {e}") from e
    return model


def _check(python: str | Path, package: str) -> None:
    """Raise :class:`ConfigError` unless an interpreter can import a package."""
    try:
        done = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True, timeout=120)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = str(e)
    if reason:
        raise ConfigError(f"{python} cannot import {package}: {reason}", f"an interpreter with {package}")


def _replaceable(model: Path) -> bool:
    """Whether it is absent, empty, or was written here: a folder with 1 and config.pbtxt is what every model is."""
    if not model.exists():
        return True
    if not model.is_dir() or {p.name for p in model.iterdir()} - {"1", "config.pbtxt"}:
        return False
    inside = {p.name for p in model.glob("1/*")} - {"__pycache__"}
    return inside <= {"model.py", "model.yaml"} and ("model.yaml" in inside or not any(model.glob("*.pbtxt")))


def _pbtxt(text: str) -> str:
    """A string of protobuf's text format. Its bytes are UTF-8, and octal escapes are all that its parsers agree on."""
    try:
        data = text.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"the path {text!r} is no UTF-8", "a path that config.pbtxt can hold") from e
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in data) + '"'


def _yaml(content: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
