"""Lengthens Horovod's cycle time if computing threads use all cores, so that its own thread does not preempt them."""

from __future__ import annotations

import os

from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.resources import count_in, sharing_ranks
from hvfreeze.comm.world import World

LONG_CYCLE_MS = 5
"""Milliseconds instead of Horovod's 1. On two nodes with fully used cores, a step without communication takes 3/4 of
the time."""
JOBS_CORES = "HVFREEZE_CORES"
"""Environment variable with the number of cores of a node that the job may use, set by the launcher."""


def lengthen_cycle_on_full_cores(world: World, threads: int) -> list[str]:
    """Lengthen Horovod's cycle time if threads use all cores of a node and there are several nodes. Collective.

    No operation may be pending, and no process set may be requested later: Horovod cannot be restarted after that.
    Returns notes for the user, the same on every rank.
    """
    if not (isinstance(world, HorovodWorld) and needs_longer_cycle(world, threads)):
        return []
    world.restart(CYCLE_TIME, str(LONG_CYCLE_MS))
    return [
        f"computing threads use all cores of the nodes: Horovod's cycle time set to {LONG_CYCLE_MS} ms (${CYCLE_TIME})"
    ]


def advise_longer_cycle(world: World, threads: int) -> list[str]:
    """Return advice on the cycle time for a script that starts Horovod itself. Collective.

    The advice is the same on every rank; nothing is changed.
    """
    if not needs_longer_cycle(world, threads):
        return []
    way_out = f"set {CYCLE_TIME}={LONG_CYCLE_MS} before hvd.init(), or let hvfreeze call hvd.init()"
    return [f"computing threads use all cores of the nodes, and Horovod's own thread takes one every 1 ms: {way_out}"]


def needs_longer_cycle(world: World, threads: int) -> bool:
    """Return True if `threads` per rank use all cores of one of several nodes, and no cycle time is set. Collective.

    In every cycle all ranks wait for each other and occupy a core. If a waiting thread has to preempt a computing
    thread, a cycle soon takes longer than the cycle time. Then there is no pause between cycles, and every rank waits
    for a thread without a core. Ranks of one node exchange through shared memory and are not affected. A cycle time set
    by the user is kept.
    """
    if not isinstance(world, HorovodWorld) or len(set(world.hosts)) == 1:
        return False
    _, cores, ranks = sharing_ranks(world)[world.rank]
    full = ranks * threads >= min(cores, count_in(JOBS_CORES) or cores)
    told = world.allgather_object((full, CYCLE_TIME in os.environ), name="cycle")
    return any(filled for filled, _ in told) and not any(given for _, given in told)
