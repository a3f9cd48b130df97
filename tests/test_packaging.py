"""The package installs from a checkout, an sdist and an archive, with and without a compiler, or says why not.

Everything is built for real, from copies of this checkout and into environments made here. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import trtllm_shadowkv
from tests.bare_environment import OFFLINE, PIP, PYPROJECT, SITE_PACKAGES, Environment, copy_checkout, new_environment
from trtllm_shadowkv import names
from trtllm_shadowkv.library import ENVIRONMENT, FILE

NO_LINKS = re.compile(r"^ *trtllm_shadowkv/build is no folder: .*made without symbolic links; use .*$", re.MULTILINE)


def modules(checkout: Path) -> list[str]:
    """Names of all modules of the package, those behind the links included."""
    files = [path for path in checkout.glob("trtllm_shadowkv/**/*.py") if path.is_file()]
    for folder in ("build", "runtime"):
        behind = list((checkout / folder).glob("**/*.py"))
        assert behind
        files += [checkout / "trtllm_shadowkv" / path.relative_to(checkout) for path in behind]
    return sorted({path.relative_to(checkout).as_posix() for path in files})


def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
    assert len(members) == len(set(members))
    return sorted(members)


def one(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, found
    return found[0]


IMPORTS = """
import importlib, importlib.util, json
from pathlib import Path
found = {name: importlib.import_module(name).__file__ for name in ("trtllm_shadowkv", "trtllm_shadowkv.names")}
for folder in ("build", "runtime"):
    package = importlib.import_module("trtllm_shadowkv." + folder)
    for path in package.__path__:
        for file in Path(path).glob("*.py"):
            name = f"trtllm_shadowkv.{folder}.{file.stem}"
            found[name] = importlib.util.find_spec(name).origin
found["build"] = str(importlib.util.find_spec("build"))
found["runtime"] = str(importlib.util.find_spec("runtime"))
print(json.dumps(found))
"""


def check_imports(done: subprocess.CompletedProcess[str], root: Path, checkout: Path) -> dict[str, str]:
    """The names that IMPORTS printed come from under `root`, and all modules of build/ and runtime/ are among them."""
    found: dict[str, str] = json.loads(done.stdout)
    for folder in ("build", "runtime"):
        expected = {f"trtllm_shadowkv.{folder}.{path.stem}" for path in (checkout / folder).glob("*.py")}
        assert expected
        assert expected <= set(found)
    for name, file in found.items():
        if name.startswith("trtllm_shadowkv"):
            assert Path(file).resolve().is_relative_to(root.resolve()), (name, file)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return new_environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def wheel(bare: Environment, checkout: Path) -> Path:
    """A wheel made where there is no compiler and no CUDA toolkit."""
    bare.pip("wheel", *OFFLINE, "--wheel-dir", checkout / "dist", ".", cwd=checkout)
    return one(checkout / "dist", "*.whl")


@pytest.fixture(scope="module")
def repository(bare: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a user whose own ignore file names the folders that hold our source."""
    folder = copy_checkout(tmp_path_factory.mktemp("git") / "repository")
    home = Path(bare.variables["HOME"])
    (home / "ignore").write_text("build/\nruntime/\nbuild\nruntime\n")
    (home / ".gitconfig").write_text(
        f"[core]\n\texcludesFile = {home / 'ignore'}\n[user]\n\tname = Test\n\temail = test@example.invalid\n"
    )
    bare.run("git", "init", "--quiet", cwd=folder)
    bare.run("git", "add", "--all", cwd=folder)
    bare.run("git", "commit", "--quiet", "--message=test", cwd=folder)
    return folder


def test_version_is_the_same_everywhere(wheel: Path) -> None:
    version = PYPROJECT["project"]["version"]
    assert trtllm_shadowkv.__version__ == version
    assert wheel.name.startswith(f"trtllm_shadowkv-{version}-py3-none-linux_")


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
    files = [name for name in wheel_files(wheel) if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in files} == {"trtllm_shadowkv"}
    assert [name for name in files if name.endswith(".py")] == modules(checkout)
    assert "trtllm_shadowkv/py.typed" in files
    assert FILE not in "".join(files)  # there was no compiler


