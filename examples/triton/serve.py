"""Triton Inference Server from PyPI, for a machine without NVIDIA's container.

python3 -m venv DIR && DIR/bin/pip install --no-deps -r requirements/triton-server.txt
python examples/triton/serve.py REPOSITORY --venv DIR [-- more options of tritonserver]

The package nvidia-pytriton carries the server with its python backend; pytriton itself is not used. Each model.py runs
in the environment DIR, whichever this script runs in. An interrupt or SIGTERM is passed on to the server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Finds pytriton without importing it, which would need packages that the server does not.
_ASK = """
import importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "libraries": [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"],
    "multiarch": sysconfig.get_config_var("MULTIARCH") or "",
    "pytriton": spec.submodule_search_locations[0] if spec else None,
}))
"""
_SHARED_MEMORY = "shm-region-prefix-name="


class ServeError(Exception):
    """The server cannot be started as asked; one line that says why and what to do."""


def server_command(
    repository: Path,
    venv: Path,
    backends: Path,
    *,
    address: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    options: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """What starts the server, for :class:`subprocess.Popen`.

    Args:
        repository: folder with a folder for each model; those with a config.pbtxt are loaded.
        venv: environment with nvidia-pytriton and NumPy 1.26, whose Python runs each model.py.
        backends: a folder of the caller's, to be removed after the server; the python backend is linked into it.
        address: where all three ports listen.
        options: more options of tritonserver; where one is ``--load-model`` only that is loaded.

    Returns:
        command and environment, which is this process's with other search paths.

    Raises:
        ServeError: the environment lacks something, or the repository has no model.
    """
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise ServeError(f"{repository} holds no model: a folder with config.pbtxt was expected in it")
    for path in (repository, backends):
        if not re.fullmatch(r"[\w/.+@,=:~%-]+", str(path)):  # its python backend ends, and it waits for it forever
            raise ServeError(f"the path {str(path)!r} has a space or another character that Triton's shell would split")
    python = _interpreter(venv)
    version = python["version"]
    if python["pytriton"] is None:
        raise ServeError(
            f"{venv} has no nvidia-pytriton: {venv}/bin/pip install --no-deps -r requirements/triton-server.txt"
        )
    server = Path(python["pytriton"]) / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        known = sorted((path.name for path in stub.parents[1].glob("3.*")), key=lambda name: int(name[2:]))
        raise ServeError(f"{venv} has Python {version}; nvidia-pytriton's server is for one of {', '.join(known)}")

    backend = backends / "python"
    backend.mkdir(parents=True, exist_ok=True)
    parts = server / "backends" / "python"
    for part in (parts / "libtriton_python.so", parts / "triton_python_backend_utils.py", stub):
        link = backend / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)

    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,{_SHARED_MEMORY}triton_{secrets.token_hex(6)}_",
        f"--http-address={address}",
        f"--http-port={http_port}",
        f"--grpc-address={address}",
        f"--grpc-port={grpc_port}",
        f"--metrics-address={address}",
        f"--metrics-port={metrics_port}",
        "--disable-auto-complete-config",
        "--model-control-mode=explicit",  # lets a model whose engine died unload itself
    ]
    if not any(option.split("=")[0] == "--load-model" for option in options):
        command += [f"--load-model={model}" for model in models]  # with * any other folder is an error
    if not Path("/dev/nvidiactl").exists():
        command += ["--allow-gpu-metrics=false", "--allow-cpu-metrics=false"]
    libraries = [_libpython(venv, python), str(server.parents[1] / "nvidia_pytriton.libs")]
    paths = {
        # The backend's stub takes its packages from the environment of the first python3.
        "PATH": os.pathsep.join(filter(None, [str(venv.absolute() / "bin"), os.environ.get("PATH")])),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")])),
    }
    return [*command, *options], {**os.environ, **paths}


def remove_shared_memory(command: Sequence[str]) -> None:
    """Remove what a server that was killed left in shared memory.

    Args:
        command: what started it, see :func:`server_command`; it and its python backend's processes have ended.
    """
    for argument in command:
        _, found, prefix = argument.partition(_SHARED_MEMORY)
        if found:
            for segment in Path("/dev/shm").glob(f"{prefix}*"):
                segment.unlink(missing_ok=True)


def _interpreter(venv: Path) -> dict[str, str]:
    """What an environment's Python says about itself."""
    python = venv / "bin" / "python3"
    if not python.exists():
        raise ServeError(f"{venv} is no environment: python3 -m venv {venv}")
    asked = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True)
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines() or [f"status {asked.returncode}"]
        raise ServeError(f"{python} fails: {lines[-1]}")
    return dict(json.loads(asked.stdout))


def _libpython(venv: Path, python: dict[str, str]) -> str:
    """The folder of the shared library that the stub links to."""
    name = f"libpython{python['version']}.so.1.0"
    for folder in python["libraries"]:
        for path in (Path(folder), Path(folder) / python["multiarch"]):
            if (path / name).exists():
                return str(path)
    raise ServeError(
        f"the Python of {venv} has no {name}: make the environment with one that was built with --enable-shared "
        f"(Debian's needs its package libpython{python['version']})"
    )


def _check_ports(address: str, ports: Sequence[int]) -> None:
    """See that the server can listen there; it would otherwise find out after it has loaded all models."""
    held: list[socket.socket] = []
    try:
        for port in ports:
            held.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held[-1].bind((address, port))
                held[-1].listen()
            except (OSError, OverflowError) as e:
                reason = e.strerror if isinstance(e, OSError) else str(e)
                raise ServeError(f"{address}:{port} cannot be listened on: {reason}") from e
    finally:
        for one in held:
            one.close()


def serve(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the server until it ends; signals that ask to stop are passed on to it.

    Returns:
        its exit status, or 128 and the number of the signal that killed it.
    """
    # In a session of its own: an interrupt at the terminal would else reach the python backend's processes too.
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: server.send_signal(received))
        status = server.wait()
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait()
        # The python backend's processes may outlive a server that was killed, or interrupted while it loaded.
        if server.returncode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
        remove_shared_memory(command)
    return status if status >= 0 else 128 - status


def main() -> None:
    arguments = sys.argv[1:]
    options: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        description="Start Triton Inference Server from PyPI's nvidia-pytriton.",
        usage="%(prog)s REPOSITORY --venv DIR [options] [-- more options of tritonserver]",
    )
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="folder with a folder for each model")
    parser.add_argument("--venv", type=Path, required=True, metavar="DIR", help="environment with nvidia-pytriton")
    parser.add_argument("--address", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port, metavar="PORT", help=f"default: {port}")
    asked = parser.parse_args(arguments)
    ports = {"http_port": asked.http_port, "grpc_port": asked.grpc_port, "metrics_port": asked.metrics_port}
    try:
        with tempfile.TemporaryDirectory(prefix="triton-backends-") as backends:
            command, environment = server_command(
                asked.repository, asked.venv, Path(backends), address=asked.address, options=options, **ports
            )
            _check_ports(asked.address, list(ports.values()))
            status = serve(command, environment)
    except (ServeError, OSError) as e:
        sys.exit(f"{parser.prog}: {e}")
    sys.exit(status)


if __name__ == "__main__":
    main()
