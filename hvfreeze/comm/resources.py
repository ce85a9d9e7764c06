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
    """Give back what set-up has freed, and count `peak_memory_bytes` from now on, where the kernel allows it."""
    give_back()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident so far, in bytes; 0 where the kernel does not say."""
    return bytes_in(Path("/proc/self/status"), "VmHWM:")


def sharing_ranks(world: World) -> list[tuple[str, int, int]]:
    """Return for every rank its host, the cores it may use, and how many ranks may use one of these. Collective."""
    gathered = world.allgather_object((socket.gethostname(), os.sched_getaffinity(0)), name="affinity")
    return [
        (host, len(cores), sum(1 for other, theirs in gathered if other == host and theirs & cores))
        for host, cores in gathered
    ]


def threads_per_rank(world: World) -> int:
    """Return how many torch threads this rank should use: its share of the cores that it may run on. Collective."""
    _, cores, ranks = sharing_ranks(world)[world.rank]
    return max(1, cores // ranks)


def crowding(world: World) -> list[str]:
    """Return what the user should know where ranks outnumber the cores of their host. Collective."""
    places = sharing_ranks(world)
    crowded = {host: f"{ranks} ranks for {plural(cores, 'core')}" for host, cores, ranks in places if ranks > cores}
    return [f"{host} has {what}: they take turns, and wait without occupying a core" for host, what in crowded.items()]


def bound_apart(world: World) -> list[str]:
    """Return what the user should know where mpirun has bound a host's ranks to fewer cores than it may use itself.

    Of two ranks each gets one core, unless told otherwise, however many the machine has. Collective.
    """
    found = (socket.gethostname(), os.sched_getaffinity(0), launchers_cores())
    used: dict[str, set[int]] = {}
    free: dict[str, set[int]] = {}
    for host, ranks_cores, launchers in world.allgather_object(found, name="affinity.launcher"):
        used.setdefault(host, set()).update(ranks_cores)
        free.setdefault(host, set()).update(launchers)
    return [
        f"{host}: mpirun has bound its ranks to {len(used[host])} of {len(free[host])} cores; mpirun --bind-to none, "
        "or launch/mpirun.sh, lets them use all"
        for host in used
        if free[host] > used[host]
    ]


def launchers_cores() -> set[int]:
    """Return the cores that the process which has bound this one may run on; none where nobody has."""
    # Set by Open MPI where it has bound a rank.
    if "OMPI_MCA_orte_bound_at_launch" not in os.environ:
        return set()
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return set()


def count_in(variable: str) -> int | None:
    """Return an environment variable as a number, None where it is not set or is no positive whole number."""
    given = os.environ.get(variable, "")
    return int(given) if given.isdigit() and int(given) > 0 else None


def memory_budget(local_size: int) -> int:
    """Return the bytes of pixels that one rank may keep: a third of the memory that is available now, shared.

    What this rank has freed is available too.
    """
    give_back()
    return available_bytes(processes=local_size) // 3 // local_size
