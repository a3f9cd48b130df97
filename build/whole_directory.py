"""A directory that is written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Container, Iterator
from pathlib import Path

from trtllm_shadowkv.errors import EngineError


def real_path(path: str | Path) -> Path:
    """Where a directory is, or will be; a link to it stays what it is when the directory is replaced.

    Raises:
        EngineError: no path at all.
    """
    try:
        return Path(os.path.realpath(path))
    except (TypeError, ValueError) as e:
        raise EngineError(f"{path!r} is no path: {e}", "the path of a directory") from e


def check_output(output: Path, owned: Container[str], kind: str) -> None:
    """Refuse to replace what cannot be renamed, and what holds anything but ``owned`` files: all of it is deleted.

    Args:
        kind: ``an engine`` or ``a checkpoint``: what it may be, in errors.

    Raises:
        EngineError: another directory, or one that cannot be read.
    """
    try:
        held = sorted(os.listdir(output))
    except FileNotFoundError:
        return
    except OSError as e:
        raise EngineError(f"{output} is no directory to write: {e}", f"a new one, an empty one or {kind}") from e
    for what, it_is in (("the working directory", _is_here(output)), ("a mount point", os.path.ismount(output))):
        if it_is:
            raise EngineError(f"{output} is {what}", "a directory that can be replaced", "choose one below it")
    foreign = [name for name in held if name not in owned]
    if foreign:
        raise EngineError(
            f"{output} holds {foreign[0]!r}, which belongs to no {kind.split()[-1]}",
            f"a new or empty directory, or {kind} to replace",
            "move it away: the whole directory is replaced",
        )


@contextlib.contextmanager
def whole_directory(output: Path, needed: int) -> Iterator[Path]:
    """A hidden sibling that takes the output's name when the block ends, and disappears when it fails.

    One process at a time may write an output. What a killed one left is removed, or undone, by the next.

    Args:
        output: path without symbolic links; if it exists it is replaced.
        needed: bytes that must be free.

    Raises:
        EngineError: it cannot be written, or another process is writing it.
    """
    partial, replaced = _sibling(output, "partial"), _sibling(output, "replaced")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _lock(output):
            _tidy(output)
            try:
                free = shutil.disk_usage(output.parent).free
                if free < needed:
                    raise EngineError(f"{output.parent} has {free:,} bytes free", f"{needed:,} for this engine")
                partial.mkdir()
                yield partial
                if output.exists():
                    output.rename(replaced)
                partial.rename(output)
            finally:
                _tidy(output)
    except OSError as e:
        raise EngineError(f"writing {output} failed: {e}", todo="nothing was changed; correct it and try again") from e


def _sibling(output: Path, what: str) -> Path:
    return output.parent / f".{output.name}.{what}"


def _tidy(output: Path) -> None:
    """Bring everything beside the output to rest; a kill between the two renames is undone."""
    replaced = _sibling(output, "replaced")
    if replaced.exists() and not output.exists():
        replaced.rename(output)
    for directory in (_sibling(output, "partial"), replaced):
        with contextlib.suppress(OSError):
            directory.chmod(0o700)  # nothing can be removed from a read-only directory
            shutil.rmtree(directory)


@contextlib.contextmanager
def _lock(output: Path) -> Iterator[None]:
    """Held by one process, until it ends in whatever way.

    Raises:
        EngineError: another process holds it.
    """
    path = _sibling(output, "lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise EngineError(f"another process is writing {output}", todo="wait until it has ended") from None
        except BaseException:
            os.close(descriptor)
            raise
        # The holder before us removes the file: a lock on what is no longer there is worth nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_here(directory: Path) -> bool:
    try:
        return directory.samefile(os.curdir)
    except FileNotFoundError:  # the working directory was removed
        return False
