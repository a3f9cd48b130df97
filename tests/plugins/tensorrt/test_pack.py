"""scripts/pack_tensorrt.sh says what is wrong in one line, and leaves nothing behind. No network is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/pack_tensorrt.sh"
TOOLS = ("bash", "cat", "dirname", "flock", "grep", "ls", "mkdir", "mv", "rm", "sed", "sha1sum", "sha256sum", "wc")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with everything but mvn and curl."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"no {name} on this machine")
        (folder / name).symlink_to(found)
    return folder


def refused(tools: Path, *arguments: str | Path, **variables: str) -> str:
    """The last line of a run that fails."""
    environment = {"PATH": str(tools), "HOME": str(tools), "PYTHON": sys.executable, **variables}
    done = subprocess.run([tools / "bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "", done
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pack_tensorrt.sh: ")
    return line


def test_without_maven(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refused(tools, "--python", "3.12", out)
    assert "mvn is not on PATH" in line and "MAVEN_REPOSITORY" in line and "--jar" in line
    line = refused(tools, "--python", "3.12", out, MAVEN_REPOSITORY="file:///nowhere")
    assert "neither mvn nor curl is on PATH" in line
    assert sorted(os.listdir(out)) == ["lib", "wheels"] and os.listdir(out / "lib") == os.listdir(out / "wheels") == []


def test_a_curl_that_fails(tools: Path, tmp_path: Path) -> None:
    (tools / "curl").symlink_to(tools / "grep")  # knows none of curl's options
    line = refused(tools, "--python", "3.12", tmp_path / "out", MAVEN_REPOSITORY="file:///nowhere/")
    assert "curl could not fetch file:///nowhere/org/bytedeco/tensorrt/" in line
    assert not (tmp_path / "out/.new").exists()


def test_damaged_archives(tools: Path, tmp_path: Path) -> None:
    out, jar = tmp_path / "out", tmp_path / "a.jar"
    jar.write_bytes(b"x" * 1000)
    assert f"{jar} has 1000 bytes; expected 1090347946" in refused(tools, "--python", "3.12", "--jar", jar, out)
    assert not (out / ".new").exists() and os.listdir(out / "lib") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wat"], "unknown option --wat; expected"),
        (["one", "two"], "two folders, one and two; expected one"),
        (["--jar"], "--jar stands without a value"),
        (["--jar", "/nowhere/x.jar"], "/nowhere/x.jar, which --jar names, is no file"),
        (["--python", "3.13"], "for Python 3.8 to 3.12, not 3.13"),
    ],
)
def test_arguments(tools: Path, arguments: list[str], words: str) -> None:
    if "--python" not in arguments:
        arguments = ["--python", "3.12", *arguments]
    assert words in refused(tools, *arguments)


def test_no_python(tools: Path) -> None:
    assert "/nowhere/python is missing or older" in refused(tools, PYTHON="/nowhere/python")
