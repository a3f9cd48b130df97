"""The model that Triton's python backend loads: it hands requests to the process that holds the engine.

Triton runs this file in its own interpreter (whose NumPy is older than 2), so it uses nothing but NumPy and the
standard library. What a request means, and every check of it, is in :mod:`trtllm_shadowkv.triton.worker`'s process; the
two speak JSON, one message a line, over a socket. Every request gets exactly one final response, whatever happens.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

PROTOCOL = 1
"""Of the messages below; another version of the package may speak another."""
FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
POLL = 0.02
"""Seconds between two looks for requests that were cancelled."""
ASKED = 25
"""Requests that are looked at each time."""
CLOSE = 20.0
"""Seconds that the engine has to give its memory back; the server gives up after 30."""


class TritonPythonModel:
    """Triton calls initialize, execute and finalize."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine's process and wait until it has generated something."""
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        if config["max_batch_size"] != 0 or [group["count"] for group in config["instance_group"]] != [1]:
            raise pb.TritonModelException(
                "config.pbtxt: expected max_batch_size 0 and one instance; run triton-repository"
            )
        self._outputs = {o["name"]: pb.triton_string_to_numpy(o["data_type"]) for o in config["output"]}
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        folder = os.path.join(args["model_repository"], args["model_version"])
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._senders: dict[int, Any] = {}
        self._dead = ""
        self._closing = False
        self._server = os.getppid()
        self._start(parameters.pop("python", "python3"), folder, parameters)
        self._metrics: dict[str, Any] = {}
        self._counted: dict[str, float] = {}
        ready = self._first_message()
        self._families = {
            name: pb.MetricFamily(name=name, description=text, kind=getattr(pb.MetricFamily, kind))
            for name, kind, text in ready["metrics"]
        }
        self._measure(ready["values"])
        for target in (self._read, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Pass requests on; their responses come later, from :meth:`_read`."""
        for request in requests:
            sender = request.get_response_sender()
            number = next(self._numbers)
            with self._lock:
                dead = self._dead
                if not dead:
                    self._senders[number] = sender
            if dead:
                self._fail(sender, "UNAVAILABLE", dead)
                continue
            try:
                inputs = {tensor.name(): _values(tensor.as_numpy()) for tensor in request.inputs()}
                parameters = json.loads(request.parameters())
                self._tell(
                    op="submit", number=number, id=str(request.request_id()), inputs=inputs, parameters=parameters
                )
            except Exception as e:
                self._finish(number, "INTERNAL", f"the request could not be passed on: {e}")

    def finalize(self) -> None:
        """End the engine's process; Triton has waited for the requests that ran."""
        self._closing = True
        try:
            self._tell(op="close")
            self._process.wait(CLOSE)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def is_ready(self) -> bool:
        """For servers that ask; Triton 2.51 does not, see :meth:`_engine_died`."""
        return not self._dead

    # --- the engine's process ---------------------------------------------------------------------------------------

    def _start(self, python: str, folder: str, parameters: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        given = {
            "protocol": PROTOCOL,
            "socket": theirs.fileno(),
            "server": self._server,
            "shared_memory": _shared_memory(),
            "settings": parameters,
        }
        command = [python, "-m", "trtllm_shadowkv.triton.worker", folder, json.dumps(given)]
        try:
            # Away from the terminal: an interrupt of the server is answered by finalize.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as e:
            raise pb.TritonModelException(f"the engine's process cannot be started with {python}: {e}") from e
        finally:
            theirs.close()
        self._lines = self._socket.makefile("r", encoding="utf-8")

    def _first_message(self) -> dict[str, Any]:
        line = self._lines.readline()
        message = json.loads(line) if line else {"op": "dead", "reason": "its messages are in the server's log"}
        if message["op"] != "ready":
            code = self._process.wait()
            raise pb.TritonModelException(f"the engine's process ended with {code}: {message['reason']}")
        return dict(message)

    def _tell(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._telling:
            self._socket.sendall(data)

    def _read(self) -> None:
        reason = "its messages are in the server's log"
        try:
            for line in self._lines:
                message = json.loads(line)
                if message["op"] == "dead":
                    reason = message["reason"]
                else:
                    self._handle(message)
        except Exception as e:  # requests must not be left waiting
            reason = f"{type(e).__name__}: {e}"
        if not self._closing:
            self._engine_died(reason)

    def _handle(self, message: dict[str, Any]) -> None:
        """Pass a message on to the server; what it will not take ends that request and no other."""
        try:
            if message["op"] == "response":
                self._respond(message)
            elif message["op"] == "error":
                self._finish(message["number"], message["code"], message["text"])
            elif message["op"] == "metrics":
                self._measure(message["values"])
        except Exception as e:
            pb.Logger.log_error(f"{self._name}: {message['op']}: {type(e).__name__}: {e}")
            if "number" in message:
                self._tell(op="cancel", number=message["number"])

    def _watch(self) -> None:
        """Tell the engine's process of requests that were cancelled; end with the server."""
        told: set[int] = set()
        last = -1
        while not self._closing:
            time.sleep(POLL)
            if os.getppid() != self._server:  # it was killed: nobody will call finalize
                os._exit(1)
            running = set(list(self._senders))
            told &= running
            # In turn, some at a time: each question goes to the server and back.
            left = sorted(running - told)
            after = [number for number in left if number > last]
            for number in (after + left)[: min(ASKED, len(left))]:
                last = number
                with self._lock:  # the server falls when a sender is asked after its final response
                    sender = self._senders.get(number)
                    cancelled = sender is not None and sender.is_cancelled()
                if cancelled:
                    told.add(number)
                    try:
                        self._tell(op="cancel", number=number)
                    except OSError:  # it died: _read ends all requests
                        return

    def _engine_died(self, reason: str) -> None:
        """End all requests and turn the model not ready.

        Triton 2.51 never asks the model. What it knows is to unload it, where the server was started with
        ``--model-control-mode=explicit`` (otherwise the call would end the server). A load starts the engine again.
        """
        try:
            code = self._process.wait(CLOSE)
        except subprocess.TimeoutExpired:  # it only closed its socket
            self._process.kill()
            code = self._process.wait()
        text = f"the engine is gone (exit code {code}): {reason}"
        with self._lock:
            self._dead = text
            senders, self._senders = list(self._senders.values()), {}
        for sender in senders:
            self._fail(sender, "UNAVAILABLE", text)
        pb.Logger.log_error(f"{self._name}: {text}")
        if _explicit(self._server):
            pb.unload_model(self._name)
        else:
            pb.Logger.log_error(f"{self._name}: it is not unloaded without --model-control-mode=explicit; restart it")

    # --- responses --------------------------------------------------------------------------------------------------

    def _respond(self, message: dict[str, Any]) -> None:
        number, last = message["number"], message["last"]
        with self._lock:
            sender = self._senders.pop(number, None) if last else self._senders.get(number)
        if sender is not None:
            tensors = [pb.Tensor(name, self._array(name, values)) for name, values in message["outputs"].items()]
            sender.send(pb.InferenceResponse(tensors), **({"flags": FINAL} if last else {}))

    def _finish(self, number: int, code: str, text: str) -> None:
        with self._lock:
            sender = self._senders.pop(number, None)
        if sender is not None:
            self._fail(sender, code, text)

    def _fail(self, sender: Any, code: str, text: str) -> None:
        error = pb.TritonError(text, getattr(pb.TritonError, code))
        sender.send(pb.InferenceResponse(error=error), flags=FINAL)

    def _array(self, name: str, values: list[Any]) -> Any:
        """[1, number of values]: the first dimension is the batch."""
        dtype = self._outputs[name]
        if dtype == np.object_:
            values = [value.encode() for value in values]
        return np.array([values], dtype=dtype)

    def _measure(self, values: list[list[Any]]) -> None:
        for name, labels, value in values:
            key = f"{name}{sorted(labels.items())}"
            if key not in self._metrics:
                self._metrics[key] = self._families[name].Metric(labels={"model": self._name, **labels})
            metric = self._metrics[key]
            if name.endswith("_total"):
                metric.increment(value - self._counted.get(key, 0))
                self._counted[key] = value
            else:
                metric.set(value)


def _values(array: Any) -> list[Any]:
    """A tensor's elements for JSON; bytes that are no UTF-8 become lone surrogates, which the other side refuses."""
    flat = array.reshape(-1).tolist()
    return [v.decode("utf-8", "surrogateescape") if isinstance(v, bytes) else v for v in flat]


def _environment() -> dict[str, str]:
    """The server's environment, without the libraries that nvidia-pytriton brings for the server alone."""
    environment = dict(os.environ)
    paths = environment.pop("LD_LIBRARY_PATH", "").split(":")
    kept = [path for path in paths if path and not path.rstrip("/").endswith("nvidia_pytriton.libs")]
    return {**environment, "LD_LIBRARY_PATH": ":".join(kept)} if kept else environment


def _shared_memory() -> list[str]:
    """Files of the server's shared memory that this process maps; a server that is killed leaves them behind."""
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "/dev/shm/" in line})


def _explicit(server: int) -> bool:
    with open(f"/proc/{server}/cmdline") as command:
        return "--model-control-mode\0explicit" in command.read().replace("=", "\0")
