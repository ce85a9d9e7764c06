"""The memory that a process may still use: the limits of the machine, its control group and Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LIMITS = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of limit and use, and the reclaimable part in `memory.stat`, by version of control groups."""
UNKNOWN_BYTES = 3 * 2**30
"""Assumed available bytes if the machine does not report them."""


def available_bytes(*, processes: int = 1, root: Path = Path("/")) -> int:
    """Return the bytes that all of a job's `processes` on this machine together may still use.

    `root` is the folder above proc and sys.
    """
    found = [_machine(root), *_control_groups(root)]
    allowed = slurms_bytes()
    if allowed is not None:
        # Slurm's limit is for the job here, and its other processes are much like this one; what they share is there
        # once.
        own, shared = (bytes_in(root / "proc/self/status", name) for name in ("RssAnon:", "RssShmem:"))
        found.append(max(0, allowed - processes * own - shared))
    return min(found)


def slurms_bytes() -> int | None:
    """Return the bytes that Slurm allows the job on this node, None without a limit."""
    each, cpus = _count("SLURM_MEM_PER_CPU"), _count("SLURM_CPUS_ON_NODE")
    megabytes = _count("SLURM_MEM_PER_NODE") or (each and cpus and each * cpus)
    # 0 stands for all of the node.
    return megabytes * 2**20 if megabytes else None


def _count(variable: str) -> int | None:
    given = os.environ.get(variable, "")
    return int(given) if given.isdecimal() else None


def _machine(root: Path) -> int:
    return bytes_in(root / "proc/meminfo", "MemAvailable:") or UNKNOWN_BYTES


def bytes_in(path: Path, name: str) -> int:
    """Return the bytes in a line `name: N kB`, 0 without one."""
    with suppress(OSError):
        # The kernel cuts a process's name at 15 bytes, also within a letter.
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def _control_groups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of the process's control group and of each one above it."""
    for folder, version in _folders(root):
        limit, used, given_back = LIMITS[version]
        with suppress(OSError, ValueError, KeyError):
            # "max" is no limit, and no number.
            allowed, taken = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, allowed - max(0, taken - int(stat[given_back])))


def _folders(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder of each control group that may limit memory, the process's own first, and its version."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return
    # NUMBER:CONTROLLERS:PATH, without controllers in version 2.
    paths = {"cgroup2" if not names else "cgroup": path for _, names, path in groups if names in ("", "memory")}
    for mount in mounts:
        # ... ROOT PLACE OPTIONS ... - TYPE SOURCE OPTIONS
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind not in paths or (kind == "cgroup" and "memory" not in options):
            continue
        place = root / mount[4].lstrip("/")
        # In a container the group's path may be the host's, of which the mount shows a part.
        folder = place / paths[kind].removeprefix(mount[3].rstrip("/")).lstrip("/")
        while folder != place and place in folder.parents:
            yield folder, kind
            folder = folder.parent
        yield place, kind
