"""A real Triton server for tests, and HTTP to it.

Also for tests elsewhere that bring an engine of their own: write_repository, then TritonServer. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from examples.triton.serve import remove_shared_memory, server_command
from tests.triton_grpc import LIMIT, GrpcStream, RequestFailed, listed

_ROOT = Path(__file__).parents[1]
_SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


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
        return listed(json.loads(text))

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
                    yield listed(event)

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
