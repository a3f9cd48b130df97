"""A real Triton server for tests, and clients for it: HTTP from the standard library, gRPC from tritonclient.

Also for tests elsewhere that bring an engine of their own: write_repository, then TritonServer. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from examples.triton.serve import remove_shared_memory, server_command
from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams
from trtllm_shadowkv.request import CompletionOutput

LIMIT = 180.0
"""Seconds that anything may take."""
LISTS = ("output_ids", "output_log_probs")
"""Outputs of any number of elements; the others have one."""
_ROOT = Path(__file__).parents[1]
_SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class RequestFailed(Exception):
    """What the server answered in place of a response; status: of HTTP, 200 within a stream, None over gRPC."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def server_environment() -> Path:
    """The environment with nvidia-pytriton.

    Raises:
        LookupError: there is none, or no client for gRPC; the text says what to install.
    """
    named = os.environ.get("TRTLLM_SHADOWKV_TRITON")
    venv = Path(named) if named else _ROOT / ".venv-triton"
    if not named and not venv.exists():
        raise LookupError("no Triton: an environment with requirements/triton-server.txt (TRTLLM_SHADOWKV_TRITON)")
    if importlib.util.find_spec("tritonclient") is None:
        raise LookupError("no tritonclient (pip install --no-deps -r requirements/triton.txt)")
    return venv


