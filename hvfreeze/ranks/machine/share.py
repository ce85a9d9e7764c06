"""A rank's share of its machine: cores, threads and memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hvfreeze.ranks.world import World


def sharing_ranks(world: World) -> list[tuple[str, int, int]]:
    """Return for every rank its host, the cores it may run on, and how many ranks may run on one of these.

    Collective: every rank of `world` must call this.
    """
    gathered = world.allgather_object((socket.gethostname(), os.sched_getaffinity(0)), name="affinity")
    return [
        (host, len(cores), sum(1 for other, theirs in gathered if other == host and theirs & cores))
        for host, cores in gathered
    ]


def threads_per_rank(world: World) -> int:
    """Return how many torch threads this rank should use: its share of the cores that it may run on.

    Collective: every rank of `world` must call this.
    """
    _, cores, ranks = sharing_ranks(world)[world.rank]
    return max(1, cores // ranks)


def crowding(world: World) -> list[str]:
    """Return what the user should know where ranks outnumber the cores of their host.

    Collective: every rank of `world` must call this.
    """
    places = sharing_ranks(world)
    crowded = {host: f"{ranks} ranks for {cores} cores" for host, cores, ranks in places if ranks > cores}
    return [f"{host} has {what}: they take turns, and wait without occupying a core" for host, what in crowded.items()]


def bound_apart(world: World) -> list[str]:
    """Return what the user should know where mpirun has bound a host's ranks to fewer cores than it may use itself.

    Of two ranks each gets one core, unless told otherwise, however many the machine has.

    Collective: every rank of `world` must call this.
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


def threads_of_environment() -> int | None:
    """Return OMP_NUM_THREADS as a number, None where it is not set or is no positive whole number."""
    return count_in("OMP_NUM_THREADS")


def count_in(variable: str) -> int | None:
    """Return an environment variable as a number, None where it is not set or is no positive whole number."""
    given = os.environ.get(variable, "")
    return int(given) if given.isdigit() and int(given) > 0 else None


def memory_budget(local_size: int) -> int:
    """Return the bytes of pixels that one rank may keep: a third of the memory that is available now, shared."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 3 // local_size
    return 2**30 // local_size
