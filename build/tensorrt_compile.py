"""The process that compiles: ``python -m trtllm_shadowkv.build.tensorrt_compile JOB`` with :class:`Job` as JSON.

TensorRT aborts its process where something is wrong with the machine, so it never runs in the caller's.
:mod:`trtllm_shadowkv.build.tensorrt_engine` starts this one and reads the lines of JSON on its standard output, each
``[kind, value]``: ``progress`` (done, of :data:`STEPS`), ``message`` (text for the user), ``version`` (TensorRT's; the
last line where all went well), ``failed`` (what could not be done), ``missing`` and ``refused`` (text of a
MissingDependencyError, of a ConfigError). TensorRT's log goes to standard error, errors marked with :data:`ERROR`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_shadowkv import names
from trtllm_shadowkv.build import tensorrt_modules, timing_cache
from trtllm_shadowkv.errors import ConfigError, MissingDependencyError

STEPS = 1000
ERROR = "[E] "
_PR_SET_PDEATHSIG = 1
_CONTEXT_LOGITS = 128
"""Positions of a prompt whose logits one context pass may return."""

Say = Callable[[str, Any], None]


@dataclass(frozen=True)
class Job:
    """What to compile.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``.
        library: the plugin library.
        parent: process whose death ends this one.
        onnx, engine: the file to read and the one to write; None: only see whether TensorRT and the library load.
        compute_capabilities: of the GPUs to compile for (80, 120); empty: of this machine's.
        timing_cache: file that is read and written, or None.
        verbose: log what TensorRT says on the way, not only warnings and errors.
    """

    backend: str
    library: str
    parent: int
    onnx: str | None = None
    engine: str | None = None
    max_batch_size: int = 1
    max_num_tokens: int = 1
    compute_capabilities: tuple[int, ...] = ()
    timing_cache: str | None = None
    verbose: bool = False


class _Failed(Exception):
    """What could not be done; why is in the log."""


def shapes(batch: int, tokens: int) -> tuple[dict[str, tuple[int, int, int]], ...]:
    """Smallest, likeliest and largest length of each input: profile 0 of generation passes, 1 of context passes.

    Args:
        batch: sequences in a generation pass, one token each.
        tokens: in one context pass, of one sequence.
    """
    rows, stretch = (1, batch, batch), (1, tokens, tokens)
    generation = dict.fromkeys((names.INPUT_IDS, names.POSITION_IDS, names.LAST_TOKEN_IDS, names.SEQUENCE_SLOTS), rows)
    context = {
        names.INPUT_IDS: stretch,
        names.POSITION_IDS: stretch,
        names.LAST_TOKEN_IDS: (1, 1, min(_CONTEXT_LOGITS, tokens)),
        names.SEQUENCE_SLOTS: (1, 1, 1),
    }
    return generation, context


def main() -> None:
    """Do the job of ``sys.argv[1]``; leave without the interpreter's teardown, which TensorRT does not survive."""
    data = json.loads(sys.argv[1])
    job = Job(**{**data, "compute_capabilities": tuple(data["compute_capabilities"])})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for us ends us
    _die_with(job.parent)
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no line of ours

    def say(kind: str, value: Any) -> None:
        with suppress(OSError):  # nobody reads any more
            lines.write(json.dumps([kind, value]) + "\n")
            lines.flush()

    code = 1
    try:
        say("version", run(job, say))
        code = 0
    except MissingDependencyError as e:
        say("missing", str(e))
    except ConfigError as e:
        say("refused", str(e))
    except _Failed as e:
        say("failed", str(e))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be said
        os._exit(1)


def run(job: Job, say: Say) -> str:
    """Do the job and return TensorRT's version."""
    trt = tensorrt_modules.load(job.backend)
    title = tensorrt_modules.PRODUCTS[job.backend].title
    logger = _logger(trt, job.verbose)
    registry = trt.get_plugin_registry()
    registry.load_library(job.library)
    for name in (names.LANDMARK_TOPK, names.KEY_RECONSTRUCT, names.SPARSE_ATTENTION):
        if registry.get_creator(name, names.PLUGIN_VERSION, names.DOMAIN) is None:
            raise MissingDependencyError(
                f"{job.library} has no plugin {name}, or {title} {trt.__version__} does not accept it",
                "a plugin library that was compiled with TensorRT's headers",
                "install kernel-lens (pip install --no-deps kernel-lens==2.0.1) and then the package again",
            )
    capabilities = [_compute_capability(trt, title, number) for number in job.compute_capabilities]
    if job.onnx is not None:
        _compile(trt, logger, job, capabilities, say)
    return str(trt.__version__)


