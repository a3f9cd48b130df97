"""Segments of a server that was killed are removed, and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv.triton.shared_memory import SharedMemoryRecord, process_key

Server = subprocess.Popen[bytes]


@pytest.fixture
def segments() -> Iterator[list[Path]]:
    """Two files in the shared memory, whose names nobody else has."""
    paths = [Path(f"/dev/shm/shadowkv_test_{uuid.uuid4().hex}_{i}") for i in range(2)]
    for path in paths:
        path.write_bytes(b"x")
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


@pytest.fixture
def start() -> Iterator[Callable[[], Server]]:
    """Starts processes that stand for a server."""
    started: list[Server] = []

    def one() -> Server:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield one
    for server in started:
        server.kill()
        server.communicate()


def kill(server: Server) -> None:
    server.kill()
    server.wait()


def record(server: int, paths: list[Path], folder: Path) -> SharedMemoryRecord:
    return SharedMemoryRecord(server, [str(path) for path in paths], folder)


def there(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


def test_what_a_dead_server_left_is_removed(start: Callable[[], Server], segments: list[Path], tmp_path: Path) -> None:
    server = start()
    kept = record(server.pid, segments, tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {
        "server": process_key(server.pid),
        "segments": [str(path) for path in segments],
    }
    kept.sweep()
    assert there([file, *segments]) == [True] * 3
    kill(server)
    segments[1].unlink()  # one that is gone is no reason to keep the others
    kept.sweep()
    assert there([file, *segments]) == [False] * 3


def test_another_process_sweeps_too(start: Callable[[], Server], segments: list[Path], tmp_path: Path) -> None:
    dead, living = start(), start()
    record(dead.pid, segments[:1], tmp_path)
    record(living.pid, segments[1:], tmp_path)
    kill(dead)
    record(os.getpid(), [], tmp_path)  # what the next start does
    assert there(segments) == [False, True]
    assert sorted(json.loads(file.read_text())["server"] for file in tmp_path.iterdir()) == sorted(
        str(process_key(pid)) for pid in (living.pid, os.getpid())
    )


def test_a_zombie_is_dead(start: Callable[[], Server], segments: list[Path], tmp_path: Path) -> None:
    server = start()
    kept = record(server.pid, segments, tmp_path)
    os.kill(server.pid, signal.SIGKILL)  # nobody waits for it
    deadline = time.monotonic() + 60
    while Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert process_key(server.pid) is None
    kept.sweep()
    assert there(segments) == [False, False]


def test_a_number_that_another_process_has_now(segments: list[Path], tmp_path: Path) -> None:
    pid, _, started = str(process_key(os.getpid())).partition("-")
    (tmp_path / "old.json").write_text(
        json.dumps({"server": f"{pid}-{int(started) - 1}", "segments": [str(path) for path in segments]})
    )
    record(os.getpid(), [], tmp_path)
    assert there(segments) == [False, False]
    assert not (tmp_path / "old.json").exists()


def test_keys_of_processes(start: Callable[[], Server]) -> None:
    server = start()
    key = process_key(server.pid)
    assert key is not None
    assert key == process_key(server.pid)
    assert key.startswith(f"{server.pid}-")
    kill(server)
    assert process_key(server.pid) is None


def test_a_server_that_is_gone_already_has_no_record(
    start: Callable[[], Server], segments: list[Path], tmp_path: Path
) -> None:
    server = start()
    kill(server)
    kept = record(server.pid, segments, tmp_path)
    kept.forget()
    kept.sweep()
    assert list(tmp_path.iterdir()) == []


def test_only_files_in_shared_memory_are_removed(segments: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    inside = Path("/dev/shm") / f"shadowkv_test_{uuid.uuid4().hex}"
    inside.mkdir()
    try:
        (inside / "file").write_text("x")
        paths = [victim, inside / "file", f"/dev/shm/../..{victim}", "/dev/shm/..", "", ".", "/dev/shm", segments[0]]
        folder.mkdir()
        (folder / "a.json").write_text(json.dumps({"server": "1-0", "segments": [str(path) for path in paths]}))
        record(os.getpid(), [], folder)
        assert victim.read_text() == "precious"
        assert (inside / "file").exists()
    finally:
        (inside / "file").unlink(missing_ok=True)
        inside.rmdir()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "5",
        "[]",
        '"server"',
        "{}",
        '{"server": "x-1", "segments": []}',
        '{"server": null, "segments": []}',
        '{"server": "1-0"}',
        '{"server": "1-0", "segments": null}',
        '{"server": "1-0", "segments": 5}',
        '{"server": "1-0", "segments": [5, null, {}]}',
        '{"server": "1-0", "segments": ["/dev/shm/\\u0000"]}',
        '{"server": "1-0", "segments": {"/etc/passwd": 1}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_record_is_harmless(
    content: Any, start: Callable[[], Server], segments: list[Path], tmp_path: Path
) -> None:
    damaged = tmp_path / "0.json"
    damaged.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "folder.json").mkdir()
    server = start()
    kept = record(server.pid, segments, tmp_path)
    kill(server)
    kept.sweep()
    assert there(segments) == [False, False]


def test_forgetting(start: Callable[[], Server], segments: list[Path], tmp_path: Path) -> None:
    server = start()
    kept = record(server.pid, segments, tmp_path)
    kept.forget()
    kept.forget()
    assert list(tmp_path.iterdir()) == []
    kill(server)
    kept.sweep()
    assert there(segments) == [True, True]


def test_the_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record_folder = tmp_path / f"trtllm-shadowkv-{os.getuid()}"
    SharedMemoryRecord(os.getpid(), [])
    assert record_folder.stat().st_mode & 0o777 == 0o700
    assert len(list(record_folder.iterdir())) == 1


def test_a_folder_of_another_user_is_refused(
    segments: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stranger = os.getuid() + 1
    folder = tmp_path / f"trtllm-shadowkv-{stranger}"
    folder.mkdir()
    trap = folder / "a.json"
    trap.write_text(json.dumps({"server": "1-0", "segments": [str(path) for path in segments]}))
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(PermissionError, match="belongs to another user"):
        SharedMemoryRecord(os.getpid(), [])
    assert there(segments) == [True, True]
    assert list(folder.iterdir()) == [trap]
