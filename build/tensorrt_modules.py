"""TensorRT's and TensorRT-RTX's Python modules: under which name they are here, and the libraries they load.

Both have two names: the full package's, and that of the bindings alone, which need the libraries beside them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_shadowkv.errors import MissingDependencyError


@dataclass(frozen=True)
class Product:
    """One of the two.

    Attributes:
        title: what messages call it.
        modules: names of its Python module, the first that is there wins.
        libraries: what the bindings load, in an order in which each finds what it needs.
        package: the Python package that may bring the libraries.
        action: how to get it.
    """

    title: str
    modules: tuple[str, ...]
    libraries: tuple[str, ...]
    package: str
    action: str


PRODUCTS = {
    "tensorrt": Product(
        "TensorRT",
        ("tensorrt", "tensorrt_bindings"),
        ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"),
        "tensorrt_libs",
        "install TensorRT 10.6: pip install tensorrt==10.6.0; or in a checkout scripts/pack_tensorrt.sh --build, and "
        "set LD_LIBRARY_PATH and PYTHONPATH as it prints",
    ),
    "tensorrt-rtx": Product(
        "TensorRT-RTX",
        ("tensorrt_rtx", "tensorrt_rtx_bindings"),
        ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"),
        "tensorrt_rtx_libs",
        "pip install --no-deps -r requirements/tensorrt.txt",
    ),
}
"""By the name of the backend."""


def find(backend: str) -> tuple[str, ...]:
    """Names under which the module of ``backend`` is installed, at least one.

    Raises:
        MissingDependencyError: none is.
    """
    product = PRODUCTS[backend]
    found = tuple(name for name in product.modules if _folder(name) is not None)
    if not found:
        raise MissingDependencyError(
            f"{product.title} is not installed", f"the Python module {' or '.join(product.modules)}", product.action
        )
    return found


def load(backend: str) -> Any:
    """Import the module of ``backend``.

    Its libraries are taken from the folders that LD_LIBRARY_PATH names now, also where it was set after the process
    had begun, then from where the loader looks.

    Raises:
        MissingDependencyError: none is installed, or none can be imported.
    """
    product, reasons = PRODUCTS[backend], []
    for name in find(backend):
        try:
            _preload(product.libraries)
            module = import_module(name)
        except (ImportError, OSError, RuntimeError) as e:
            reasons.append(f"{name}: {' '.join(str(e).split())}")
            continue
        if hasattr(module, "Builder"):
            return module
        reasons.append(f"{name}: it has no Builder")
    raise MissingDependencyError(
        f"{product.title} cannot be imported ({'; '.join(reasons)})",
        f"its libraries {', '.join(product.libraries)}, beside the bindings or on LD_LIBRARY_PATH",
        product.action,
    )


@contextlib.contextmanager
def environment(backend: str) -> Iterator[dict[str, str]]:
    """Variables of a process that is to import the module of ``backend``; it must end before the block does.

    The ONNX parser of TensorRT-RTX opens ``libtensorrt_rtx.so``, a name without a version that its wheel does not
    have, and aborts without it: a folder with a link of that name joins LD_LIBRARY_PATH for as long as the block runs.
    """
    variables = dict(os.environ)
    product = PRODUCTS[backend]
    versioned = product.libraries[0]
    plain = versioned.partition(".so")[0] + ".so"
    folder = _folder(product.package)
    if backend != "tensorrt-rtx" or folder is None or not (folder / versioned).is_file() or (folder / plain).exists():
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="trtllm-shadowkv-") as scratch:
        (Path(scratch) / plain).symlink_to(folder / versioned)
        paths = (variables.get("LD_LIBRARY_PATH"), scratch)
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in paths if p)
        yield variables


def _folder(module: str) -> Path | None:
    """Folder of an installed package; a plain folder that only has its name is none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: something put a module without a spec into sys.modules
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _preload(libraries: tuple[str, ...]) -> None:
    folders = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    for name in libraries:
        for folder in folders:
            if (folder / name).is_file():
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
                break
