"""How long Horovod rests between two looks for work: longer where computing threads leave it no core."""

from __future__ import annotations

import os

from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.resources import count_in, sharing_ranks
from hvfreeze.comm.world import World

LONG_CYCLE_MS = 5
"""Instead of Horovod's 1: on two nodes whose cores are full, a step takes 3/4 of the time where nothing is sent."""
JOBS_CORES = "HVFREEZE_CORES"
"""Cores of a node that the job may use, where its launcher has said so."""


def rest_longer_where_cores_are_full(world: World, threads: int) -> list[str]:
    """Let Horovod rest longer between two looks for work where threads fill the cores of a node of several. Collective.

    Nothing else may be on its way, and nobody may ask for sets of ranks later: Horovod cannot be started anew again.
    Returns notes for the user, the same on every rank.
    """
    if not (isinstance(world, HorovodWorld) and wants_longer_rest(world, threads)):
        return []
    world.start_anew(CYCLE_TIME, str(LONG_CYCLE_MS))
    return [f"computing threads fill the nodes' cores: Horovod looks for work every {LONG_CYCLE_MS} ms (${CYCLE_TIME})"]


def advice_on_longer_rest(world: World, threads: int) -> list[str]:
    """Return, the same on every rank, what to set before a script starts Horovod itself, which then stays as it is.

    Collective.
    """
    if not wants_longer_rest(world, threads):
        return []
    way_out = f"set {CYCLE_TIME}={LONG_CYCLE_MS} before hvd.init(), or leave hvd.init() to hvfreeze"
    return [f"computing threads fill the nodes' cores, from which Horovod takes some every millisecond: {way_out}"]


def wants_longer_rest(world: World, threads: int) -> bool:
    """Tell whether `threads` of each rank fill a node of several, and no cycle time was set. Collective.

    In every cycle all ranks wait for each other, and occupy a core meanwhile. Where a thread that waits has to take its
    core from one that computes, a cycle soon lasts longer than its time: there is then no rest at all, every rank's
    thread waits for one that has no core, and this goes on by itself. On one node, through shared memory, it does not
    come to this. What the user has set stays.
    """
    if not isinstance(world, HorovodWorld) or len(set(world.hosts)) == 1:
        return False
    _, cores, ranks = sharing_ranks(world)[world.rank]
    full = ranks * threads >= min(cores, count_in(JOBS_CORES) or cores)
    told = world.allgather_object((full, CYCLE_TIME in os.environ), name="cycle")
    return any(filled for filled, _ in told) and not any(given for _, given in told)
