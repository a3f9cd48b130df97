"""What the kernel's files say, from trees written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_shadowkv import machine

GIB = 1 << 30
MEMINFO = """MemTotal:       134217728 kB
MemFree:                1 kB
MemAvailable:   104857600 kB
HugePages_Total:       3
Hugepagesize:       2048 kB
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {soft}              unlimited            bytes
"""


def write(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return write(tmp_path / "proc", {"meminfo": MEMINFO, "self/limits": LIMITS.format(soft="unlimited")})


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    (tmp_path / "sys").mkdir()
    return tmp_path / "sys"


class TestMemory:
    def test_without_limits(self, proc: Path, sys: Path) -> None:
        found = machine.memory(proc, sys)
        assert (found.total, found.available) == (128 * GIB, 100 * GIB)
        assert found.cgroup is None and found.memlock == "unlimited"
        assert found.pinnable == 100 * GIB

    def test_cgroup_v2_takes_the_tightest_parent(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/cgroup": "0::/pod/box"})
        group = sys / "fs/cgroup"
        write(
            group,
            {
                "pod/box/memory.max": "max",
                "pod/memory.max": 32 * GIB,
                "pod/memory.current": 10 * GIB,
                "pod/memory.stat": f"anon 1\ninactive_file {4 * GIB}\nslab 2",
                "memory.max": 64 * GIB,
            },
        )
        found = machine.memory(proc, sys)
        assert found.cgroup == machine.CgroupMemory(32 * GIB, 26 * GIB, 2)
        assert found.pinnable == 26 * GIB

    def test_cgroup_v1_in_a_container(self, proc: Path, sys: Path) -> None:
        """The path is the host's and not visible inside; the mount's own folder is the container's."""
        write(proc, {"self/cgroup": "9:name=systemd:/\n4:cpuset,memory:/docker/0f3a\n0::/"})
        write(
            sys / "fs/cgroup/memory",
            {
                "memory.limit_in_bytes": 8 * GIB,
                "memory.usage_in_bytes": 3 * GIB,
                "memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
            },
        )
        assert machine.memory(proc, sys).cgroup == machine.CgroupMemory(8 * GIB, 6 * GIB, 1)

    def test_cgroup_v1_number_for_no_limit(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/cgroup": "4:memory:/a"})
        write(sys / "fs/cgroup/memory", {"memory.limit_in_bytes": 9223372036854771712, "a/memory.usage_in_bytes": 5})
        assert machine.cgroup_memory(proc, sys) is None

    def test_used_up_is_zero_and_never_negative(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/cgroup": "0::/"})
        write(sys / "fs/cgroup", {"memory.max": GIB, "memory.current": 2 * GIB})
        assert machine.memory(proc, sys).pinnable == 0

    def test_a_path_cannot_leave_the_mount(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/cgroup": "0::/../../.."})
        write(sys, {"memory.max": 5})
        write(sys / "fs/cgroup", {"memory.max": 7 * GIB})
        assert machine.cgroup_memory(proc, sys) == machine.CgroupMemory(7 * GIB, 7 * GIB, 2)

    def test_memlock(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/limits": LIMITS.format(soft=8 << 20)})
        found = machine.memory(proc, sys)
        assert found.memlock == 8 << 20
        assert found.pinnable == 100 * GIB

    @pytest.mark.parametrize("text", ["", "garbage", "MemTotal:\n:::\nMemAvailable: many kB", "\x00\xff"])
    def test_nonsense_is_unknown(self, tmp_path: Path, sys: Path, text: str) -> None:
        proc = write(tmp_path / "p", {"meminfo": text, "self/cgroup": text, "self/limits": text})
        found = machine.memory(proc, sys)
        assert found == machine.Memory(None, None, None, None, None)
        assert machine.cpus(proc, sys).quota is None

    def test_missing_folders(self, tmp_path: Path) -> None:
        nowhere = tmp_path / "none"
        assert machine.memory(nowhere, nowhere) == machine.Memory(None, None, None, None, None)
        assert machine.huge_pages(nowhere, nowhere) == machine.HugePages(None, None, None)
        assert machine.numa_nodes(nowhere) == {}
        assert machine.pci_numa_node("00000000:45:00.0", nowhere) is None
        assert machine.shared_memory(nowhere) is None

    def test_this_machine(self) -> None:
        found = machine.memory()
        assert found.total and found.pinnable is not None
        assert 0 <= found.pinnable <= found.total


class TestTheRest:
    def test_huge_pages(self, proc: Path, sys: Path) -> None:
        write(sys, {"kernel/mm/transparent_hugepage/enabled": "always [madvise] never"})
        assert machine.huge_pages(proc, sys) == machine.HugePages("madvise", 3, 2 << 20)

    def test_numa(self, sys: Path) -> None:
        nodes = {f"devices/system/node/node{i}/cpulist": f"{i * 8}-{i * 8 + 7}" for i in (10, 0, 1)}
        write(sys, {**nodes, "devices/system/node/possible": "0-10"})
        write(sys, {"bus/pci/devices/0000:45:00.0/numa_node": 1, "bus/pci/devices/0000:46:00.0/numa_node": -1})
        assert machine.numa_nodes(sys) == {0: "0-7", 1: "8-15", 10: "80-87"}
        assert list(machine.numa_nodes(sys)) == [0, 1, 10]
        assert machine.pci_numa_node("00000000:45:00.0", sys) == 1
        assert machine.pci_numa_node("0000:46:00.0", sys) is None
        assert machine.pci_numa_node("nonsense", sys) is None

    def test_cpu_quota(self, proc: Path, sys: Path) -> None:
        write(proc, {"self/cgroup": "3:cpu,cpuacct:/x\n0::/y"})
        write(sys / "fs/cgroup", {"cpu/x/cpu.cfs_quota_us": 250000, "cpu/x/cpu.cfs_period_us": 100000})
        assert machine.cpus(proc, sys).quota == 2.5
        write(sys / "fs/cgroup", {"y/cpu.max": "150000 100000"})
        assert machine.cpus(proc, sys).quota == 1.5
        write(sys / "fs/cgroup", {"y/cpu.max": "max 100000", "cpu/x/cpu.cfs_quota_us": -1})
        assert machine.cpus(proc, sys).quota is None
        assert machine.cpus(proc, sys).usable >= 1

    def test_shared_memory(self, tmp_path: Path) -> None:
        found = machine.shared_memory(tmp_path)
        assert found and 0 <= found.free <= found.total