def test_installed_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path)
    environment.pip("install", *OFFLINE, wheel, cwd=tmp_path)
    done = environment.run(environment.python, "-c", IMPORTS, cwd=tmp_path)
    found = check_imports(done, environment.site_packages, checkout)
    assert found["build"] == found["runtime"] == "None"
    # What the base dependencies do not bring is borrowed from this environment.
    command = environment.folder / "bin/trtllm-shadowkv"
    helped = environment.run(command, "--help", cwd=tmp_path, extra={"PYTHONPATH": str(SITE_PACKAGES)})
    assert "trtllm-shadowkv" in helped.stdout
    code = "import trtllm_shadowkv.library as l; print(l.find(), flush=True); l.load()"
    absent = environment.run(environment.python, "-c", code, cwd=tmp_path, ok=False)
    assert absent.stdout.startswith("None\n")
    assert "TRTLLM_SHADOWKV_CUDA=ON pip install" in absent.stdout.splitlines()[-1]


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path)
    folder = copy_checkout(tmp_path / "checkout")
    environment.pip("install", *OFFLINE, "--editable", ".", cwd=folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # The checkout is on the path, so its build/ and runtime/ must lose against packages of these names.
    for name in ("build", "runtime"):
        (environment.site_packages / name).mkdir()
        (environment.site_packages / name / "__init__.py").touch()
    found = check_imports(environment.run(environment.python, "-c", IMPORTS, cwd=elsewhere), folder, checkout)
    for name in ("build", "runtime"):
        assert str(environment.site_packages / name) in found[name]
    # An edit and a new file are seen at once, behind the links too.
    with (folder / "trtllm_shadowkv/names.py").open("a") as file:
        file.write('\nADDED = "added"\n')
    (folder / "build/added.py").write_text("from trtllm_shadowkv.names import ADDED\n")
    code = "from trtllm_shadowkv.build.added import ADDED; print(ADDED)"
    assert environment.run(environment.python, "-c", code, cwd=elsewhere).stdout == "added\n"


def test_in_place_without_installing(bare: Environment, checkout: Path) -> None:
    check_imports(bare.run(bare.python, "-S", "-c", IMPORTS, cwd=checkout), checkout, checkout)


def test_sdist_keeps_the_links_and_gives_the_same_wheel(
    bare: Environment, checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    code = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    bare.run(bare.python, "-c", code, tmp_path, cwd=checkout)
    sdist = one(tmp_path, "*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    for folder in ("build", "runtime"):
        link = members[f"trtllm_shadowkv/{folder}"]
        assert link.issym() and link.linkname == f"../{folder}"
    assert not [name for name in members if re.match(r"out|dist|\.|.*\.so$", name)]
    bare.pip("wheel", *OFFLINE, "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    assert wheel_files(one(tmp_path, "*.whl")) == wheel_files(wheel)


def test_global_ignore_file_drops_nothing(
    bare: Environment, repository: Path, checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    tracked = bare.run("git", "ls-files", cwd=repository).stdout.splitlines()
    assert {"trtllm_shadowkv/build", "trtllm_shadowkv/runtime"} <= set(tracked)
    for folder in ("build", "runtime"):
        files = {path.relative_to(checkout).as_posix() for path in (checkout / folder).glob("**/*.py")}
        assert files <= set(tracked)
    bare.pip("wheel", *OFFLINE, "--wheel-dir", tmp_path, ".", cwd=repository)
    assert wheel_files(one(tmp_path, "*.whl")) == wheel_files(wheel)


def test_archive_unpacked_without_links_stops_with_one_line(
    bare: Environment, repository: Path, tmp_path: Path
) -> None:
    bare.run("git", "archive", "--format=zip", f"--output={tmp_path / 'a.zip'}", "HEAD", cwd=repository)
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(folder)
    assert (folder / "trtllm_shadowkv/build").is_file()  # zipfile writes a link's target as text
    assert len(NO_LINKS.findall(bare.pip("install", *OFFLINE, ".", cwd=folder, ok=False))) == 1
    made = bare.run("make", "--no-print-directory", "check", cwd=folder, ok=False).stdout
    assert len(NO_LINKS.findall(made)) == 1


def test_archive_unpacked_with_links_works(bare: Environment, repository: Path, tmp_path: Path) -> None:
    bare.run("git", "archive", "--format=tar", f"--output={tmp_path / 'a.tar'}", "HEAD", cwd=repository)
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    bare.run("cmake", "-G", "Ninja", "-S", "unpacked", "-B", "configured", cwd=tmp_path)
    assert (tmp_path / "configured/generated/names.h").read_text() == names.cpp_header()


def test_clone_without_links_stops_with_one_line(bare: Environment, repository: Path, tmp_path: Path) -> None:
    bare.run("git", "clone", "--quiet", "-c", "core.symlinks=false", repository, "clone", cwd=tmp_path)
    configured = bare.run("cmake", "-S", "clone", "-B", "configured", cwd=tmp_path, ok=False).stdout
    assert len(NO_LINKS.findall(configured)) == 1


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"TRTLLM_SHADOWKV_CUDA": "maybe"}, "TRTLLM_SHADOWKV_CUDA is 'maybe'; expected ON, OFF or nothing"),
        ({"PIP_CUDA_ROOT": "/nonexistent"}, "PIP_CUDA_ROOT is /nonexistent, which has no bin/nvcc"),
        ({"CUDA_HOME": "/nonexistent"}, "CUDA_HOME is /nonexistent, which has no bin/nvcc"),
        ({"CUDACXX": "/nonexistent/nvcc"}, "CUDACXX is /nonexistent/nvcc, which is no program"),
        ({"TRTLLM_SHADOWKV_CUDA": "ON"}, "TRTLLM_SHADOWKV_CUDA is ON, but no C"),  # no CUDA or no C++ compiler
    ],
)
def test_wrong_settings_stop_with_one_line(
    bare: Environment, checkout: Path, tmp_path: Path, variables: dict[str, str], line: str
) -> None:
    command = ("cmake", "-G", "Ninja", "-S", checkout, "-B", "configured", f"-DPython_EXECUTABLE={bare.python}")
    done = bare.run(*command, cwd=tmp_path, ok=False, extra=variables)
    assert [text for text in done.stdout.splitlines() if line in text]


def test_half_a_toolkit_is_named(bare: Environment, checkout: Path, tmp_path: Path) -> None:
    root = tmp_path / "nvidia/cu13"
    (root / "bin").mkdir(parents=True)
    (root / "bin/nvcc").touch(mode=0o755)
    command = ("cmake", "-G", "Ninja", "-S", checkout, "-B", "configured", f"-DPython_EXECUTABLE={bare.python}")
    variables = {"PIP_CUDA_ROOT": str(root)}
    warned = bare.run(*command, cwd=tmp_path, extra=variables).stdout
    assert "has nvcc but no" in warned and "libtrtllm_shadowkv.so is not built" in warned
    refused = bare.run(*command, cwd=tmp_path, ok=False, extra=variables | {"TRTLLM_SHADOWKV_CUDA": "ON"}).stdout
    assert "TRTLLM_SHADOWKV_CUDA is ON, but" in refused


@pytest.mark.parametrize(
    ("nvcc", "line"),
    [
        ("echo 'release 11.8, V11.8.89'", "is of CUDA 11.8, which cannot compile for 100a and 120"),
        (
            "[ $1 = --version ] && echo 'release 13.0, V13.0.88' || { echo 'unsupported g++' >&2; exit 1; }",
            "cannot compile",
        ),
        ("exit 3", "does not answer to --version"),
    ],
)
def test_toolkit_that_does_not_work_is_named(
    bare: Environment, checkout: Path, tmp_path: Path, nvcc: str, line: str
) -> None:
    root = tmp_path / "cuda"
    (root / "bin").mkdir(parents=True)
    (root / "bin/nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
    (root / "bin/nvcc").chmod(0o755)
    command = ("cmake", "-G", "Ninja", "-S", checkout, "-B", "configured", f"-DPython_EXECUTABLE={bare.python}")
    compiler = {"PATH": f"{bare.variables['PATH']}:{os.environ['PATH']}", "CC": "cc", "CXX": "c++"}
    variables = compiler | {"CUDA_HOME": str(root)}
    warned = bare.run(*command, cwd=tmp_path, extra=variables).stdout
    assert [text for text in warned.splitlines() if line in text and "libtrtllm_shadowkv.so is not built" in text]
    refused = bare.run(*command, cwd=tmp_path, ok=False, extra=variables | {"TRTLLM_SHADOWKV_CUDA": "ON"}).stdout
    assert [text for text in refused.splitlines() if line in text and "TRTLLM_SHADOWKV_CUDA is ON, but" in text]


def test_wheel_with_the_library(checkout: Path, tmp_path: Path) -> None:
    """With the toolkit of this environment or of the system; for one architecture, to be quick."""
    variables = {**os.environ, "TRTLLM_SHADOWKV_CUDA": "ON", "CUDAARCHS": "80-real"}
    variables.pop(ENVIRONMENT, None)
    folder, target = copy_checkout(tmp_path / "checkout"), tmp_path / "target"
    command = (sys.executable, *PIP, "install", *OFFLINE, "--target", target, ".")
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "from trtllm_shadowkv.library import load; library = load(); print(library.path, library.version)"
    # -S: else an editable installation in this environment would come first.
    loaded = subprocess.run(
        (sys.executable, "-S", "-c", code),
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": str(target)},
        stdout=subprocess.PIPE,
    )
    assert loaded.stdout.decode().split() == [str(target / "trtllm_shadowkv" / FILE), trtllm_shadowkv.__version__]
