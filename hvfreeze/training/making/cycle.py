"""How often Horovod's thread asks the other ranks what is ready: less often where it takes cores from those at work."""

from __future__ import annotations

import os

from hvfreeze.ranks.horovod_world import HorovodWorld
from hvfreeze.ranks.machine.mpi_environment import CYCLE_TIME
from hvfreeze.ranks.machine.share import count_in, sharing_ranks
from hvfreeze.ranks.world import World

LONG_CYCLE_MS = 5
"""Instead of Horovod's 1: on two nodes whose cores are full, a step takes 3/4 of the time where nothing is sent."""
JOBS_CORES = "HVFREEZE_CORES"
"""Cores of a node that the job may use, where its launcher has said so."""


def rest_longer_where_cores_are_full(world: World, threads: int) -> list[str]:
    """Let Horovod rest longer between two looks for work where computing threads fill the cores of a node of several.

    In every cycle all ranks wait for each other, and occupy a core meanwhile. Where a thread that waits has to take its
    core from one that computes, a cycle soon lasts longer than its time: there is then no rest at all, every rank's
    thread waits for one that has no core, and this goes on by itself. On one node, through shared memory, it does not
    come to this. What the user has set stays.

    Collective: every rank of `world` must call this, while nothing else is on its way, and none may ask for sets of
    ranks later: Horovod cannot be started anew again.

    Args:
        world: all ranks.
        threads: that compute in this rank.

    Returns:
        What the user should know where it was started anew for that, the same on every rank.
    """
    if not isinstance(world, HorovodWorld) or len(set(world.hosts)) == 1:
        return []
    _, cores, ranks = sharing_ranks(world)[world.rank]
    full = ranks * threads >= min(cores, count_in(JOBS_CORES) or cores)
    told = world.allgather_object((full, CYCLE_TIME in os.environ), name="cycle")
    if not any(filled for filled, _ in told) or any(given for _, given in told):
        return []
    world.start_anew(CYCLE_TIME, str(LONG_CYCLE_MS))
    return [f"computing threads fill the nodes' cores: Horovod looks for work every {LONG_CYCLE_MS} ms (${CYCLE_TIME})"]
