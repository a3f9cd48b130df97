"""What the compiled library is made of, seen from outside: no GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_shadowkv import library, names

ROOT = Path(__file__).parents[2]
C_API = ROOT / "plugins/state/c_api.h"
ARCHITECTURES = {"sm_80", "sm_90a", "sm_100a", "sm_120"}


@pytest.fixture(scope="module")
def path() -> Path:
    return library.load().path


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_kernels_are_compiled_for_every_architecture(path: Path) -> None:
    # Each cubin carries the options it was compiled with.
    compiled = re.findall(rb"-arch (sm_\w+)", path.read_bytes())
    assert {name.decode() for name in compiled} == ARCHITECTURES


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_all_loads_of_the_gather_are_in_flight_before_its_first_store(path: Path, architecture: str) -> None:
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None, "triton, which torch brings, has the disassembler"
    cuobjdump = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
    code = output(cuobjdump, "-sass", "-arch", architecture, "-fun", gather_symbol(path), path)
    accesses = re.findall(r"\b(LDG|STG)\.E(?:\.\w+)*\.128\b", code)
    assert accesses == ["LDG"] * 8 + ["STG"] * 8


def gather_symbol(path: Path) -> str:
    found = re.search(rb"_ZN15trtllm_shadowkv7kernels\w+gatherKernel\w+", path.read_bytes())
    assert found is not None
    return found[0].decode()


def test_only_the_c_api_is_exported(path: Path) -> None:
    declared = set(re.findall(r"TSK_API .*?\b(tsk_\w+)\(", C_API.read_text()))
    exported = {line.split()[-1] for line in output("nm", "-D", "--defined-only", path).splitlines()}
    assert exported == declared | {"getCreators", "setLoggerFinder"}  # what TensorRT looks for
    assert len(declared) == 31


def test_the_cuda_runtime_is_inside(path: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", path))
    assert needed
    assert not [name for name in needed if re.search("cuda|nvinfer|torch", name)]


def test_the_header_is_plain_c_and_its_structure_is_pythons(tmp_path: Path) -> None:
    fields = [name for name, _ in library._Device._fields_]
    source = tmp_path / "layout.c"
    prints = "\n".join(f'    printf("%zu\\n", offsetof(tsk_device, {name}));' for name in fields)
    source.write_text(
        f'#include "{C_API}"\n#include <stddef.h>\n#include <stdio.h>\n\nint main(void)\n{{\n{prints}\n'
        '    printf("%zu\\n", sizeof(tsk_device));\n    return 0;\n}\n'
    )
    program = tmp_path / "layout"
    output("cc", "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-o", program, source)
    expected = [getattr(library._Device, name).offset for name in fields] + [ctypes.sizeof(library._Device)]
    assert [int(line) for line in output(program).split()] == expected


def test_statuses_are_pythons() -> None:
    values = dict(re.findall(r"TSK_(\w+) = (\d)", C_API.read_text()))
    for name in ("OK", "INVALID_ARGUMENT", "NO_DRIVER", "NO_DEVICE"):
        assert int(values[name]) == getattr(library, f"_{name}")


def test_generated_names_compile_to_the_values_of_names_py(tmp_path: Path) -> None:
    header = tmp_path / "generated/names.h"
    generate = (sys.executable, "-I", ROOT / "cmake/generate_names.py", ROOT / "trtllm_shadowkv/names.py", header)
    output(*generate)
    assert header.read_text() == names.cpp_header()

    scalars = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert {"DOMAIN", "LANDMARK_TOPK", "LOGITS"} <= set(scalars)
    source = tmp_path / "names.cpp"
    prints = "\n".join(f"    std::puts(trtllm_shadowkv::names::k{name});" for name in scalars)
    source.write_text(
        f'#include "{header}"\n#include <cstdio>\n\nint main()\n{{\n{prints}\n'
        "    for (char const* name : trtllm_shadowkv::names::kATTRIBUTE_NAMES)\n        std::puts(name);\n}\n"
    )
    program = tmp_path / "names"
    output("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", program, source)
    assert output(program).splitlines() == [*scalars.values(), *names.ATTRIBUTES]

    written = header.stat().st_mtime_ns
    output(*generate)  # the same text: the file stays, and nothing is compiled again
    assert header.stat().st_mtime_ns == written
