"""Opening engine directories: whole ones load wherever they lie, anything else is one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny
from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory, engine_config
from trtllm_shadowkv.errors import EngineError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    parent = tmp_path_factory.mktemp("engine_directory")
    model = write_tiny(parent / "model", rope_scaling={"rope_type": "linear", "factor": 2.0})
    config = BuildConfig(dtype="float16", max_seq_len=500, shadowkv=ShadowKVConfig(window=128, dense_limit=200))
    return build_engine(model, parent / "engine", config)


@pytest.fixture
def engine(built: EngineDirectory, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(built.path, tmp_path / "engine"))


def test_what_was_built_is_what_is_read(built: EngineDirectory) -> None:
    assert EngineDirectory.open(built.path) == built
    assert EngineDirectory.open(str(built.path), whole=True) == built
    data = json.loads((built.path / names.CONFIG_FILE).read_text())
    assert data == json.loads(json.dumps(engine_config(built.model, built.build)))
    assert (built.max_seq_len, built.build.shadowkv.rank) == (500, 32)
    assert built.has_onnx
    assert not built.has_engine


def test_a_copy_loads_from_anywhere(engine: Path, built: EngineDirectory, tmp_path: Path) -> None:
    moved = engine.rename(tmp_path / "größe 模型")
    assert EngineDirectory.open(moved).model == built.model
    (tmp_path / "link").symlink_to(moved)
    assert EngineDirectory.open(tmp_path / "link").model == built.model
    assert EngineDirectory.open(os.path.relpath(moved)).model == built.model


def test_files_may_be_links_or_have_company(engine: Path, built: EngineDirectory, tmp_path: Path) -> None:
    """Download caches link to blobs, backups share them, and people put notes beside them."""
    (tmp_path / "blobs").mkdir()
    for i, name in enumerate(built.files):
        (engine / name).rename(tmp_path / "blobs" / str(i))
        (engine / name).symlink_to(f"../blobs/{i}")
    (engine / "notes.txt").write_text("mine")
    (engine / "folder").mkdir()
    os.link(tmp_path / "blobs" / "0", tmp_path / "second name")
    assert EngineDirectory.open(engine, whole=True).files == built.files
    from trtllm_shadowkv.build.builder import verify_engine

    verify_engine(engine)


def test_a_read_only_directory_loads(engine: Path, built: EngineDirectory) -> None:
    for name in (*built.files, names.MANIFEST_FILE):
        (engine / name).chmod(0o444)
    engine.chmod(0o555)
    try:
        assert EngineDirectory.open(engine, whole=True).model == built.model
    finally:
        engine.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_file_without_the_right_to_read_it_is_one_error(engine: Path, tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from trtllm_shadowkv.engine_directory import EngineDirectory
        from trtllm_shadowkv.errors import EngineError
        os.chdir(sys.argv[1])  # the folders above stay closed to the others
        os.setgid(65534); os.setuid(65534)
        try:
            EngineDirectory.open('engine')
        except EngineError as e:
            print(e)
    """
    tmp_path.chmod(0o755)
    for path, mode in ((engine / names.ONNX_FILE, 0o000), (engine / names.MANIFEST_FILE, 0o000), (engine, 0o600)):
        path.chmod(mode)
        result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
        assert "cannot be read: [Errno 13]" in result.stdout, result.stderr
        path.chmod(0o755)


@pytest.mark.parametrize("value", [None, 5, b"bytes", ["list"], 1.5])
def test_a_path_of_another_type_is_one_error(value: Any) -> None:
    with pytest.raises(EngineError, match="expected a path"):
        EngineDirectory.open(value)


@pytest.mark.parametrize("name", [names.CONFIG_FILE, names.ONNX_FILE, names.WEIGHTS_FILE])
def test_an_altered_or_missing_file_is_refused(engine: Path, name: str) -> None:
    data = bytearray((engine / name).read_bytes())
    data[len(data) // 3] ^= 1
    (engine / name).write_bytes(data)
    with pytest.raises(EngineError, match=f"{name} was altered after the build"):
        EngineDirectory.open(engine)
    (engine / name).write_bytes(data[:-1])
    with pytest.raises(EngineError, match=f"{name} has {len(data) - 1} bytes; expected {len(data)}"):
        EngineDirectory.open(engine)
    (engine / name).unlink()
    with pytest.raises(EngineError, match=f"lacks {name}"):
        EngineDirectory.open(engine)


def test_an_engine_without_a_configuration_is_refused(engine: Path) -> None:
    (engine / names.CONFIG_FILE).unlink()
    manifest.write(engine)
    with pytest.raises(EngineError, match=r"has no config\.json"):
        EngineDirectory.open(engine)


# --- a configuration that the manifest vouches for, and that is wrong all the same --------------------------------


def leaves(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*path, key))


def with_value(data: Any, path: tuple[str, ...], value: Any) -> Any:
    """``data`` with one value changed, or removed where ``value`` is ..."""
    key, *rest = path
    changed = dict(data)
    if rest:
        changed[key] = with_value(data[key], tuple(rest), value)
    elif value is ...:
        del changed[key]
    else:
        changed[key] = value
    return changed


def test_a_wrong_value_anywhere_in_the_configuration_is_an_engine_error_or_harmless(engine: Path) -> None:
    path = engine / names.CONFIG_FILE
    original = json.loads(path.read_text())
    refused = 0
    for place in leaves(original):
        value: Any
        for value in (..., None, True, -1, 0, 10**30, 1.5, "x", "", [], {}, [[]], {"a": 1}):
            path.write_text(json.dumps(with_value(original, place, value)))
            manifest.write(engine)
            try:
                EngineDirectory.open(engine)
            except EngineError as e:
                refused += 1
                assert "build the engine again" in str(e), (place, value)
    assert refused > 200


@pytest.mark.parametrize("text", ["", "null", "[]", "5", '"x"', "{}", "[" * 100_000, "\x00"])
def test_a_configuration_that_is_none_is_an_engine_error(engine: Path, text: str) -> None:
    (engine / names.CONFIG_FILE).write_text(text)
    manifest.write(engine)
    with pytest.raises(EngineError, match="build the engine again"):
        EngineDirectory.open(engine)
