"""``model.yaml``: which engine a Triton model serves, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_shadowkv.config import RuntimeConfig, ShadowKVConfig, read_yaml
from trtllm_shadowkv.errors import ConfigError, nearest

OF_LLM = ("engine_dir", "tokenizer", "executor")
"""Those that are no fields of RuntimeConfig or ShadowKVConfig."""


def load_settings(path: Path, parameters: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Read the settings of a Triton model.

    Args:
        path: of the YAML file; without one all comes from the parameters.
        parameters: of config.pbtxt, as text; they win over the file.

    Returns:
        the engine's directory (a relative one is relative to the file's folder), and keywords of
        :class:`trtllm_shadowkv.LLM`.

    Raises:
        ConfigError: no engine_dir, an unknown setting, or no YAML.
    """
    data = read_yaml(path) if path.exists() else {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}", "a mapping of settings")
    settings = {**data, **{name: _value(name, text) for name, text in parameters.items() if _ours(name)}}
    check_settings(settings, str(path))
    engine_dir = settings.pop("engine_dir")
    if settings.get("tokenizer") is not None:
        settings["tokenizer"] = str(path.parent / str(settings["tokenizer"]))
    return str(path.parent / engine_dir), {k: v for k, v in settings.items() if v is not None}


def check_settings(settings: dict[str, Any], where: str) -> None:
    """Raise :class:`ConfigError` for a setting that does not exist, and without an engine_dir."""
    known = (*OF_LLM, *(n for n in RuntimeConfig.names() if n != "shadowkv"), *ShadowKVConfig.names())
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown setting {name!r}{nearest(str(name), known)}", f"one of {', '.join(known)}"
            )
    engine_dir = settings.get("engine_dir")
    if not isinstance(engine_dir, str) or not engine_dir:
        raise ConfigError(f"{where}: engine_dir is {engine_dir!r}", "the path of an engine directory")


def _value(name: str, text: str) -> Any:
    """A parameter's text as YAML would read it; paths and names stay as they are."""
    import yaml

    if name in OF_LLM:
        return text or None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"the parameter {name} is {text!r}", "a value as in YAML") from e


def _ours(name: str) -> bool:
    """Triton's own parameters are in capitals."""
    return not name.isupper()
