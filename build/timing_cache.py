"""The file of TensorRT's measurements, kept from one build to the next: what it wrote, behind a SHA-256 of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str, str], None]
"""Takes ``message`` and a text for the user."""


def read(path: Path, say: Say) -> bytes:
    """TensorRT's bytes behind their SHA-256; empty where there is no such file, or a damaged one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as e:
        say("message", f"the timing cache {path} cannot be read ({e.strerror}): this build times every tactic anew")
        return b""
    if hashlib.sha256(data[32:]).digest() == data[:32]:
        return data[32:]
    say("message", f"the timing cache {path} is damaged and ignored: this build times every tactic anew")
    return b""


def write(path: Path, content: bytes, say: Say) -> None:
    """Replace the file as a whole; another process may read or write it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as e:
        say("message", f"the timing cache {path} cannot be written ({e.strerror}): the next build will take as long")
