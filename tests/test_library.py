"""trtllm_shadowkv.library: finding, loading and calling libtrtllm_shadowkv.so.

The library must be there (`make test` compiles it): a test that cannot find it fails and says how to get it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import trtllm_shadowkv
from trtllm_shadowkv.errors import ConfigError, MissingDependencyError
from trtllm_shadowkv.library import ENVIRONMENT, FILE, Library, find, load

ROOT = Path(__file__).parents[1]


def has_gpu() -> bool:
    """Whether the driver sees a GPU; asked of the driver, not of the library under test."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


needs_gpu = pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU on this machine")


@pytest.fixture(scope="module")
def library() -> Library:
    return load()


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_environment_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "other.so"
    file.touch()
    monkeypatch.setenv(ENVIRONMENT, str(file))
    assert find() == file


@pytest.mark.parametrize("name", ["missing.so", "."])
def test_environment_naming_no_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / name))
    with pytest.raises(MissingDependencyError, match="correct it or unset it") as error:
        find()
    assert ENVIRONMENT in one_line(error)
    assert str(tmp_path / name) in str(error.value)


def test_every_folder_of_the_package_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "checkout", tmp_path / "site-packages"
    first.mkdir()
    second.mkdir()
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(trtllm_shadowkv, "__path__", [str(first), str(second)])
    assert find() is None
    (second / FILE).touch()
    assert find() == second / FILE
    monkeypatch.setenv(ENVIRONMENT, "")  # set to nothing: as if not set
    assert find() == second / FILE


def test_absent_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(trtllm_shadowkv, "__path__", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match="TRTLLM_SHADOWKV_CUDA=ON pip install") as error:
        load()
    assert FILE in one_line(error)


def test_damaged_library_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / FILE
    for content in (b"", b"no ELF file", b"\x7fELF" + bytes(60)):
        damaged.write_bytes(content)
        with pytest.raises(MissingDependencyError, match="cannot be loaded") as error:
            Library(damaged)
        assert str(damaged) in one_line(error)


def test_foreign_library_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "foreign.c"
    source.write_text("int tsk_other(void) { return 0; }\n")
    foreign = tmp_path / FILE
    subprocess.run(["cc", "-shared", "-o", foreign, source], check=True)
    with pytest.raises(MissingDependencyError, match="has no function tsk_version") as error:
        Library(foreign)
    one_line(error)


def test_version_is_the_packages(library: Library) -> None:
    assert library.version == trtllm_shadowkv.__version__


def test_library_of_another_version_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_shadowkv, "__version__", "9.8.7")
    with pytest.raises(MissingDependencyError, match=r"is of version .*; expected 9\.8\.7") as error:
        Library(library.path)
    assert library.version in one_line(error)


@pytest.mark.parametrize("call", ["device_count()", "device_info()", "measure_link(footprint_bytes=1 << 24)"])
def test_without_a_gpu_every_call_says_so(library: Library, call: str) -> None:
    # With every GPU hidden, so that the same holds on a machine that has some: no driver, or no device.
    code = f"""
from trtllm_shadowkv.errors import MissingDependencyError
from trtllm_shadowkv.library import load
try:
    load().{call}
except MissingDependencyError as e:
    print(e)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", ENVIRONMENT: str(library.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(("no CUDA driver on this machine", "no CUDA device that this process may use"))
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("chunk_bytes", [0, -2048, 16, 112, 120, 2056, 8208, 1 << 40])
def test_chunk_size_out_of_range_is_refused(library: Library, chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_bytes is {chunk_bytes}; expected a multiple of 16 from 128 to 8192"):
        library.measure_link(chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("footprint_bytes", [-1, 0, (1 << 24) - 1, (1 << 36) + 1, 1 << 62])
def test_footprint_out_of_range_is_refused(library: Library, footprint_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"footprint_bytes is {footprint_bytes}; expected 16777216 to 68719476736"):
        library.measure_link(footprint_bytes=footprint_bytes)


@pytest.mark.parametrize("arguments", [{"device": 1 << 31}, {"chunk_bytes": 1 << 63}, {"footprint_bytes": -(1 << 64)}])
def test_numbers_are_never_cut_off(library: Library, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"a whole number of (32|64) bits"):
        library.measure_link(**arguments)


@pytest.mark.parametrize("value", [True, 1.0, "0", None])
def test_arguments_that_are_no_whole_numbers_are_refused(library: Library, value: object) -> None:
    with pytest.raises(ConfigError, match="device is"):
        library.device_info(value)  # type: ignore[arg-type]


def test_null_pointers_are_errors_and_messages_belong_to_their_thread(library: Library) -> None:
    raw = ctypes.CDLL(str(library.path))
    raw.tsk_last_error.restype = ctypes.c_char_p
    assert raw.tsk_device_count(None) == 1
    assert raw.tsk_last_error() == b"count is null; expected the address of the result"
    seen: list[bytes] = []

    def other_thread() -> None:
        seen.append(raw.tsk_last_error())
        assert raw.tsk_device_info(0, None) == 1
        seen.append(raw.tsk_last_error())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [b"", b"info is null; expected the address of the result"]
    assert raw.tsk_last_error().startswith(b"count is null")
    assert raw.tsk_measure_link(0, ctypes.c_int64(2048), ctypes.c_int64(1 << 24), None) == 1
    assert raw.tsk_last_error().startswith(b"gigabytes_per_second is null")


@pytest.mark.gpu
@needs_gpu
def test_device_info(library: Library) -> None:
    assert library.device_count() >= 1
    info = library.device_info(0)
    assert info.name
    assert info.compute_capability >= (8, 0)
    assert info.multiprocessors > 0
    assert info.memory_bytes > 1 << 30
    assert info.driver_version >= info.runtime_version
    with pytest.raises(ConfigError, match="device is 99; expected 0 to"):
        library.device_info(99)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunk_bytes", [128, 144, 512, 1040, 2048, 4112, 8176, 8192])
def test_measure_link_moves_the_right_bytes(library: Library, chunk_bytes: int) -> None:
    # The library compares every byte itself; the footprint is no multiple of the chunk.
    speed = library.measure_link(0, chunk_bytes, (1 << 24) + 4096 + 8)
    assert 0.5 < speed < 2000
