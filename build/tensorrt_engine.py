"""``rank0.engine``: the ONNX file of an engine directory compiled by TensorRT or TensorRT-RTX, in a process of its own.

:func:`prepare` refuses what cannot be compiled here before anything is written; its :class:`Target` compiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from trtllm_shadowkv import library, names
from trtllm_shadowkv.build import tensorrt_modules
from trtllm_shadowkv.build.tensorrt_compile import ERROR, STEPS, Job
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.errors import ConfigError, EngineError, MissingDependencyError

_LOG_LINES = 400  # kept of a child's standard error
_SHOWN_LINES = 4  # of them, in an error's text: the first error, which is often the cause, and the last
_SHOWN_CHARACTERS = 300  # of each of these
_NO_REASON = re.compile("--- (Begin|End) node ---")

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Target:
    """What an engine is compiled by and for.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        version: TensorRT's.
        gpu_architecture: compute capability of this machine's GPU, ``9.0``, or of those asked for, ``8.0+12.0``.
        compute_capabilities: those asked for, (80, 120); empty: this machine's.
        library: file of the plugin library.
        library_version: its version.
        timing_cache: file of TensorRT's measurements on this kind of GPU; None: it takes none.
    """

    backend: str
    version: str
    gpu_architecture: str
    compute_capabilities: tuple[int, ...]
    library: Path
    library_version: str
    timing_cache: Path | None

    @property
    def record(self) -> dict[str, str | None]:
        """What the manifest says of the engine."""
        return {
            "backend": self.backend,
            "tensorrt": self.version,
            "gpu_architecture": self.gpu_architecture,
            "plugin_library": self.library_version,
        }

    def compile(
        self, directory: Path, build: BuildConfig, *, progress: Progress | None = None, verbose: bool = False
    ) -> None:
        """Compile the ONNX file of ``directory`` into ``rank0.engine`` beside it.

        Strongly typed, without auxiliary streams, with two optimisation profiles (0: generation passes, 1: context
        passes). The ONNX file is all that is read: neither onnx nor numpy is needed. Where it fails there is no
        engine file.

        Args:
            build: its max_batch_size and max_num_tokens are the engine's limits.
            progress: called with parts done and parts in all.
            verbose: write TensorRT's log to standard error.

        Raises:
            EngineError: TensorRT fails or dies, with the last errors of its log.
        """
        engine = directory / names.ENGINE_FILE
        engine.unlink(missing_ok=True)  # it may be a second name of another directory's
        job = Job(
            self.backend,
            str(self.library),
            os.getpid(),
            str(directory / names.ONNX_FILE),
            str(engine),
            build.max_batch_size,
            build.max_num_tokens,
            self.compute_capabilities,
            None if self.timing_cache is None else str(self.timing_cache),
            verbose,
        )
        try:
            _run(job, progress)
        except BaseException:
            engine.unlink(missing_ok=True)
            raise


def prepare(build: BuildConfig) -> Target | None:
    """Check that ``build.backend`` can compile here; None for ``onnx``, which compiles nothing.

    Raises:
        ConfigError: a dtype that the plugins do not have, or compute capabilities that are missing or too many.
        MissingDependencyError: no TensorRT, no plugin library, or no GPU where one is needed.
        EngineError: TensorRT dies when it is loaded.
    """
    backend, wanted = build.backend, build.compute_capabilities
    if wanted and backend != "tensorrt-rtx":
        raise ConfigError(
            f"compute_capabilities {', '.join(map(str, wanted))} with backend {backend!r}",
            "none",
            "TensorRT compiles for the GPU of its machine; only tensorrt-rtx compiles for others",
        )
    if backend == "onnx":
        return None
    if build.dtype == "float32":
        raise ConfigError(
            f"dtype is {build.dtype!r} with backend {backend!r}",
            "float16 or bfloat16, the types of the plugins",
            "build with --dtype bfloat16",
        )
    for name, most in (("max_batch_size", 1024), ("max_seq_len", 1 << 21)):  # limits of a state
        value = getattr(build, name)
        if value is not None and value > most:
            raise ConfigError(f"{name} is {value} with backend {backend!r}", f"at most {most}, what the kernels take")
    tensorrt_modules.find(backend)
    plugins = library.load()
    architecture = "+".join(f"{number // 10}.{number % 10}" for number in wanted)
    gpu = ""
    if not wanted:
        gpu, architecture = _this_gpu(plugins, backend)
    path = plugins.path.resolve()
    version = _run(Job(backend, str(path), os.getpid()))
    cache = _timing_cache(version, gpu, architecture) if backend == "tensorrt" else None
    return Target(backend, version, architecture, wanted, path, plugins.version, cache)


def _this_gpu(plugins: library.Library, backend: str) -> tuple[str, str]:
    """Name and compute capability of the GPU that TensorRT would compile for.

    Raises:
        ConfigError: there is none, and compute capabilities can stand in for it.
        MissingDependencyError: there is none.
    """
    try:
        device = plugins.device_info()
    except MissingDependencyError as e:
        if backend == "tensorrt-rtx":
            raise ConfigError(
                f"there is no GPU to compile for ({e})",
                "the compute capabilities to compile for",
                "say them: --compute-capability 80 --compute-capability 120",
            ) from e
        raise MissingDependencyError(
            f"there is no GPU to compile for ({e})",
            "the GPU that the engine is to run on",
            "build with --backend onnx here, then on a machine with that GPU: "
            "trtllm-shadowkv build --refresh ENGINE --backend tensorrt",
        ) from e
    major, minor = device.compute_capability
    return device.name, f"{major}.{minor}"


def _timing_cache(version: str, gpu: str, architecture: str) -> Path | None:
    """TensorRT-RTX has none. None also where this user has no folder for caches."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the rule of XDG: what is not absolute is as if not set
        folder = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(folder):
        return None
    name = re.sub(r"[^\w.]+", "-", f"{version}-{gpu}-{architecture}")
    return Path(folder) / "trtllm-shadowkv" / f"timing-tensorrt-{name}.cache"


