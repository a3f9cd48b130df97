"""What a manifest notices, and what it leaves to ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.errors import EngineError

LARGE = 9 << 20  # over the size up to which every file is hashed as a whole


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "small").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty").write_bytes(b"")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGE)
        file.write(b"begin")
        file.seek(LARGE - 3)
        file.write(b"end")
    manifest.write(tmp_path)
    return tmp_path


def poke(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")


def test_an_untouched_directory_passes(directory: Path) -> None:
    for whole in (False, True):
        listed = manifest.check(directory, whole=whole)["files"]
        assert {name: entry["bytes"] for name, entry in listed.items()} == {"small": 2560, "empty": 0, "large": LARGE}


@pytest.mark.parametrize(("name", "offset"), [("small", 0), ("small", 1280), ("large", 0), ("large", LARGE - 1)])
def test_a_changed_byte_is_found_when_an_engine_is_loaded(directory: Path, name: str, offset: int) -> None:
    poke(directory / name, offset)
    with pytest.raises(EngineError, match=f"{name} was altered"):
        manifest.check(directory, whole=False)


def test_a_changed_byte_in_the_middle_of_a_large_file_is_found_by_verify(directory: Path) -> None:
    poke(directory / "large", LARGE // 2)
    manifest.check(directory, whole=False)
    with pytest.raises(EngineError, match="large was altered"):
        manifest.check(directory, whole=True)


def test_a_missing_file_and_another_size_are_named(directory: Path) -> None:
    (directory / "empty").write_bytes(b"x")
    with pytest.raises(EngineError, match="empty has 1 bytes; expected 0"):
        manifest.check(directory, whole=False)
    (directory / "empty").unlink()
    with pytest.raises(EngineError, match="lacks empty"):
        manifest.check(directory, whole=False)
    (directory / "empty").mkdir()
    with pytest.raises(EngineError, match="lacks empty"):
        manifest.check(directory, whole=False)


def test_files_beside_the_listed_ones_do_no_harm(directory: Path) -> None:
    (directory / "notes").write_text("mine")
    manifest.check(directory, whole=True)
    assert "notes" not in manifest.owned(directory)
    assert manifest.owned(directory) == {"small", "empty", "large", names.MANIFEST_FILE}


ENTRY = {"bytes": 0, "sha256": "", "ends_sha256": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("null", "schema None"),
        ("[]", "schema None"),
        ('"schema"', "schema None"),
        ({}, "schema None"),
        ({"schema": 0}, "schema 0; expected schema 1"),
        ({"schema": 2, "parts": {}}, "schema 2; expected schema 1"),
        ({"schema": "1", "files": {}}, "schema '1'"),
        ({"schema": 1}, "no sound set of files"),
        ({"schema": 1, "files": []}, "no sound set of files"),
        ({"schema": 1, "files": {"a": None}}, "no sound set of files"),
        ({"schema": 1, "files": {"a": {**ENTRY, "bytes": "0"}}}, "no sound set of files"),
        ({"schema": 1, "files": {"a": {"bytes": 0}}}, "no sound set of files"),
        *[
            ({"schema": 1, "files": {name: ENTRY}}, "no sound set of files")
            for name in ("", ".", "..", "../a", "/etc/passwd")
        ],
        ({"schema": 1, "files": {}}, "plugin version None"),
        ({"schema": 1, "files": {}, "plugin_version": "2"}, "plugin version '2'; expected 1"),
        ({"schema": 1, "files": {"a\0b": ENTRY}, "plugin_version": "1"}, "lacks a"),
    ],
)
def test_a_manifest_of_another_kind_is_one_clear_error(tmp_path: Path, content: Any, message: str) -> None:
    data = json.dumps(content) if isinstance(content, dict) else content
    (tmp_path / names.MANIFEST_FILE).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(EngineError, match=message):
        manifest.check(tmp_path, whole=False)


def test_a_directory_that_is_none_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nowhere", Path("a\0b")):
        with pytest.raises(EngineError, match="is no directory"):
            manifest.check(path, whole=False)
    with pytest.raises(EngineError, match=r"has no manifest\.json"):
        manifest.check(tmp_path, whole=False)
    with pytest.raises(EngineError, match="cannot be read"):
        manifest.check(tmp_path / ("x" * 300), whole=False)
