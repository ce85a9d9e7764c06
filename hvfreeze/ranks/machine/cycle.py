"""How often Horovod's thread asks the other ranks what is ready: less often where it takes cores from those at work."""

from __future__ import annotations

import os

from hvfreeze.ranks.horovod_world import HorovodWorld
from hvfreeze.ranks.machine.mpi_environment import CYCLE_TIME
from hvfreeze.ranks.machine.share import sharing_ranks
from hvfreeze.ranks.world import World

LONG_CYCLE_MS = 5
"""Instead of Horovod's 1: on two nodes whose cores are full, a step takes 3/4 of the time where nothing is sent."""
JOBS_CORES = "HVFREEZE_CORES"


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
    host, cores, ranks = sharing_ranks(world)[world.rank]
    full = ranks * threads >= min(cores, cores_of_job() or cores)
    told = world.allgather_object((host, full, CYCLE_TIME in os.environ), name="cycle")
    hosts, filled, given = (set(column) for column in zip(*told, strict=True))
    if not isinstance(world, HorovodWorld) or len(hosts) == 1 or True not in filled or True in given:
        return []
    world.start_anew(CYCLE_TIME, str(LONG_CYCLE_MS))
    return [f"computing threads fill the nodes' cores: Horovod looks for work every {LONG_CYCLE_MS} ms (${CYCLE_TIME})"]


def cores_of_job() -> int | None:
    """Return how many cores of this node the job may use, None where its launcher has not said so."""
    given = os.environ.get(JOBS_CORES, "")
    return int(given) if given.isdigit() and int(given) > 0 else None
