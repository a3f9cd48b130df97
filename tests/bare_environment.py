"""Environments and copies of this checkout for tests that install the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
PIP = ("-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


@dataclass
class Environment:
    """A virtual environment with the build backend and nothing else, and variables that hide every compiler."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(
        self, *command: str | Path, cwd: Path, ok: bool = True, extra: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command`; its two outputs come as one. `ok`: whether it must succeed or must fail."""
        variables = {**self.variables, **(extra or {})}
        done = subprocess.run(
            command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert (done.returncode == 0) is ok, f"{' '.join(map(str, command))}\n{done.stdout}"
        return done

    def pip(self, *arguments: str | Path, cwd: Path, ok: bool = True) -> str:
        return self.run(sys.executable, *PIP, "--python", self.python, *arguments, cwd=cwd, ok=ok).stdout


def new_environment(folder: Path) -> Environment:
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    environment = Environment(folder / "venv", {})
    for name in ("scikit_build_core", "packaging", "pathspec"):
        (environment.site_packages / name).symlink_to(SITE_PACKAGES / name)
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "git", "make", "bash", "sed", "find"):
        beside = Path(sys.executable).with_name(tool)
        found = str(beside) if beside.exists() else shutil.which(tool)
        assert found, f"{tool} is needed: install requirements/build.txt, git and make"
        (tools / tool).symlink_to(found)
    home = folder / "home"
    home.mkdir()
    # CMake also looks in /usr/bin, whatever PATH says: these two hide the compilers there.
    no_compiler = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    environment.variables = {"PATH": str(tools), "HOME": str(home), "LC_ALL": "C.UTF-8", **no_compiler}
    return environment


def copy_checkout(to: Path) -> Path:
    """What a clone of this checkout would hold (committed or not yet), links kept as links."""
    to.mkdir(parents=True)
    for name in (*PYPROJECT["tool"]["scikit-build"]["sdist"]["include"], "/.gitignore", "/Makefile", "/requirements/"):
        source = ROOT / name.strip("/")
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, to / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, to / source.name)
    return to