def _compile(trt: Any, logger: Any, job: Job, capabilities: list[Any], say: Say) -> None:
    assert job.onnx is not None and job.engine is not None
    builder = trt.Builder(logger)
    # Not run: TensorRT from 11 on, where every network is strongly typed and the flag may be gone.
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job.onnx):  # the path says where the weights are
        for i in range(parser.num_errors):
            print(f"{ERROR}{parser.get_error(i).desc()}", file=sys.stderr, flush=True)
        raise _Failed(f"its ONNX parser refuses {names.ONNX_FILE}")
    config = builder.create_builder_config()
    config.max_aux_streams = 0  # a plugin finds its state by the stream that it is called on
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for i, capability in enumerate(capabilities):
            config.set_compute_capability(capability, i)
    for inputs in shapes(job.max_batch_size, job.max_num_tokens):
        profile = builder.create_optimization_profile()
        for name, (least, likely, most) in inputs.items():
            profile.set_shape(name, (least,), (likely,), (most,))
        config.add_optimization_profile(profile)
    cache = None if job.timing_cache is None else Path(job.timing_cache)
    if cache is not None:
        _use_timing_cache(config, cache, say)
    # Not run: versions that have no IProgressMonitor; they show no progress.
    if hasattr(trt, "IProgressMonitor"):
        config.progress_monitor = _monitor(trt, say)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise _Failed("it builds no engine")
    with Path(job.engine).open("wb") as file:
        file.write(serialized)
        file.flush()
        os.fsync(file.fileno())
    if cache is not None:
        _keep_timing_cache(config, cache, say)


def _compute_capability(trt: Any, title: str, number: int) -> Any:
    known = trt.ComputeCapability.__members__
    if f"SM{number}" not in known:
        choices = ", ".join(name.removeprefix("SM") for name in known if name.startswith("SM"))
        raise ConfigError(f"compute capability {number}", f"one that {title} {trt.__version__} compiles for: {choices}")
    return known[f"SM{number}"]


def _logger(trt: Any, verbose: bool) -> Any:
    severity = trt.ILogger.Severity
    marks = {severity.INTERNAL_ERROR: ERROR, severity.ERROR: ERROR, severity.WARNING: "[W] ", severity.INFO: "[I] "}

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, text: str) -> None:
            mark = marks.get(level)
            if mark is not None and (verbose or level != severity.INFO):
                print(mark + " ".join(text.split()), file=sys.stderr, flush=True)

    return Logger()


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0
    covered: float = 0.0
    """Part of the step that runs, which the phases below it that have ended stand for."""


class Phases:
    """How much of nested phases is done, from what TensorRT's progress monitor hears.

    How many phases a step has below it is not said: each stands for half of what is left of the step.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Phase] = {}
        self._shown = 0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        if name in self._open:  # it would be its own parent, or have children of before
            self.finish(name)
        if name not in {phase.parent for phase in self._open.values()}:
            self._open[name] = _Phase(parent if parent in self._open else None, max(steps, 1))

    def step(self, name: str, step: int) -> None:
        phase = self._open.get(name)
        if phase is not None:
            phase.done, phase.covered = max(phase.done, min(step + 1, phase.steps)), 0.0

    def finish(self, name: str) -> None:
        phase = self._open.pop(name, None)
        if phase is not None and phase.parent in self._open:
            self._open[phase.parent].covered += (1 - self._open[phase.parent].covered) / 2

    def news(self) -> int | None:
        """Steps of :data:`STEPS` that are done; None: no more than were last time."""
        done = int(STEPS * self._part(None))
        if done <= self._shown:
            return None
        self._shown = done
        return done

    def _part(self, parent: str | None) -> float:
        """Of the phases directly below ``parent``, the one that is furthest."""
        furthest = 0.0
        for name, phase in self._open.items():
            if phase.parent == parent:
                here = phase.covered + (1 - phase.covered) / 2 * self._part(name)
                furthest = max(furthest, (phase.done + here) / phase.steps)
        return min(furthest, 1.0)


def _monitor(trt: Any, say: Say) -> Any:
    phases = Phases()

    def show() -> None:
        done = phases.news()
        if done is not None:
            say("progress", done)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            show()
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()


def _use_timing_cache(config: Any, path: Path, say: Say) -> None:
    content = timing_cache.read(path, say)
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        say("message", f"the timing cache {path} is of another machine and ignored")
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _keep_timing_cache(config: Any, path: Path, say: Say) -> None:
    cache = config.get_timing_cache()
    if cache is not None:
        timing_cache.write(path, bytes(cache.serialize()), say)


if __name__ == "__main__":
    main()
