"""The command ``trtllm-shadowkv``."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from trtllm_shadowkv import __version__
from trtllm_shadowkv.cli.build import build, verify
from trtllm_shadowkv.cli.chat import chat
from trtllm_shadowkv.cli.convert_checkpoint import convert_checkpoint
from trtllm_shadowkv.cli.demo_model import demo_model
from trtllm_shadowkv.cli.doctor import doctor
from trtllm_shadowkv.cli.generate import generate
from trtllm_shadowkv.cli.model_file import model_file
from trtllm_shadowkv.cli.plan import plan
from trtllm_shadowkv.cli.triton_repository import triton_repository
from trtllm_shadowkv.errors import ShadowKVError


def _spelling(name: str) -> str:
    """TensorRT-LLM's tools spell options with underscores; both spellings are one option here."""
    return name.replace("_", "-")


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _spelling, "help_option_names": ["-h", "--help"]},
    help="ShadowKV for TensorRT-LLM's engine backend: long contexts with keys of low rank and values in host memory.",
)
for _command in (
    demo_model,
    build,
    verify,
    generate,
    chat,
    convert_checkpoint,
    triton_repository,
    plan,
    doctor,
    model_file,
):
    app.command(_spelling(_command.__name__))(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of ours is one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets a question mark
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ShadowKVError as e:
        _fail(str(e))
    except OSError as e:
        # What is left in the buffer cannot be written, and the interpreter would try once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail("" if isinstance(e, BrokenPipeError) else str(e))  # whoever read our output knows that he is gone


def _fail(message: str) -> NoReturn:
    if message:
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
