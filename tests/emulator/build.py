"""Builds the library, or single sources of it, for the emulated GPU: g++ instead of nvcc, no CUDA runtime.

    python tests/emulator/build.py                             the library
    python tests/emulator/build.py --program test FILE ...     out/emulator/test of these .cu and .cpp files only
    python tests/emulator/build.py --library name FILE ...     out/emulator/name.so, for ctypes

Everything lands in out/emulator; what is newer than its sources is not built again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(os.path.abspath(__file__)).parent
ROOT = HERE.parent.parent
OUT = ROOT / "out" / "emulator"
LIBRARY = OUT / "libtrtllm_shadowkv_emulated.so"
EMULATOR = sorted(HERE.glob("*.cpp"))
FAST = {"barriers.cpp", "fibers.cpp", "products.cpp", "shared_memory.cpp", "tensor_cores.cpp"}
LIBRARY_SOURCES = ("kernels/**/*.cu", "kernels/**/*.cpp", "state/*.cpp", "tensorrt/**/*.cpp")
CHECKS = "alignment,bounds,shift,integer-divide-by-zero,null,signed-integer-overflow,float-cast-overflow"
TENSORRT_FOLDERS = ("/usr/include/x86_64-linux-gnu", "/usr/local/tensorrt/include")
SANITIZE = (f"-fsanitize={CHECKS}",)


class BuildError(RuntimeError):
    """A compiler said no; its words are the message."""


def cuda_include() -> Path:
    """The headers of the CUDA toolkit."""
    named = os.environ.get("CUDA_HOME")
    found = [Path(named) / "include"] if named else []
    found += [*_in_packages("nvidia/cu13/include"), Path("/usr/local/cuda/include")]
    return _folder_with("cuda_fp8.h", found, "a CUDA toolkit", "CUDA_HOME")


def tensorrt_include() -> Path:
    """TensorRT's headers, which its plugins need; looked for as CMake looks for them."""
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    found = [Path(named)] if named else []
    found += [*_in_packages("kernel_lens/include/tensorrt"), *map(Path, TENSORRT_FOLDERS)]
    return _folder_with("NvInfer.h", found, "TensorRT", "TENSORRT_INCLUDE_DIR")


def _in_packages(folder: str) -> list[Path]:
    installed = sorted((ROOT / ".venv/lib").glob(f"python3*/site-packages/{folder}"))
    return [*(p / folder for p in map(Path, sys.path)), *installed]


def _folder_with(file: str, folders: Sequence[Path], what: str, variable: str) -> Path:
    for folder in folders:
        if (folder / file).is_file():
            return folder
    raise BuildError(f"no headers of {what}: pip install --no-deps -r requirements/cuda.txt, or set {variable}")


def version() -> str:
    """The package's version, which the library must have too."""
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith('version = "'):
            return line.split('"')[1]
    raise BuildError("pyproject.toml names no version")


def flags(level: str, extra: Sequence[str]) -> list[str]:
    return [
        *("-std=c++17", level, "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-gnu-unique"),
        *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-unused-parameter"),
        f'-DTSK_VERSION="{version()}"',
        "-DTSK_BUILT_FOR_HOPPER",
        *extra,
        *("-I", str(HERE / "include"), "-I", str(ROOT / "plugins"), "-I", str(OUT / "generated")),
        *("-isystem", str(cuda_include()), "-isystem", str(tensorrt_include())),
    ]


def is_fresh(target: Path, depends: Path) -> bool:
    """Whether ``target`` is newer than everything that its dependency file names."""
    if not target.is_file() or not depends.is_file():
        return False
    names = depends.read_text().replace("\\\n", " ").split(": ", 1)[-1].split()
    made = target.stat().st_mtime_ns
    return all((p := Path(n)).is_file() and p.stat().st_mtime_ns < made for n in names)


