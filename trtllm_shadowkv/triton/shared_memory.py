"""Shared memory that Triton's python backend leaves behind when its server is killed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def process_key(pid: int) -> str | None:
    """A name that no other process will have: its number and when it started. None: there is no such process."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    state, started = after_name.split()[0], after_name.split()[19]
    return None if state == "Z" else f"{pid}-{started}"  # a zombie holds nothing


class SharedMemoryRecord:
    """Remembers a server's segments on disk, so that they can be removed once it is gone, by whoever comes then.

    Args:
        server: process number of the server.
        segments: files in /dev/shm that it made.
        folder: where records are; None: one of this user in the temporary folder.
    """

    def __init__(self, server: int, segments: Sequence[str], folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"trtllm-shadowkv-{os.getuid()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():  # another user made it, who may name any file in it
            raise PermissionError(f"{self._folder} belongs to another user")
        self.sweep()
        key = process_key(server)
        self._path = self._folder / f"{key}-{os.getpid()}.json"
        if key is not None:
            self._path.write_text(json.dumps({"server": key, "segments": list(segments)}))

    def forget(self) -> None:
        """The server removes its segments itself."""
        self._path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the segments of all servers that are gone, and their records."""
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text())
                server = str(record["server"])
                if process_key(int(server.partition("-")[0])) == server:
                    continue
                for segment in record["segments"]:
                    if Path(segment).parent == Path("/dev/shm"):
                        Path(segment).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
