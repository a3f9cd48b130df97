"""``chat``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import NAN_CHARACTER, Cli
from trtllm_shadowkv import LLM, SamplingParams

OPTIONS = ["--max-tokens", "10", "--temperature", "1", "--seed", "5"]


def answers(engine: Path, turns: list[str], system: str | None = None) -> list[str]:
    messages = [{"role": "system", "content": system}] if system else []
    found = []
    with LLM(engine, threads=1) as llm:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            found.append(llm.chat(messages, SamplingParams(max_tokens=10, temperature=1, seed=5)).text)
            messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_a_conversation_goes_on_until_an_empty_line(cli: Cli, cli_engine: Path) -> None:
    expected = answers(cli_engine, ["Hello", "Grüße"])
    outcome = cli("chat", cli_engine, *OPTIONS, stdin="Hello\nGrüße\n\nnever read\n".encode())
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "".join(f"{a}\n" for a in expected)
    ended = cli("chat", cli_engine, *OPTIONS, stdin="Hello\nGrüße".encode())
    assert ended.out == outcome.out


def test_a_system_message_comes_first(cli: Cli, cli_engine: Path) -> None:
    (expected,) = answers(cli_engine, ["Hello"], "Be kind.")
    assert cli("chat", cli_engine, "--system", "Be kind.", *OPTIONS, stdin=b"Hello\n").out == expected + "\n"


def test_nothing_said_is_nothing_answered(cli: Cli, cli_engine: Path) -> None:
    for stdin in (b"", b"\n", b"   \n"):
        outcome = cli("chat", cli_engine, stdin=stdin)
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_a_conversation_that_has_grown_too_long_ends_with_an_error(cli: Cli, cli_engine: Path) -> None:
    outcome = cli("chat", cli_engine, *OPTIONS, stdin=b"Hello\n" + b"x" * 6000 + b"\n")
    assert "tokens; expected at most max_seq_len = 6000" in outcome.error
    assert outcome.out == "".join(f"{a}\n" for a in answers(cli_engine, ["Hello"]))


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        ([], b"a\xff\n", "the standard input is no UTF-8"),
        ([], NAN_CHARACTER.encode() + b"\n", "NaN logits"),
        (["--temperature", "nan"], b"x\n", "temperature is nan"),
        (["--budget", "5000"], b"x\n", "attention top_k is 5000"),
        (["--attention", "no"], b"x\n", "--attention is 'no'"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    cli: Cli, cli_engine: Path, options: list[str], stdin: bytes, message: str
) -> None:
    assert message in cli("chat", cli_engine, *options, stdin=stdin).error


def test_a_model_without_a_template_is_one_line(cli: Cli, cli_engine: Path, tmp_path: Path) -> None:
    from tests.tiny_models import write_tiny
    from tests.tiny_tokenizer import write_tokenizer

    model = write_tiny(tmp_path / "m")
    write_tokenizer(model, chat_template=None)
    assert cli("build", "--model-dir", model, "--output-dir", tmp_path / "e").code == 0
    assert "this model has no chat template" in cli("chat", tmp_path / "e", stdin=b"x\n").error