def _run(job: Job, progress: Progress | None = None) -> str:
    """Do a job in a process of its own, and return TensorRT's version.

    Raises:
        MissingDependencyError: TensorRT or the plugins cannot be loaded.
        ConfigError: it does not know a compute capability.
        EngineError: it failed, or its process died.
    """
    product = tensorrt_modules.PRODUCTS[job.backend]
    failure = version = ""
    with tensorrt_modules.environment(job.backend) as variables, _child(job, variables) as child:
        for kind, text in child.events():
            if kind == "version":
                version = str(text)
            elif kind == "progress" and progress is not None:
                progress(text, STEPS)
            elif kind == "message":
                _log.warning(text)
            elif kind == "missing":
                raise MissingDependencyError(text)
            elif kind == "refused":
                raise ConfigError(text)
            elif kind == "failed":
                failure = text
        code = child.wait()
    if code == 0:
        if progress is not None:
            progress(STEPS, STEPS)
        return version
    failure = failure or (f"its process died of {_signal(-code)}" if code < 0 else "its process failed")
    reasons = child.errors()
    hint = "run again with --verbose to see all of its log" if job.onnx else "see whether TensorRT works by itself"
    if -code == signal.SIGKILL:
        hint = "the machine may have run out of memory: see the system's log"
    what = f"compile {names.ONNX_FILE}" if job.onnx else "start"
    raise EngineError(f"{product.title} could not {what}: {' | '.join([failure, *reasons])}", todo=hint)


class _Child:
    """A running child: its events, and the last lines of its standard error."""

    def __init__(self, process: subprocess.Popen[str], *, show: bool) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._reader = threading.Thread(target=self._read, args=(process.stderr, show), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str], show: bool) -> None:
        for line in stream:
            self._lines.append(line.rstrip())
            if show:
                sys.stderr.write(line)
                sys.stderr.flush()

    def events(self) -> Iterator[tuple[str, Any]]:
        """Each line of its standard output."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # cut off when it died
                kind, value = json.loads(line)
                yield kind, value

    def wait(self) -> int:
        """Its exit code, once it has ended and all it wrote is read."""
        code = self._process.wait()
        self._reader.join()
        return code

    def close(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def errors(self) -> list[str]:
        """Errors of the log; a line without a mark is what a library wrote by itself, when it gave up for instance."""
        lines = [line.removeprefix(ERROR).strip() for line in self._lines if line[:4] not in ("[W] ", "[I] ")]
        errors = [line for line in dict.fromkeys(lines) if line and not _NO_REASON.search(line)]
        shown = errors if len(errors) <= _SHOWN_LINES else [errors[0], *errors[1 - _SHOWN_LINES :]]
        return [line[:_SHOWN_CHARACTERS] for line in shown]


@contextlib.contextmanager
def _child(job: Job, variables: dict[str, str]) -> Iterator[_Child]:
    """A process with a job; when the block ends in whatever way, so does the process."""
    # It finds the modules where we do, and never in the folder that it happens to be started in.
    variables = {**variables, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trtllm_shadowkv.build.tensorrt_compile", json.dumps(asdict(job))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=variables,
    )
    child = _Child(process, show=job.verbose)
    try:
        yield child
    finally:
        child.close()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
