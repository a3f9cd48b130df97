"""``trtllm-shadowkv doctor``: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from trtllm_shadowkv.doctor import Report, examine
from trtllm_shadowkv.nvml import GpuInfo


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False) -> None:
    """Report versions, GPUs and memory, and how to get what is missing. A report, no check: it exits with 0."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        typer.echo("\n".join(_lines(report)))


def _gib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:,.1f} MiB"


def _row(name: str, value: str) -> str:
    return f"  {name:26}{value}"


def _lines(r: Report) -> Iterator[str]:
    yield f"trtllm-shadowkv {r.version or '(not installed: running from a checkout)'}"
    yield _row("Python", r.python)
    yield _row("platform", r.platform)
    for name, version in r.versions.items():
        yield _row(name, version or "-")
    yield _row("CUDA compiler", f"{r.nvcc.version or 'unknown version'}, {r.nvcc.path}" if r.nvcc else "-")
    yield _row("C++ compiler", r.cxx or "-")
    yield _row("plugin library", r.plugin_library or "-")
    yield ""
    yield "GPU"
    driver = r.driver
    yield _row("driver", f"{driver.version or 'unknown'}, CUDA {driver.cuda or 'unknown'}" if driver.version else "-")
    if driver.problem:
        yield f"  {driver.problem}"
    for gpu in driver.gpus:
        yield from _gpu_lines(gpu)
    yield ""
    yield "host (GiB = 2^30 bytes)"
    yield from _host_lines(r)
    yield ""
    yield "ready to"
    for what, lacks in r.purposes.items():
        yield _row(what, f"no: lacks {', '.join(lacks)}" if lacks else "yes")
    if r.problems:
        yield ""
        yield "problems"
        yield from (f"  {problem}" for problem in r.problems)
    if r.missing:
        yield ""
        yield "not here"
        for part in r.missing:
            yield _row(part.name, f"for {part.needed_for}")
            yield _row("", part.action)


def _gpu_lines(gpu: GpuInfo) -> Iterator[str]:
    def link(generation: int | None, width: int | None) -> str:
        return f"gen {generation or '?'} x{width or '?'}"

    yield _row(f"GPU {gpu.index}", f"{gpu.name or 'unknown'}, compute capability {gpu.compute_capability or 'unknown'}")
    yield _row("  memory", f"{_gib(gpu.memory)}, {_gib(gpu.memory_free)} free")
    now, most = link(gpu.pcie_generation, gpu.pcie_width), link(gpu.pcie_max_generation, gpu.pcie_max_width)
    yield _row("  PCIe", f"{now} now, {most} at most" + (" (idle links slow down)" if now != most else ""))
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    yield _row("  address", f"{gpu.bus_id or 'unknown'}{node}")


def _host_lines(r: Report) -> Iterator[str]:
    m, huge, shm = r.memory, r.huge_pages, r.shared_memory
    yield _row("memory", f"{_gib(m.total)}, {_gib(m.available)} available")
    if m.cgroup:
        yield _row("cgroup limit", f"{_gib(m.cgroup.limit)}, {_gib(m.cgroup.free)} free (v{m.cgroup.version})")
    else:
        yield _row("cgroup limit", "none")
    lock = m.memlock if m.memlock is None or isinstance(m.memlock, str) else _gib(m.memlock)
    yield _row("RLIMIT_MEMLOCK", f"{lock or 'unknown'} (CUDA's pinned memory does not count)")
    spare = (m.pinnable or 0) * 9 // 10  # the rest of the machine needs some, too
    yield _row("can be pinned now", f"at most {_gib(m.pinnable)} (plan --host-memory {spare // 10**9} leaves a tenth)")
    reserved = f"{huge.reserved} of {(huge.page_bytes or 0) >> 20} MiB reserved" if huge.reserved else "none reserved"
    yield _row("huge pages", f"transparent: {huge.transparent or 'unknown'}; {reserved}")
    yield _row("/dev/shm", f"{_gib(shm.total)}, {_gib(shm.free)} free" if shm else "-")
    quota = "" if r.cpus.quota is None else f", quota {r.cpus.quota:g}"
    yield _row("CPUs usable", f"{r.cpus.usable}{quota}")
    yield _row("NUMA nodes", "; ".join(f"{node}: CPUs {cpus}" for node, cpus in r.numa_nodes.items()) or "unknown")
