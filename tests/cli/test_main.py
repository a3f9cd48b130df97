"""What all commands have in common: exit codes, one-line errors, output that cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from trtllm_shadowkv import __version__


def test_the_version_and_the_help_are_printed(cli: Cli) -> None:
    assert cli("--version").out == f"{__version__}\n"
    for arguments in (["--help"], ["-h"], ["build", "--help"], ["generate", "-h"], ["demo_model", "-h"]):
        outcome = cli(*arguments)
        assert outcome.code == 0
        assert "Usage" in outcome.out
    listed = cli("--help").out
    for name in ("demo-model", "build", "verify", "generate", "chat", "plan", "doctor"):
        assert f" {name} " in listed


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["--nonsense"],
        ["generate"],
        ["verify"],
        ["verify", "a", "b"],
        ["build"],
        ["build", "--model-dir", "x"],
        ["build", "--output-dir", "x"],
        ["build", "--model-dir", "x", "--output-dir", "y", "--max-batch-size", "four"],
        ["build", "--refresh", "x", "--model-dir", "y"],
        ["build", "--refresh", "x", "--max-batch-size", "0"],
        ["build", "--refresh", "x", "--config", "y"],
        ["build", "--refresh", "x", "--engine-only"],
        ["generate", "x", "--temperature", "hot"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(cli: Cli, arguments: list[str]) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert "Usage" in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def test_an_error_with_many_lines_becomes_one(cli: Cli, tmp_path: Path) -> None:
    assert "is no directory" in cli("verify", tmp_path / "line one\nline two").error


def test_output_that_cannot_be_written_is_one_line(
    cli: Cli, cli_engine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["verify"], ["generate", "--prompt", "x", "--max-tokens", "3"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert "No space left on device" in cli(arguments[0], cli_engine, *arguments[1:]).error
            full.flush()  # nothing is left that could fail later


def test_a_reader_that_has_gone_away_is_told_nothing(
    cli: Cli, cli_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", gone)
    outcome = cli("generate", cli_engine, "--prompt", "x", "--max-tokens", 3)
    assert (outcome.code, outcome.err) == (1, "")
    with contextlib.suppress(BrokenPipeError):
        gone.close()


def test_a_terminal_without_the_characters_gets_question_marks(
    cli: Cli, cli_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert cli("generate", cli_engine, "--prompt", "ü", "--max-tokens", 30, "--temperature", 5, "--seed", 1).code == 0
    assert b"?" in raw.getvalue()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_interrupt_ends_it_without_a_traceback(cli_engine: Path, command: str) -> None:
    arguments = ["--max-tokens", "5000", "--temperature", "1", "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trtllm_shadowkv", command, cli_engine, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    typed = process.stdin
    typed.write(b"Tell me a story\n")
    if command == "generate":
        typed.close()
        process.stdin = None
    else:
        typed.flush()
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    if command == "chat":  # ends the answer alone
        time.sleep(0.5)
        assert process.poll() is None
        typed.write(b"\n")
        typed.flush()
    _, errors = process.communicate(timeout=180)
    assert b"Traceback" not in errors
    assert process.returncode == (0 if command == "chat" else 128 + signal.SIGINT), errors
