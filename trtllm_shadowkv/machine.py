"""What this machine gives the process: memory, CPUs, NUMA nodes, shared memory. Linux; missing files are no error.

Every function takes the folders it reads (``/proc``, ``/sys``), so that a test can hand it a tree of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys")
UNLIMITED = "unlimited"
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _kernel_table(path: Path) -> dict[str, int]:
    """Lines of ``name value`` or ``name: value kB``, in the file's unit."""
    pairs = (line.replace(":", " ").split() for line in (_text(path) or "").splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) >= 2 and p[1].isdecimal()}


def _cgroup_folders(controller: str, proc: Path, sys: Path) -> Iterator[tuple[Path, bool]]:
    """Folders that may limit this process, the innermost first, and whether each is of cgroup v2.

    Inside a container the path in ``/proc/self/cgroup`` may be the host's and not exist here, or begin with ``..``;
    then only the mount's own folder is there.
    """
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = number == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        mount = sys / "fs/cgroup" if unified else sys / "fs/cgroup" / controller
        inner = mount if ".." in path.split("/") else mount / path.lstrip("/")
        yield from ((folder, unified) for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


@dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit of this process's control groups, and the bytes left under it."""

    limit: int
    free: int
    version: int


def cgroup_memory(proc: Path = PROC, sys: Path = SYS) -> CgroupMemory | None:
    """The control group with the fewest bytes left; None where none has a limit.

    Page cache that the kernel can drop (``inactive_file``) counts as free.
    """
    found = []
    for folder, unified in _cgroup_folders("memory", proc, sys):
        limit = _number(folder / ("memory.max" if unified else "memory.limit_in_bytes"))
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / ("memory.current" if unified else "memory.usage_in_bytes")) or 0
        stat = _kernel_table(folder / "memory.stat")
        cache = stat.get("inactive_file" if unified else "total_inactive_file", 0)
        found.append(CgroupMemory(limit, max(0, limit - max(0, used - cache)), 2 if unified else 1))
    return min(found, key=lambda c: c.free, default=None)


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes; None: the file that says so is missing.

    Attributes:
        total, available: MemTotal and MemAvailable.
        cgroup: see :func:`cgroup_memory`.
        memlock: RLIMIT_MEMLOCK's soft limit, or ``unlimited``. It does not bind memory pinned through CUDA (driver 580
            pinned 4 GiB under a limit of 64 KiB, without capabilities, where mlock failed); RDMA drivers obey it.
        pinnable: what is available now, within the control group's limit.
    """

    total: int | None
    available: int | None
    cgroup: CgroupMemory | None
    memlock: int | str | None
    pinnable: int | None


def memory(proc: Path = PROC, sys: Path = SYS) -> Memory:
    """Host memory and its limits."""
    table = _kernel_table(proc / "meminfo")
    total, available = (table[k] * 1024 if k in table else None for k in ("MemTotal", "MemAvailable"))
    cgroup = cgroup_memory(proc, sys)
    bounds = [b for b in (available, cgroup.free if cgroup else None) if b is not None]
    return Memory(total, available, cgroup, _memlock(proc), min(bounds, default=None))


def _memlock(proc: Path) -> int | str | None:
    for line in (_text(proc / "self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdecimal() else UNLIMITED
    return None


@dataclass(frozen=True)
class HugePages:
    """Transparent huge pages (``always``, ``madvise`` or ``never``) and reserved ones; None: not known.

    Pinning touches memory in huge pages (``madvise`` is enough): without them it takes ten times longer.
    """

    transparent: str | None
    reserved: int | None
    page_bytes: int | None


def huge_pages(proc: Path = PROC, sys: Path = SYS) -> HugePages:
    """Huge page settings of the kernel."""
    text = _text(sys / "kernel/mm/transparent_hugepage/enabled") or ""
    chosen = text.partition("[")[2].partition("]")[0] or None
    table = _kernel_table(proc / "meminfo")
    size = table.get("Hugepagesize")
    return HugePages(chosen, table.get("HugePages_Total"), None if size is None else size * 1024)


def numa_nodes(sys: Path = SYS) -> dict[int, str]:
    """Each NUMA node's CPUs, as the kernel writes them (``0-15,32-47``)."""
    folders = (sys / "devices/system/node").glob("node*")
    found = {int(n): _text(f / "cpulist") or "" for f in folders if (n := f.name.removeprefix("node")).isdecimal()}
    return dict(sorted(found.items()))


def pci_numa_node(bus_id: str, sys: Path = SYS) -> int | None:
    """NUMA node of a PCI device; None: not known, or the machine has one node only.

    Args:
        bus_id: ``domain:bus:device.function``; NVML writes the domain with eight digits, the kernel with four.
    """
    domain, _, rest = bus_id.lower().partition(":")
    node = _number(sys / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return None if node is None or node < 0 else node


@dataclass(frozen=True)
class Cpus:
    """CPUs that this process may run on, and the control group's quota in CPUs (None: no quota)."""

    usable: int
    quota: float | None


def cpus(proc: Path = PROC, sys: Path = SYS) -> Cpus:
    """CPUs by affinity, and the tightest quota."""
    quotas = []
    for folder, unified in _cgroup_folders("cpu", proc, sys):
        if unified:
            quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us") or "-1", _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return Cpus(len(os.sched_getaffinity(0)), min(quotas, default=None))


@dataclass(frozen=True)
class SharedMemory:
    """Size and free bytes of /dev/shm."""

    total: int
    free: int


def shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | None:
    """None where there is no such folder."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)
