"""Plugins of a compiled library, driven as TensorRT drives them before an engine runs: no TensorRT, no GPU.

harness.cpp is compiled against TensorRT's headers, which are looked for as CMake looks for them.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.emulator import build
from tests.plugins.tensorrt.kinds import (
    CField,
    Creator,
    CTensor,
    Field,
    Logger,
    Phase,
    Tensor,
    Type,
    c_field,
    c_tensor,
    fields_of,
)

SOURCE = Path(__file__).with_name("harness.cpp")


class HeadersMissing(Exception):
    """What harness.cpp is compiled with is not on this machine."""


class NoPlugins(Exception):
    """The library exports no plugins: TensorRT's headers were not there when it was compiled."""


def include_folders() -> list[Path]:
    """TensorRT's headers and CUDA's.

    Raises:
        HeadersMissing: there are none.
    """
    try:
        return [build.tensorrt_include(), build.cuda_include()]
    except build.BuildError as e:
        raise HeadersMissing(str(e)) from e


def compile_harness(folder: Path) -> Path:
    """harness.cpp as a shared object in ``folder``.

    Raises:
        HeadersMissing: see :func:`include_folders`; or there is no g++.
    """
    folders = include_folders()
    if shutil.which("g++") is None:
        raise HeadersMissing("no g++ on this machine")
    target = folder / "harness.so"
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [word for f in folders for word in ("-isystem", str(f))]
    done = subprocess.run([*command, str(SOURCE), "-o", str(target), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


class Harness:
    """A library with plugins. What they log is kept until :meth:`take_log`."""

    def __init__(self, harness: Path, library: Path) -> None:
        """Load ``library`` and give it a logger.

        Raises:
            NoPlugins: it has none.
            OSError: it cannot be loaded.
        """
        self._api = ctypes.CDLL(str(harness))
        for name in ("open", "create", "clone", "attach", "answer"):
            getattr(self._api, f"harness_{name}").restype = ctypes.c_void_p
        for name in ("creator", "capabilities", "core", "serialized", "output_shapes"):
            getattr(self._api, f"harness_{name}").restype = ctypes.c_char_p
        self._api.harness_workspace.restype = ctypes.c_int64
        opened = self._api.harness_open(str(library).encode())
        if not opened:
            why = self._answer()
            raise OSError(why) if why else NoPlugins(f"{library} has no plugins: it was compiled without TensorRT")
        self._library = ctypes.c_void_p(opened)
        self.set_logger(Logger.COLLECTS)

    def _answer(self) -> str:
        return (ctypes.string_at(self._api.harness_answer()) or b"").decode()

    def set_logger(self, logger: Logger) -> None:
        """Call setLoggerFinder."""
        self._api.harness_set_logger(self._library, int(logger))

    def take_log(self) -> list[str]:
        """What was logged since the last call, each ``severity line``; errors are of severity 1."""
        count = self._api.harness_take_log(self._library)
        text: bytes = ctypes.string_at(self._api.harness_answer(), count)
        return text.decode().split("\0")[:-1]

    def creators(self) -> list[Creator]:
        """All creators; asserts that getCreators gives the same ones each time."""
        count = self._api.harness_creator_count(self._library)
        assert count >= 0
        found = []
        for index in range(count):
            first, *fields = self._api.harness_creator(self._library, index).decode().splitlines()
            kind, major, name, version, namespace = first.split("|")
            found.append(Creator((kind, int(major)), name, version, namespace, fields_of(fields)))
        return found

    def create(self, name: str, fields: Iterable[Field] | None, phase: Phase = Phase.BUILD) -> Plugin | None:
        """What createPlugin returns; ``fields`` None: a null pointer."""
        index = [c.name for c in self.creators()].index(name)
        keep = [(f, None if f.data is None else ctypes.create_string_buffer(f.data, len(f.data))) for f in fields or ()]
        array = (CField * len(keep))(*(c_field(f, data) for f, data in keep))
        given = None if fields is None else array
        made = self._api.harness_create(self._library, index, int(phase), len(keep), given)
        # The creator must have copied what it needs.
        for _, data in keep:
            if data is not None:
                ctypes.memset(data, 0xEE, len(data))
        return Plugin(self._api, made) if made else None


class Plugin:
    """An IPluginV3, destroyed with this object."""

    def __init__(self, api: ctypes.CDLL, plugin: int) -> None:
        self._api = api
        self._plugin = ctypes.c_void_p(plugin)

    def __del__(self) -> None:
        self._api.harness_destroy(self._plugin)

    def clone(self) -> Plugin:
        return Plugin(self._api, self._other("clone"))

    def attach(self) -> Plugin:
        """What attachToContext returns."""
        return Plugin(self._api, self._other("attach"))

    def _other(self, how: str) -> int:
        made = getattr(self._api, f"harness_{how}")(self._plugin)
        assert made and made != self._plugin.value
        return int(made)

    @property
    def capabilities(self) -> list[str]:
        """``kind|major`` of the plugin, its core, build and runtime, and of a capability that does not exist."""
        text: bytes = self._api.harness_capabilities(self._plugin)
        return text.decode().splitlines()

    @property
    def core(self) -> tuple[str, ...]:
        """Name, version, namespace."""
        return tuple(self._api.harness_core(self._plugin).decode().split("|"))

    @property
    def serialized(self) -> list[Field]:
        """getFieldsToSerialize."""
        return fields_of(self._api.harness_serialized(self._plugin).decode().splitlines())

    @property
    def output_count(self) -> int:
        return int(self._api.harness_output_count(self._plugin))

    @property
    def tactics(self) -> int:
        """How many tactics there are; asserts that they can be listed."""
        count = int(self._api.harness_tactics(self._plugin))
        assert count >= 0
        return count

    def set_tactic(self) -> int:
        return int(self._api.harness_set_tactic(self._plugin))

    def output_types(self, inputs: Sequence[Type]) -> list[Type] | None:
        """Types of the outputs, or None where getOutputDataTypes fails."""
        out = (ctypes.c_int32 * self.output_count)()
        given = (ctypes.c_int32 * len(inputs))(*inputs)
        status = self._api.harness_output_types(self._plugin, len(inputs), given, len(out), out)
        return [Type(t) for t in out] if status == 0 else None

    def output_shapes(self, shapes: str) -> str | None:
        """``N,512;B,2,16`` for inputs of the shapes ``N,768;N;B``, or None where getOutputShapes fails."""
        answer: bytes = self._api.harness_output_shapes(self._plugin, shapes.encode(), self.output_count)
        status, text = answer.decode().split("|")
        return text if int(status) == 0 else None

    def supports(self, position: int, tensors: Sequence[Tensor]) -> bool:
        """supportsFormatCombination."""
        return bool(self._api.harness_supports(self._plugin, position, *self._given(tensors)))

    def configure(self, tensors: Sequence[Tensor]) -> int:
        return int(self._api.harness_configure(self._plugin, *self._given(tensors)))

    def workspace(self, tensors: Sequence[Tensor]) -> int:
        """Bytes."""
        return int(self._api.harness_workspace(self._plugin, *self._given(tensors)))

    def on_shape_change(self, tensors: Sequence[Tensor]) -> int:
        return int(self._api.harness_on_shape_change(self._plugin, *self._given(tensors)))

    def enqueue(self, tensors: Sequence[Tensor], stream: int, addresses: Sequence[int] | None = None) -> int:
        """enqueue; ``addresses`` of the tensors, None: all memory is null."""
        memory = None if addresses is None else (ctypes.c_void_p * len(tensors))(*addresses)
        return int(self._api.harness_enqueue(self._plugin, *self._given(tensors), memory, ctypes.c_void_p(stream)))

    def _given(self, tensors: Sequence[Tensor]) -> tuple[int, int, ctypes.Array[CTensor]]:
        """Inputs, outputs, and both: ``tensors`` has the outputs last."""
        return len(tensors) - self.output_count, self.output_count, (CTensor * len(tensors))(*map(c_tensor, tensors))
