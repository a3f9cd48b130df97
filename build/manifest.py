"""The manifest of an engine directory: what belongs to it, so that a damaged or foreign one never loads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trtllm_shadowkv import __version__, names
from trtllm_shadowkv.errors import EngineError

SCHEMA = 1
_END_BYTES = 1 << 16
_SMALL_BYTES = 8 << 20  # files up to this size are hashed whole whenever an engine is opened


def _digest(path: Path, *, whole: bool) -> str:
    """SHA-256 of a file, or of its size and its first and last 64 KiB."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        if whole:
            while block := file.read(1 << 22):
                sha.update(block)
        else:
            size = path.stat().st_size
            sha.update(str(size).encode() + file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            sha.update(file.read(_END_BYTES))
    return sha.hexdigest()


def describe(
    directory: Path,
    *,
    backend: str = "onnx",
    tensorrt: str | None = None,
    gpu_architecture: str | None = None,
    plugin_library: str | None = None,
) -> dict[str, Any]:
    """Manifest of the files now in ``directory`` (the manifest itself left out).

    Args:
        backend: what compiled the engine file; ``onnx``: there is none.
        tensorrt: version of TensorRT or TensorRT-RTX.
        gpu_architecture: compute capability it was compiled for, ``9.0``, or several, ``8.0+12.0``.
        plugin_library: version of the plugin library.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        if path.name != names.MANIFEST_FILE:
            files[path.name] = {
                "bytes": path.stat().st_size,
                "sha256": _digest(path, whole=True),
                "ends_sha256": _digest(path, whole=False),
            }
    return {
        "schema": SCHEMA,
        "package_version": __version__,
        "plugin_version": names.PLUGIN_VERSION,
        "plugin_library_version": plugin_library,
        "backend": backend,
        "tensorrt_version": tensorrt,
        "gpu_architecture": gpu_architecture,
        "files": files,
    }


def write(directory: Path, **kinds: Any) -> None:
    """Describe ``directory`` in its manifest file; ``kinds`` as :func:`describe`."""
    text = json.dumps(describe(directory, **kinds), indent=2)
    (directory / names.MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def owned(directory: Path) -> frozenset[str]:
    """Names of the files that a directory's manifest, of whatever schema, calls its own; none without a manifest."""
    try:
        data = json.loads((directory / names.MANIFEST_FILE).read_text(encoding="utf-8"))
        return frozenset((names.MANIFEST_FILE, *data["files"])) if "schema" in data else frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def read(directory: Path) -> dict[str, Any]:
    """The manifest of an engine directory.

    Raises:
        EngineError: no engine directory, no JSON, or another schema.
    """
    path = directory / names.MANIFEST_FILE
    rebuild = "build the engine again: trtllm-shadowkv build"
    if not directory.is_dir():
        raise EngineError(f"{directory} is no directory", "an engine directory written by trtllm-shadowkv build")
    if not path.is_file():
        raise EngineError(f"{directory} has no {names.MANIFEST_FILE}", "an engine directory", rebuild)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise EngineError(f"{path} is no JSON: {e}", "a manifest", rebuild) from e
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        raise EngineError(f"{directory} has schema {schema!r}", f"schema {SCHEMA} of this version", rebuild)
    if not _is_sound(manifest.get("files")):
        raise EngineError(f"{path} lists no sound set of files", "a manifest", rebuild)
    if manifest.get("plugin_version") != names.PLUGIN_VERSION:
        found = manifest.get("plugin_version")
        raise EngineError(f"{directory} was built for plugin version {found!r}", names.PLUGIN_VERSION, rebuild)
    return manifest


def _is_sound(files: Any) -> bool:
    """Plain names, each with a size and its hashes."""
    kinds = {"bytes": int, "sha256": str, "ends_sha256": str}
    return isinstance(files, dict) and all(
        "/" not in name
        and name not in ("", ".", "..")
        and isinstance(entry, dict)
        and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
        for name, entry in files.items()
    )


def check(directory: Path, *, whole: bool) -> dict[str, Any]:
    """Compare every listed file with the manifest, and return the manifest.

    Args:
        whole: hash every byte (``verify``). Otherwise files over 8 MiB are judged by size and both ends, which is
            what loading can afford.

    Raises:
        EngineError: a file is missing, of another size, altered, or cannot be read.
    """
    try:
        manifest = read(directory)
        for name, listed in manifest["files"].items():
            _check_file(directory / name, listed, whole=whole)
    except OSError as e:
        raise EngineError(f"{directory} cannot be read: {e}", "an engine directory", "check its permissions") from e
    return manifest


def _check_file(path: Path, listed: dict[str, Any], *, whole: bool) -> None:
    if not path.is_file():
        raise EngineError(f"{path.parent} lacks {path.name}", "every file of its manifest", "build the engine again")
    size = path.stat().st_size
    if size != listed["bytes"]:
        raise EngineError(f"{path} has {size} bytes", str(listed["bytes"]), "build the engine again")
    full = whole or size <= _SMALL_BYTES
    if _digest(path, whole=full) != listed["sha256" if full else "ends_sha256"]:
        raise EngineError(f"{path} was altered after the build", "the bytes its manifest names", "build it again")
