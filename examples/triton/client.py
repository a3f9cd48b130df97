"""One prompt to a Triton server, the answer as it comes.

python examples/triton/client.py --prompt "The three laws of robotics are" --max-tokens 64 --stream
python examples/triton/client.py --protocol grpc --prompt-file long.txt --stream

HTTP takes the standard library alone, gRPC takes tritonclient (pip install --no-deps -r requirements/triton.txt).
Ctrl-C cancels the request on the server; over HTTP the server notices at the next piece, so only with --stream.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "max_tokens": "INT32",
    "stop_words": "BYTES",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "seed": "UINT64",
    "ignore_eos": "BOOL",
    "attention_mode": "BYTES",
    "attention_top_k": "INT32",
}
"""Those inputs of the model that this client sends, with Triton's names of their types."""
STATISTICS = (
    "finish_reason",
    "num_input_tokens",
    "sequence_length",
    "time_to_first_token",
    "shadowkv_hit_rate",
    "shadowkv_bytes_fetched",
    "shadowkv_host_bytes",
    "shadowkv_sealed_tokens",
)
"""Outputs of the last response; one is missing where there is nothing to say."""


class RequestFailed(Exception):
    """The server refused a request or could not finish it, or cannot be reached."""


def http_responses(url: str, model: str, inputs: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The responses to a request over HTTP; closing the generator cancels one with ``stream``.

    Args:
        url: host:port
        inputs: by name, see INPUTS; with ``stream`` the answer comes in pieces.

    Yields:
        Outputs by name; a value where an output has one element, else a list.

    Raises:
        RequestFailed: the server's message.
    """
    stream = bool(inputs.get("stream"))
    try:
        with closing(http.client.HTTPConnection(url)) as connection:
            path = f"/v2/models/{model}/{'generate_stream' if stream else 'generate'}"
            # A connection that stays open makes a server that is to stop wait for it.
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", path, json.dumps(inputs), headers)
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise RequestFailed(_message(response))
                lines = (line[len(b"data:") :] for line in response if line.startswith(b"data:"))
                last: dict[str, Any] = {}
                for text in lines if stream else [response.read()]:
                    last = json.loads(text)
                    if "error" in last:
                        raise RequestFailed(last["error"])
                    yield last
                if "finish_reason" not in last:
                    raise RequestFailed("the connection ended before the answer did")
    except (OSError, http.client.HTTPException) as e:
        raise RequestFailed(f"{url}: {e or type(e).__name__}") from e


def _message(response: http.client.HTTPResponse) -> str:
    body = response.read().decode(errors="replace").removeprefix("data:")
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status} {response.reason}: {body}"


def grpc_responses(url: str, model: str, inputs: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """As :func:`http_responses`, over gRPC."""
    try:
        import numpy as np
        import tritonclient.grpc as triton
        from tritonclient.utils import InferenceServerException, triton_to_np_dtype
    except ModuleNotFoundError as e:
        raise RequestFailed(f"no {e.name} for gRPC: pip install --no-deps -r requirements/triton.txt") from e

    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        if INPUTS[name] == "BYTES":
            values = [text.encode() for text in values]
        tensors.append(triton.InferInput(name, [1, len(values)], INPUTS[name]))  # 1: the batch
        try:
            tensors[-1].set_data_from_numpy(np.array([values], dtype=triton_to_np_dtype(INPUTS[name])))
        except OverflowError as e:
            raise RequestFailed(f"{name} is {value}: no {INPUTS[name]} holds it") from e

    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with closing(triton.InferenceServerClient(url)) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        last = False
        try:
            try:
                client.async_stream_infer(model, tensors, enable_empty_final_response=True)
            except InferenceServerException as e:  # the stream broke before; the callback may have got why
                answers.put((None, e))
            while not last:
                result, error = answers.get()
                if error is not None:
                    last = True
                    raise RequestFailed(str(error)) from error
                response = result.get_response()
                last = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield {output.name: _value(result.as_numpy(output.name)) for output in response.outputs}
        finally:
            # Triton 2.51 keeps a request for ever that is cancelled after its final response, and then cannot stop.
            client.stop_stream(cancel_requests=not last)


def _value(tensor: Any) -> Any:
    values = [v.decode() if isinstance(v, bytes) else v for v in tensor.reshape(-1).tolist()]
    return values[0] if len(values) == 1 else values


def main() -> None:
    parser = argparse.ArgumentParser(description="Send one prompt to a Triton server.")
    parser.add_argument("--url", metavar="HOST:PORT", help="default: localhost:8000, with gRPC localhost:8001")
    parser.add_argument("--model", default="shadowkv", help="default: shadowkv")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http", help="default: http")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", dest="text_input", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text in UTF-8")
    parser.add_argument("--stream", action="store_true", help="print the answer as it comes")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--stop-words", nargs="+", metavar="TEXT", help="end before any of these")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample among the N likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")
    parser.add_argument("--attention-mode", metavar="MODE", help="shadowkv or dense")
    parser.add_argument("--attention-top-k", type=int, metavar="N", help="chunks that attention selects")
    options = parser.parse_args()
    url = options.url or ("localhost:8001" if options.protocol == "grpc" else "localhost:8000")
    responses = grpc_responses if options.protocol == "grpc" else http_responses
    response: dict[str, Any] = {}
    try:
        if options.prompt_file is not None:
            options.text_input = options.prompt_file.read_text(encoding="utf-8")
        inputs = {name: getattr(options, name) for name in INPUTS if getattr(options, name) is not None}
        with closing(responses(url, options.model, inputs)) as answer:
            for response in answer:
                print(response["text_output"], end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except (RequestFailed, OSError, UnicodeDecodeError) as e:
        if response:
            print()
        sys.exit(f"{parser.prog}: {e}")
    for name in STATISTICS:
        if name in response:
            print(f"{name:22}  {response[name]}", file=sys.stderr)


if __name__ == "__main__":
    main()
