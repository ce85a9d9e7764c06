"""The ranks as a mesh of partitions x replicas: the part of the model and the share of the data of each rank.

A model cut into P partitions is held by P neighbouring ranks, a pipeline (called a line). R lines are replicas of each
other, each with its own share of the samples: rank = replica * P + partition (HyPar-Flow's order, arXiv 1911.05146).
"""

from __future__ import annotations

from hvfreeze.comm.world import World


class Mesh:
    """The position of one rank. `Mesh(world)` has replicas only; `open_mesh` creates the others.

    Attributes:
        world: all ranks of the job.
        partitions: number of parts of the model; this rank holds number `partition`.
        replicas: number of shares of the data; this rank trains on number `replica`, like the others of its line.
        replica_world: the ranks with the same partition, by replica; their gradients are averaged.
        before: the rank with the previous partition of this line, None on the first.
        after: the rank with the next partition, None on the last.
    """

    def __init__(self, world: World, partitions: int = 1, peers: World | None = None) -> None:
        self.world, self.partitions, self.replicas = world, partitions, world.size // partitions
        self.replica, self.partition = divmod(world.rank, partitions)
        self.replica_world = peers or world
        self.before = world.rank - 1 if self.partition > 0 else None
        self.after = world.rank + 1 if self.partition < partitions - 1 else None

    def rank_of(self, partition: int, *, replica: int | None = None) -> int:
        """Return the rank that holds `partition` of `replica`, by default this rank's replica."""
        return (self.replica if replica is None else replica) * self.partitions + partition


def open_mesh(world: World, *, partitions: int) -> Mesh:
    """Return this rank's mesh; `partitions` must divide the number of ranks. Collective."""
    if partitions == 1:
        return Mesh(world)
    # Every rank creates the sets of all ranks, in the same order.
    sets = [world.among(range(partition, world.size, partitions)) for partition in range(partitions)]
    return Mesh(world, partitions, peers=sets[world.rank % partitions])


def open_line(mesh: Mesh) -> World:
    """Return the world of this rank's line, by partition, e.g. for votes. Collective.

    Create it only if needed: each further process set costs its ranks a short exchange every millisecond.
    """
    width = mesh.partitions
    lines = [mesh.world.among(range(replica * width, (replica + 1) * width)) for replica in range(mesh.replicas)]
    line = lines[mesh.replica]
    assert line is not None, "the ranks of a pipeline must include this rank"
    return line
