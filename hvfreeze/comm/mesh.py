"""Where a rank stands among partitions x replicas: which part of the chain it holds, and for which share of the data.

A chain that is cut into P partitions lies on P neighbouring ranks, a line. R lines are replicas of each other, each
with its own share of the samples: rank = replica * P + partition (HyPar-Flow's order, arXiv 1911.05146).
"""

from __future__ import annotations

from hvfreeze.comm.world import World


class Mesh:
    """One rank's place. `Mesh(world)` is plain replicas; `open_mesh` makes the others.

    Attributes:
        world: all ranks of the job.
        partitions: into how many parts the chain is cut; this rank holds number `partition`.
        replicas: how many shares the data has; this rank works on number `replica`, with the others of its line.
        replica_world: the ranks that hold the same partition, by replica: their gradients are averaged.
        before: the rank that holds the previous partition of this line, None on the first.
        after: the rank that holds the next one, None on the last.
    """

    def __init__(self, world: World, partitions: int = 1, peers: World | None = None) -> None:
        self.world, self.partitions, self.replicas = world, partitions, world.size // partitions
        self.replica, self.partition = divmod(world.rank, partitions)
        self.replica_world = peers or world
        self.before = world.rank - 1 if self.partition > 0 else None
        self.after = world.rank + 1 if self.partition < partitions - 1 else None

    def rank_of(self, partition: int, *, replica: int | None = None) -> int:
        """Return the rank that holds `partition` for `replica`, by default this rank's own."""
        return (self.replica if replica is None else replica) * self.partitions + partition


def open_mesh(world: World, *, partitions: int) -> Mesh:
    """Return this rank's place; `partitions` divides the number of ranks. Collective."""
    if partitions == 1:
        return Mesh(world)
    # Sets are made on all ranks, of all ranks, in the same order.
    sets = [world.among(range(partition, world.size, partitions)) for partition in range(partitions)]
    return Mesh(world, partitions, peers=sets[world.rank % partitions])


def open_line(mesh: Mesh) -> World:
    """Return the ranks of this rank's line, by partition, for what they settle among themselves, as a vote. Collective.

    Each further set of ranks that a rank is in costs it a short exchange every millisecond: made only where asked for.
    """
    width = mesh.partitions
    lines = [mesh.world.among(range(replica * width, (replica + 1) * width)) for replica in range(mesh.replicas)]
    line = lines[mesh.replica]
    assert line is not None, "a rank is in its own line"
    return line