def compile_one(source: Path, level: str, extra: Sequence[str]) -> Path:
    """The object of a source."""
    if source.name in FAST and source.parent == HERE:
        level, extra = "-O2", [f for f in extra if not f.startswith("-fsanitize")]
    command = ["g++", *flags(level, extra)]
    key = hashlib.sha256(" ".join([str(source), *command]).encode()).hexdigest()[:12]
    target = OUT / "objects" / f"{source.stem}-{key}.o"
    depends = target.with_suffix(".d")
    if is_fresh(target, depends):
        return target
    made = target.with_suffix(f".{os.getpid()}.o")
    command += ["-MMD", "-MF", str(depends), "-MT", "x"]
    if source.suffix == ".cu":
        command += ["-include", str(HERE / "include" / "emulator.h")]
    done = subprocess.run(
        [*command, "-x", "c++", "-c", str(source), "-o", str(made)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        depends.unlink(missing_ok=True)
        raise BuildError(f"{source}:\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    made.replace(target)
    return target


def generate() -> None:
    names = OUT / "generated" / "names.h"
    source, script = ROOT / "trtllm_shadowkv" / "names.py", ROOT / "cmake" / "generate_names.py"
    if not names.is_file() or names.stat().st_mtime < max(source.stat().st_mtime, script.stat().st_mtime):
        names.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-I", str(script), str(source), str(names)], check=True)


def objects(sources: Sequence[Path], level: str, extra: Sequence[str], jobs: int = 2) -> list[Path]:
    """Objects of the sources, built where they are not fresh."""
    (OUT / "objects").mkdir(parents=True, exist_ok=True)
    generate()
    with ThreadPoolExecutor(jobs) as pool:
        # All of them, so that all that is wrong is heard at once.
        futures = [pool.submit(compile_one, s, level, extra) for s in sources]
        wrong = [str(e) for f in futures if isinstance(e := f.exception(), BuildError)]
        if wrong:
            raise BuildError("\n".join(wrong))
        return [f.result() for f in futures]


def link(parts: Sequence[Path], target: Path, how: Sequence[str]) -> Path:
    if target.is_file() and all(p.stat().st_mtime_ns < target.stat().st_mtime_ns for p in parts):
        command = target.with_suffix(".link")
        if command.is_file() and command.read_text() == " ".join(map(str, [*parts, *how])):
            return target
    made = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run(
        ["g++", *map(str, parts), *how, "-o", str(made), "-ldl", "-pthread"], capture_output=True, text=True
    )
    if done.returncode:
        raise BuildError(done.stderr)
    made.replace(target)  # never over a file that a process has mapped
    target.with_suffix(".link").write_text(" ".join(map(str, [*parts, *how])))
    return target


def build(
    sources: Sequence[Path] | None = None,
    target: Path = LIBRARY,
    *,
    level: str = "-O1",
    sanitize: bool = False,
    exports: bool = False,
) -> Path:
    """The file made of ``sources`` (of the whole library, where None) and the emulator.

    Args:
        exports: ctypes finds every extern "C" function of default visibility; else the C ABI alone.

    Raises:
        BuildError: something does not compile.
    """
    extra = list(SANITIZE) if sanitize else []
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if sources is None:
            plugins = ROOT / "plugins"
            sources = [p for pattern in LIBRARY_SOURCES for p in sorted(plugins.glob(pattern))]
        how = list(extra)
        if target.suffix == ".so":
            how += ["-shared", "-Wl,-z,defs"]
            if not exports:
                how += [f"-Wl,--version-script={ROOT / 'plugins' / 'exports.map'}"]
        return link(objects([*EMULATOR, *sources], level, extra), target, how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", metavar="NAME")
    parser.add_argument("--library", metavar="NAME")
    parser.add_argument("--sanitize", action="store_true", help="with g++'s checks of undefined behaviour")
    parser.add_argument("-O", dest="level", default="1", help="of g++, 1")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    sources = [p.resolve() for p in options.files] or None
    target, exports = LIBRARY, False
    if options.program:
        target = OUT / options.program
    elif options.library:
        target, exports = OUT / f"{options.library}.so", True
    try:
        print(build(sources, target, level=f"-O{options.level}", sanitize=options.sanitize, exports=exports))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
