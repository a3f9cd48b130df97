"""The command as a user runs it: arguments and standard input in; output, errors and exit code out."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error that a failure of ours is."""
        assert self.code == 1, (self.out, self.err)
        assert self.err.startswith("error: "), self.err
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err[len("error: ") : -1]


Cli = Callable[..., Outcome]
NAN_CHARACTER = "~"
"""Prompts that hold it fail."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    from trtllm_shadowkv.cli.main import main

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["trtllm-shadowkv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def cli_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_llm import build_tiny_llm

    return build_tiny_llm(tmp_path_factory.mktemp("cli"), ord(NAN_CHARACTER))
