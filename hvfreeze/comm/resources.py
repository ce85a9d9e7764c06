"""A rank's share of its machine: cores, threads and memory."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from hvfreeze.allocator import give_back
from hvfreeze.comm.world import World
from hvfreeze.memory import available_bytes, bytes_in
from hvfreeze.wording import plural


def end_set_up() -> None:
    """Return freed memory to the system, and measure `peak_memory_bytes` from now on, if the kernel allows it."""
    give_back()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Return this process's peak resident memory in bytes; 0 if the kernel does not report it."""
    return bytes_in(Path("/proc/self/status"), "VmHWM:")


def sharing_ranks(world: World) -> list[tuple[str, int, int]]:
    """Return for every rank its host, the cores it may use, and the number of ranks that share them. Collective."""
    gathered = world.allgather_object((socket.gethostname(), os.sched_getaffinity(0)), name="affinity")
    return [
        (host, len(cores), sum(1 for other, theirs in gathered if other == host and theirs & cores))
        for host, cores in gathered
    ]


def threads_per_rank(world: World) -> int:
    """Return the number of torch threads for this rank: its share of the cores it may use. Collective."""
    _, cores, ranks = sharing_ranks(world)[world.rank]
    return max(1, cores // ranks)


def crowding(world: World) -> list[str]:
    """Return a note for the user if ranks outnumber the cores of their host. Collective."""
    places = sharing_ranks(world)
    crowded = {host: f"{ranks} ranks for {plural(cores, 'core')}" for host, cores, ranks in places if ranks > cores}
    return [f"{host} runs {what}: they share cores, and waiting ranks yield theirs" for host, what in crowded.items()]


def note_bound_cores(world: World) -> list[str]:
    """Return a note for the user if mpirun has bound a host's ranks to fewer cores than mpirun itself may use.

    By default, mpirun binds each of two ranks to one core. Collective.
    """
    found = (socket.gethostname(), os.sched_getaffinity(0), launchers_cores())
    used: dict[str, set[int]] = {}
    free: dict[str, set[int]] = {}
    for host, ranks_cores, launchers in world.allgather_object(found, name="affinity.launcher"):
        used.setdefault(host, set()).update(ranks_cores)
        free.setdefault(host, set()).update(launchers)
    return [
        f"{host}: mpirun bound its ranks to {len(used[host])} of {len(free[host])} cores; use mpirun --bind-to none "
        "or launch/mpirun.sh to use all"
        for host in used
        if free[host] > used[host]
    ]


def launchers_cores() -> set[int]:
    """Return the cores available to the process that bound this one; empty if it is not bound."""
    # Set by Open MPI where it has bound a rank.
    if "OMPI_MCA_orte_bound_at_launch" not in os.environ:
        return set()
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return set()


def count_in(variable: str) -> int | None:
    """Return an environment variable as a positive whole number, else None."""
    given = os.environ.get(variable, "")
    return int(given) if given.isdigit() and int(given) > 0 else None


def memory_budget(local_size: int) -> int:
    """Return the bytes of decoded pixels that one rank may keep: its share of a third of the available memory.

    Memory that this rank has freed counts as available.
    """
    give_back()
    return available_bytes(processes=local_size) // 3 // local_size