def wait_for(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """What ``condition`` returns as soon as that is true."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit:g} s until {what}"
        time.sleep(0.01)
    return found


@dataclass(frozen=True)
class Ask:
    """A request in words that Triton and LLM share; settings: inputs of one, keywords of SamplingParams of the other.

    ``stop``, ``mode`` (of attention) and ``chunks`` (its top_k) have other names in one of the two.
    """

    prompt: str | list[int]
    settings: Mapping[str, Any]
    stop: Sequence[str] = ()
    mode: Literal["shadowkv", "dense"] | None = None
    chunks: int | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """For Triton."""
        inputs = {"text_input" if isinstance(self.prompt, str) else "input_ids": self.prompt, **self.settings}
        others = {"stop_words": list(self.stop) or None, "attention_mode": self.mode, "attention_top_k": self.chunks}
        return inputs | {name: value for name, value in others.items() if value is not None}

    def alone(self, llm: LLM) -> CompletionOutput:
        """What LLM answers in this process when it does nothing else."""
        params = SamplingParams(stop=list(self.stop), **self.settings)
        output = llm.generate(self.prompt, params, attention=AttentionParams(self.mode, self.chunks))
        assert isinstance(output, RequestOutput)
        return output.outputs[0]


@dataclass(frozen=True)
class Got:
    """What came for a request; last: the last response, which has the figures; pieces: their texts."""

    text: str
    ids: list[int]
    last: dict[str, Any]
    pieces: list[str]


WAYS = ("generate", "generate_stream", "gRPC", "gRPC stream")


def ask(server: TritonServer, model: str, request: Ask, way: str = "generate", **more: Any) -> Got:
    """Send a request in one of ``WAYS``; more: inputs that LLM has no equal of."""
    inputs = {**request.inputs, **more}
    if way == "generate":
        responses = [server.generate(model, **inputs)]
    elif way == "generate_stream":
        responses = list(server.generate_stream(model, stream=True, **inputs))
    else:
        with server.grpc_stream(model, stream=way == "gRPC stream", **inputs) as stream:
            responses = list(stream)
    return got(responses)


def got(responses: list[dict[str, Any]]) -> Got:
    """Put the responses to a request together; see that they fit each other."""
    count = 0
    for response in responses:
        count += len(response.get("output_ids", []))
        assert response["sequence_length"] == count
        assert ("finish_reason" in response) == (response is responses[-1])
    pieces = [response["text_output"] for response in responses]
    ids = [token for response in responses for token in response.get("output_ids", [])]
    return Got("".join(pieces), ids, responses[-1], pieces)


class TritonServer:
    """tritonserver in a process group of its own, as examples/triton/serve.py starts it.

    Args:
        repository: see :func:`trtllm_shadowkv.triton.repository.write_repository`.
        workdir: the caller's folder for the log and for temporary files.
        venv: see :func:`server_environment`; None: that one.
        options: more options of tritonserver.

    As a context manager it is started, and stopped at the end. Whatever happened, nothing of it is left then.
    """

    def __init__(
        self, repository: Path, workdir: Path, *, venv: Path | None = None, options: Sequence[str] = ()
    ) -> None:
        self.repository, self.workdir = repository, workdir
        self._venv, self._options = venv or server_environment(), options
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._log: IO[bytes] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, *models: str, limit: float = 2 * LIMIT) -> Self:
        """Start it and wait until the models are ready; without any, until it is live."""
        http_port, grpc_port, metrics_port = free_ports(3)
        self.http, self.grpc = f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
        self._metrics = f"127.0.0.1:{metrics_port}"
        for folder in ("backends", "tmp"):
            (self.workdir / folder).mkdir(parents=True, exist_ok=True)
        self._command, environment = server_command(
            self.repository,
            self._venv,
            self.workdir / "backends",
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            options=self._options,
        )
        self._log = (self.workdir / "tritonserver.log").open("ab")
        self._process = subprocess.Popen(
            self._command,
            env={**environment, "TMPDIR": str(self.workdir / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(lambda: self._ended() or self._live(), "the server is live", limit)
            for model in models:
                wait_for(lambda model=model: self._ended() or self.ready(model), f"{model} is ready", limit)
            assert not self._ended(), f"the server ended with {self._process.returncode}"
        except BaseException as e:
            log = self.log[-4000:]
            self.end()
            raise AssertionError(f"{e}\n{log}") from e
        return self

    def interrupt(self) -> None:
        """Ask it to stop, without waiting."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def stop(self, limit: float = LIMIT) -> None:
        """Stop it, and see that it ends by itself with status 0 and leaves nothing behind."""
        assert self._process is not None
        try:
            self.interrupt()
            status = self._process.wait(limit)
            assert status == 0, f"exit status {status}:\n{self.log[-4000:]}"
            wait_for(lambda: not self.processes(), "its processes have ended")
            assert self.segments() == []
        finally:
            self.end()

    def kill(self, *, group: bool = False) -> None:
        """SIGKILL the server alone, or all its processes but the engines', which have groups of their own."""
        assert self._process is not None
        if group:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait(LIMIT)

    def end(self) -> None:
        """Kill and remove whatever there still is of it; harmless when there is nothing."""
        if self._process is not None:
            for pid in [*self.processes(), *self.engines()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(LIMIT)
            wait_for(lambda: not (self.processes() or self.engines()), "its processes are gone")
            remove_shared_memory(self._command)
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._ended():
            self.stop()
        else:
            self.end()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _live(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/v2/health/live")[0] == http.HTTPStatus.OK
        return False

    @property
    def log(self) -> str:
        return (self.workdir / "tritonserver.log").read_text(errors="replace")

    def processes(self) -> list[int]:
        """The server and its python backend's processes, zombies left out."""
        assert self._process is not None
        return [pid for pid, group in _process_groups() if group == self._process.pid]

    def engines(self, model: str | None = None) -> list[int]:
        """Processes that hold the engine of one of its models, or of any."""
        folder = str(self.repository / model / "1") if model else f"{self.repository}/"
        found = []
        for pid, _ in _process_groups():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                if "trtllm_shadowkv.triton.worker" in words and any(w.startswith(folder) for w in words):
                    found.append(pid)
        return found

    def segments(self) -> list[str]:
        """Its files in shared memory."""
        return segments(self._command)

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None, *, address: str = "") -> tuple[int, str]:
        """Status and text of an answer; body: bytes as they are, anything else as JSON."""
        with closing(self.request(method, path, body, address)) as connection, connection.getresponse() as response:
            return response.status, response.read().decode()

    def request(self, method: str, path: str, body: Any, address: str = "") -> http.client.HTTPConnection:
        """A connection on which a request was sent; the answer is the caller's to read."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(address or self.http, timeout=LIMIT)
        # A connection that stays open makes a server that is to stop wait for it.
        connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
        return connection

    def ready(self, model: str) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.call("GET", f"/v2/models/{model}/ready")[0] == http.HTTPStatus.OK
        return False

    def load(self, model: str) -> tuple[int, str]:
        """Status and text of the answer."""
        return self.call("POST", f"/v2/repository/models/{model}/load", {})

    def generate(self, model: str, body: bytes | None = None, **inputs: Any) -> dict[str, Any]:
        """One response; body: in the place of JSON of the inputs.

        Raises:
            RequestFailed: the server's message.
        """
        status, text = self.call("POST", f"/v2/models/{model}/generate", inputs if body is None else body)
        if status != http.HTTPStatus.OK:
            raise RequestFailed(_error(text), status)
        return _listed(json.loads(text))

    def generate_stream(self, model: str, **inputs: Any) -> Iterator[dict[str, Any]]:
        """Responses as they come; closing the generator closes the connection.

        Raises:
            RequestFailed: the server's message.
        """
        path = f"/v2/models/{model}/generate_stream"
        with closing(self.request("POST", path, inputs)) as connection, connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise RequestFailed(_error(response.read().decode()), response.status)
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for line in response:
                kind, found, text = line.partition(b"data:")
                if found and not kind:
                    event = json.loads(text)
                    if "error" in event:
                        raise RequestFailed(event["error"], response.status)
                    yield _listed(event)

    def metrics(self, model: str) -> dict[str, float]:
        """Values by name, or by name:reason where there is a reason."""
        status, text = self.call("GET", "/metrics", address=self._metrics)
        assert status == http.HTTPStatus.OK
        values = {}
        for name, labels, value in _SAMPLE.findall(text):
            given = dict(_LABEL.findall(labels))
            if given.get("model") == model:
                values[f"{name}:{given['reason']}" if "reason" in given else name] = float(value)
        return values

    # --- gRPC -------------------------------------------------------------------------------------------------------

    def grpc_stream(self, model: str, *tensors: Any, request_id: str = "", **inputs: Any) -> GrpcStream:
        """Send a request on a connection of its own; see :class:`GrpcStream`."""
        stream = GrpcStream(self.grpc, model)
        stream.send(*tensors, request_id=request_id, **inputs)
        return stream


class GrpcStream:
    """One stream of gRPC: iterate over the responses to a request. Closing it cancels what still runs."""

    def __init__(self, address: str, model: str) -> None:
        import tritonclient.grpc as triton

        self._model = model
        # By default clients of one process share their connections.
        arguments = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self._client = triton.InferenceServerClient(address, channel_args=arguments)
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._running = 0
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def send(self, *tensors: Any, request_id: str = "", **inputs: Any) -> None:
        """Send a request: tensors as they are, and inputs as :func:`tensor` makes them."""
        made = [*tensors, *(tensor(name, value) for name, value in inputs.items())]
        self._client.async_stream_infer(self._model, made, request_id=request_id, enable_empty_final_response=True)
        self._running += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Responses up to the final one, each with the id of its request.

        Raises:
            RequestFailed: the server's message.
        """
        while True:
            response = self.next()
            final = response.pop("final")
            if len(response) > 1:
                yield response
            if final:
                return

    def next(self, limit: float = LIMIT) -> dict[str, Any]:
        """The next response of any request, with its ``id`` and whether it is the ``final`` one.

        Raises:
            RequestFailed: the server's message.
            queue.Empty: none came in time.
        """
        result, error = self._answers.get(timeout=limit)
        if error is not None:
            self._running -= 1
            raise RequestFailed(str(error)) from error
        response = result.get_response()
        values: dict[str, Any] = {"id": response.id}
        for output in response.outputs:
            array = result.as_numpy(output.name)
            assert array.shape[0] == 1 and array.ndim == 2
            values[output.name] = [v.decode() if isinstance(v, bytes) else v for v in array[0].tolist()]
        final = response.parameters["triton_final_response"].bool_param
        self._running -= final
        return _listed(values) | {"final": final}

    @property
    def unread(self) -> int:
        """Responses that have come already."""
        return self._answers.qsize()

    def close(self) -> None:
        # Triton 2.51 never unloads a model whose stream is cancelled just after the final response.
        self._client.stop_stream(cancel_requests=self._running > 0)
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


TYPES: Mapping[str, str] = {
    **dict.fromkeys(("text_input", "stop_words", "bad_words", "attention_mode"), "BYTES"),
    **dict.fromkeys(("stream", "stop", "ignore_eos", "return_log_probs", "exclude_input_in_output"), "BOOL"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), "FP32"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "FP32"),
    **dict.fromkeys(("seed", "random_seed"), "UINT64"),
}
"""Of inputs; those that are missing here are INT32."""


def tensor(name: str, value: Any, datatype: str | None = None, shape: Sequence[int] | None = None) -> Any:
    """An input of shape [1, n], or of another shape or type."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.utils import triton_to_np_dtype

    datatype = datatype or TYPES.get(name, "INT32")
    values = value if isinstance(value, list) else [value]
    if datatype == "BYTES":
        values = [v.encode() if isinstance(v, str) else v for v in values]
    array = np.array(values, dtype=triton_to_np_dtype(datatype)).reshape(shape or (1, len(values)))
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def _listed(response: dict[str, Any]) -> dict[str, Any]:
    """JSON has a value in the place of a list of one."""
    for name, value in response.items():
        if name in LISTS and not isinstance(value, list):
            response[name] = [value]
        elif name not in LISTS and isinstance(value, list):
            (response[name],) = value
    return response


def _error(text: str) -> str:
    try:
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return f"no JSON with an error: {text}"


def segments(command: Sequence[str]) -> list[str]:
    """Files in shared memory of the server that a command started."""
    prefix = next(a.partition("prefix-name=")[2] for a in command if "prefix-name=" in a)
    return sorted(path.name for path in Path("/dev/shm").glob(f"{prefix}*"))


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to clients, so that none of them takes one in between."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            one = socket.socket()
            held.append(one)
            try:
                one.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            except OSError:
                held.remove(one)
                one.close()
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _process_groups() -> Iterator[tuple[int, int]]:
    """Number and group of every process, zombies left out."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if state != "Z":
                yield int(path.parent.name), int(group)
