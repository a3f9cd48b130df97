"""How fast a Triton server answers when several clients ask at once.

python examples/triton/load.py --prompt-tokens 4096 --max-tokens 64 --concurrency 1 2 4 8 --requests 16 --json load.json

Each client sends its next request, over HTTP (generate_stream), when its answer is complete. Times are the client's.
``--plot`` takes matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from client import RequestFailed, http_responses


@dataclass(frozen=True)
class Answer:
    """Seconds from the request to its first and its last piece, and the tokens generated up to each."""

    first: float
    last: float
    first_tokens: int
    tokens: int


@dataclass(frozen=True)
class Measured:
    """One concurrency; times in seconds over the requests that were answered, None where none has one."""

    concurrency: int
    answered: int
    failed: int
    first_token_median: float | None
    first_token_p95: float | None
    time_per_token: float | None
    """Median over requests, after the first piece."""
    tokens_per_second: float
    """Of all clients together, from the first request to the last answer; reading of prompts included."""


def ask(url: str, model: str, inputs: Mapping[str, Any]) -> Answer:
    """Send one request.

    Raises:
        RequestFailed: the server's message.
    """
    started = time.perf_counter()
    pieces = [
        (time.perf_counter() - started, int(response["sequence_length"]))
        for response in http_responses(url, model, inputs)
    ]
    return Answer(pieces[0][0], pieces[-1][0], pieces[0][1], pieces[-1][1])


def measure(url: str, model: str, requests: Sequence[Mapping[str, Any]], concurrency: int) -> Measured:
    """Send requests from ``concurrency`` clients; the first failure's message goes to stderr."""
    failures: list[str] = []

    def answer(inputs: Mapping[str, Any]) -> Answer | None:
        try:
            return ask(url, model, inputs)
        except RequestFailed as e:
            failures.append(str(e))
            return None

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        answers = [one for one in clients.map(answer, requests) if one is not None]
    seconds = time.perf_counter() - started
    if failures:
        print(f"concurrency {concurrency}: {len(failures)} failed, the first: {failures[0]}", file=sys.stderr)
    first = sorted(a.first for a in answers)
    paces = [(a.last - a.first) / (a.tokens - a.first_tokens) for a in answers if a.tokens > a.first_tokens]
    return Measured(
        concurrency=concurrency,
        answered=len(answers),
        failed=len(failures),
        first_token_median=statistics.median(first) if first else None,
        first_token_p95=first[math.ceil(0.95 * len(first)) - 1] if first else None,
        time_per_token=statistics.median(paces) if paces else None,
        tokens_per_second=sum(a.tokens for a in answers) / seconds,
    )


def prompts(options: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """The inputs that hold the prompts of ``count`` requests: the file's text, or other random tokens each time."""
    if options.prompt_file is not None:
        return [{"text_input": options.prompt_file.read_text(encoding="utf-8")}] * count
    tokens = range(options.vocabulary)
    return [{"input_ids": options.random.choices(tokens, k=options.prompt_tokens)} for _ in range(count)]


HEADINGS = ("clients", "answered", "failed", "first token", "p95", "a token", "tokens/s")


def cells(measured: Measured) -> tuple[str, ...]:
    """A row of the table."""

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1000:.1f} ms"

    times = (measured.first_token_median, measured.first_token_p95, measured.time_per_token)
    counts = (measured.concurrency, measured.answered, measured.failed)
    return (*map(str, counts), *map(milliseconds, times), f"{measured.tokens_per_second:.1f}")


def show(row: Sequence[str]) -> None:
    print("  ".join(f"{cell:>11}" for cell in row), flush=True)


def plot(rows: Sequence[Measured], title: str, path: Path) -> None:
    """Draw tokens/s and the time to the first token over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    figure.suptitle(title)
    answered = [row for row in rows if row.answered]
    clients = [row.concurrency for row in answered]
    left.plot(clients, [row.tokens_per_second for row in answered], "o-")
    left.set(xlabel="clients", ylabel="tokens/s", xticks=clients)
    right.plot(clients, [row.first_token_median for row in answered], "o-", label="median")
    right.plot(clients, [row.first_token_p95 for row in answered], "o--", label="95th percentile")
    right.set(xlabel="clients", ylabel="time to first token [s]", xticks=clients)
    right.legend()
    for axes in (left, right):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a Triton server under load.")
    parser.add_argument("--url", default="localhost:8000", metavar="HOST:PORT", help="default: localhost:8000")
    parser.add_argument("--model", default="shadowkv", help="default: shadowkv")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8"
    )
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="at each concurrency (default: 16)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text of every prompt")
    prompt.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="random ones (default: 512)")
    parser.add_argument("--vocabulary", type=int, default=32000, metavar="N", help="random tokens are below this")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer, always reached")
    parser.add_argument("--attention-mode", metavar="MODE", help="shadowkv or dense")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the random tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    options = parser.parse_args()
    if min(*options.concurrency, options.requests, options.max_tokens, options.prompt_tokens, options.vocabulary) < 1:
        parser.error("numbers must be positive")
    if options.plot is not None and find_spec("matplotlib") is None:
        sys.exit(f"{parser.prog}: no matplotlib for --plot: pip install matplotlib")

    options.random = random.Random(options.seed)
    fixed = {"max_tokens": options.max_tokens, "ignore_eos": True, "stream": True}
    if options.attention_mode is not None:
        fixed["attention_mode"] = options.attention_mode

    def requests(count: int) -> list[dict[str, Any]]:
        return [{**fixed, **prompt} for prompt in prompts(options, count)]

    rows = []
    try:
        ask(options.url, options.model, requests(1)[0])  # nothing is measured before all is warm
        show(HEADINGS)
        for concurrency in options.concurrency:
            rows.append(measure(options.url, options.model, requests(options.requests), concurrency))
            show(cells(rows[-1]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (RequestFailed, OSError, UnicodeDecodeError) as e:
        sys.exit(f"{parser.prog}: {e}")
    if options.json is not None:
        settings = {
            "model": options.model,
            "prompt_tokens": None if options.prompt_file is not None else options.prompt_tokens,
            "prompt_file": None if options.prompt_file is None else str(options.prompt_file),
            **fixed,
        }
        options.json.write_text(
            json.dumps({"settings": settings, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    if options.plot is not None:
        plot(rows, f"{options.model}, answers of {options.max_tokens} tokens", options.plot)
    sys.exit(1 if any(row.failed for row in rows) else 0)


if __name__ == "__main__":
    main()
