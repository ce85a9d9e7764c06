"""What a process may still take: the machine's, its control groups' and Slurm's, whichever is least."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.comm.resources import memory_budget
from hvfreeze.memory import available_bytes

GIB = 2**30
SLURM = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
MOUNTS = {
    2: "31 23 0:28 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate",
    1: "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "33 31 0:30 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory",
}
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available, no control groups, and a process of 1 GiB."""
    for variable in SLURM:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n")
    (tmp_path / "proc/self/status").write_text(f"VmRSS: {9 * 2**20} kB\nRssAnon:\t{2**20} kB\n")
    return tmp_path


def limit(
    machine: Path, version: int, group: str, *, most: float | None, used: float, cache: float, root: str = "/"
) -> None:
    """Put the process into a group of so many GiB, below the mount that shows `root`."""
    names = "" if version == 2 else "memory"
    (machine / "proc/self/cgroup").write_text(f"5:cpu:/elsewhere\n4:{names}:{group}\n")
    (machine / "proc/self/mountinfo").write_text(MOUNTS[version].format(root=root) + "\n")
    folder = machine / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    folder /= group.removeprefix(root.rstrip("/")).lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    allowed, taken, given_back = FILES[version]
    nothing = "max" if version == 2 else str(2**63 - 4096)
    (folder / allowed).write_text(nothing if most is None else str(int(most * GIB)))
    (folder / taken).write_text(f"{int(used * GIB)}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{given_back} {int(cache * GIB)}\n")


def test_without_limits_it_is_what_the_machine_has(machine: Path) -> None:
    assert available_bytes(root=machine) == 64 * GIB
    (machine / "proc/meminfo").unlink()
    assert available_bytes(root=machine) == 3 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_leaves_its_limit_less_what_is_used_and_not_given_back(machine: Path, version: int) -> None:
    limit(machine, version, "/job/step", most=8, used=5, cache=3)
    assert available_bytes(root=machine) == 6 * GIB
    limit(machine, version, "/job/step", most=8, used=9, cache=0)
    assert available_bytes(root=machine) == 0
    limit(machine, version, "/job/step", most=None, used=9, cache=0)
    assert available_bytes(root=machine) == 64 * GIB
    limit(machine, version, "/job", most=10, used=7, cache=0)
    limit(machine, version, "/job/step", most=None, used=7, cache=0)
    assert available_bytes(root=machine) == 3 * GIB, "groups above limit too"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_where_the_mount_shows_it(machine: Path, version: int) -> None:
    limit(machine, version, "/docker/abc", most=4, used=1, cache=0, root="/docker/abc")
    assert available_bytes(root=machine) == 3 * GIB
    limit(machine, version, "/docker/abc/inner", most=2, used=1, cache=0, root="/docker/abc")
    assert available_bytes(root=machine) == 1 * GIB
    # A path of the host that is not to be seen here.
    names = "" if version == 2 else "memory"
    (machine / "proc/self/cgroup").write_text(f"4:{names}:/host/path\n")
    (machine / "proc/self/mountinfo").write_text(MOUNTS[version].format(root="/") + "\n")
    assert available_bytes(root=machine) == 3 * GIB


def test_what_a_jobs_processes_share_counts_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = machine / "proc/self/status"
    status.write_text(status.read_text() + f"RssShmem:\t{3 * 2**20} kB\n")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "16384")
    assert available_bytes(processes=4, root=machine) == (16 - 4 - 3) * GIB


@pytest.mark.parametrize(
    ("given", "gib"),
    [
        ({"SLURM_MEM_PER_NODE": "16384"}, 16 - 4),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8 - 4),
        ({"SLURM_MEM_PER_NODE": "2048"}, 0),
        ({"SLURM_MEM_PER_NODE": "0"}, 64),
        ({"SLURM_MEM_PER_CPU": "2048"}, 64),
        ({"SLURM_MEM_PER_NODE": "16G"}, 64),
    ],
)
def test_slurm_leaves_its_limit_less_what_the_jobs_processes_have(
    machine: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], gib: int
) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert available_bytes(processes=4, root=machine) == gib * GIB


def test_ranks_share_a_third_of_what_slurm_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = memory_budget(2)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "3000")
    assert 0 < 2 * memory_budget(2) < 1000 * 2**20 < 2 * unlimited


def test_a_name_that_the_kernel_has_cut_within_a_letter_is_in_nobodys_way(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = machine / "proc/self/status"
    status.write_bytes(b"Name:\t\xd0\xbe\xd0\n" + status.read_bytes())
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "8192")
    assert available_bytes(root=machine) == 7 * GIB
