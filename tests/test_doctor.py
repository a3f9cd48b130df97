"""The report: what is missing, what that prevents, and what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_shadowkv import doctor
from trtllm_shadowkv.doctor import PACKAGES, PURPOSES, Package, examine, find_nvcc, package_version
from trtllm_shadowkv.library import ENVIRONMENT
from trtllm_shadowkv.nvml import Driver, GpuInfo

GPU = GpuInfo(0, "NVIDIA H200", "00000000:45:00.0", 143771 << 20, 100 << 30, "9.0", 5, 8, 5, 16)
NOTHING = tuple(replace(p, modules=("there_is_no_such_module",), distributions=()) for p in PACKAGES)


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def no_driver() -> Driver:
    return Driver(problem="no NVIDIA driver")


def test_nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    none = tmp_path / "none"
    report = examine(proc=none, sys=none, shm=none, packages=NOTHING, driver=no_driver)
    assert set(report.versions.values()) == {None}
    names = {part.name for part in report.missing}
    assert names >= {p.name for p in PACKAGES} | {doctor.DRIVER.name, doctor.NVCC.name, doctor.CXX.name}
    assert all(part.needed_for and part.action for part in report.missing)
    assert report.memory.pinnable is None and report.shared_memory is None
    for what, needs in PURPOSES.items():
        assert set(report.purposes[what]) >= set(needs) - {doctor.PLUGINS.name}
    assert report.purposes["plan"] == ()


def test_every_need_has_a_name() -> None:
    known = {part.name for part in (*PACKAGES, doctor.DRIVER, doctor.NVCC, doctor.CXX, doctor.PLUGINS)}
    known |= {doctor.NVINFER.name, doctor.BUILDER.name}
    assert {name for needs in PURPOSES.values() for name in needs} <= known


def test_tensorrts_libraries_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LD_LIBRARY_PATH says, one by one: what runs engines does not build them."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'none'}:{tmp_path}")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    lacks = [examine(driver=no_driver).purposes["compile an engine for a GPU"]]
    for name in ("libnvinfer.so.10", "libnvinfer_builder_resource.so.10.6.0"):
        (tmp_path / name).touch()
        lacks.append(examine(driver=no_driver).purposes["compile an engine for a GPU"])
    both = [doctor.NVINFER.name, doctor.BUILDER.name]
    assert [[name for name in both if name in found] for found in lacks] == [both, both[1:], []]


def test_this_machine() -> None:
    report = examine()
    assert report.versions["numpy"] and report.python and report.platform
    assert report.memory.total and report.cpus.usable >= 1
    missing = {part.name for part in report.missing}
    assert missing.isdisjoint(name for name, version in report.versions.items() if version)
    for lacks in report.purposes.values():
        assert set(lacks) <= missing


def test_gpu_with_its_node_and_lost_lanes(tmp_path: Path) -> None:
    node = tmp_path / "bus/pci/devices/0000:45:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    report = examine(sys=tmp_path, driver=lambda: Driver("580.95.05", "13.0", (GPU,)))
    assert report.driver.gpus[0].numa_node == 1
    assert any("8 of 16 PCIe lanes" in problem for problem in report.problems)
    assert doctor.DRIVER.name not in report.purposes["run on a GPU"]
    full = examine(sys=tmp_path, driver=lambda: Driver("580.95.05", "13.0", (replace(GPU, pcie_width=16),)))
    assert not any("lanes" in problem for problem in full.problems)


def test_huge_pages_off(tmp_path: Path) -> None:
    setting = tmp_path / "kernel/mm/transparent_hugepage/enabled"
    setting.parent.mkdir(parents=True)
    setting.write_text("always madvise [never]\n")
    assert any("echo madvise" in p for p in examine(sys=tmp_path, driver=no_driver).problems)
    setting.write_text("always [madvise] never\n")
    assert not any("echo madvise" in p for p in examine(sys=tmp_path, driver=no_driver).problems)


def test_plugin_library_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none.so"))
    report = examine(driver=no_driver)
    assert report.plugin_library is None
    assert any("none.so" in problem for problem in report.problems)
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF and nothing more")
    monkeypatch.setenv(ENVIRONMENT, str(damaged))
    report = examine(driver=no_driver)
    assert report.plugin_library is None
    assert any("damaged.so" in problem for problem in report.problems)
    assert doctor.PLUGINS.name in {part.name for part in report.missing}


def test_package_versions() -> None:
    assert package_version(Package("x", "", "", ("numpy",), ("there-is-no-such-distribution", "numpy"))) not in (
        None,
        "unknown",
    )
    assert package_version(Package("x", "", "", ("json",), ("there-is-no-such-distribution",))) == "unknown"
    assert package_version(Package("x", "", "", ("there_is_no_such_module",), ("numpy",))) is None


def test_a_broken_module_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    monkeypatch.setitem(sys.modules, "without_a_spec", ModuleType("without_a_spec"))
    assert package_version(Package("x", "", "", ("without_a_spec",), ())) is None


def fake_nvcc(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def test_nvcc(tmp_path: Path) -> None:
    path = fake_nvcc(tmp_path / "toolkit/bin", "Cuda compilation tools, release 12.9, V12.9.86")
    other = fake_nvcc(tmp_path / "path", "nothing of interest")
    found = find_nvcc({"CUDA_HOME": str(tmp_path / "toolkit"), "PATH": str(other.parent)})
    assert found == doctor.Tool(str(path), "12.9.86")
    assert find_nvcc({"PATH": f"{tmp_path}{os.pathsep}{other.parent}"}) == doctor.Tool(str(other), None)
    other.write_bytes(b"\x7fELF")  # cannot be executed
    found = find_nvcc({"PATH": str(other.parent)})
    assert found and found.version is None
