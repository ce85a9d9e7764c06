"""Where a rank stands among partitions x replicas: which part of the chain it holds, and for which share of the data.

A chain that is cut into P partitions lies on P neighbouring ranks, a line. R lines are replicas of each other, each
with its own share of the samples: rank = replica * P + partition (HyPar-Flow's order, arXiv 1911.05146). With one
partition every rank is a replica, and holds the whole chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvfreeze.errors import UsageError
from hvfreeze.ranks.world import World


@dataclass(frozen=True)
class Mesh:
    """One rank's place. `Mesh(world)` is plain replicas; `open_mesh` makes the others."""

    world: World
    """All ranks of the job."""
    partitions: int = 1
    peers: World | None = None
    """The ranks that hold the same partition, by replica: their gradients are averaged. None is all ranks."""

    @property
    def replicas(self) -> int:
        """How many shares the data has."""
        return self.world.size // self.partitions

    @property
    def partition(self) -> int:
        """Which part of the chain this rank holds."""
        return self.world.rank % self.partitions

    @property
    def replica(self) -> int:
        """Which share of the data this rank works on, with the other ranks of its line."""
        return self.world.rank // self.partitions

    @property
    def replica_world(self) -> World:
        """The ranks over which this rank's gradients are averaged."""
        return self.peers or self.world

    def rank_of(self, partition: int, *, replica: int | None = None) -> int:
        """Return the rank that holds `partition` for `replica`, by default this rank's own."""
        return (self.replica if replica is None else replica) * self.partitions + partition

    @property
    def before(self) -> int | None:
        """The rank that holds the previous partition of this line; None on the first."""
        return self.world.rank - 1 if self.partition > 0 else None

    @property
    def after(self) -> int | None:
        """The rank that holds the next partition of this line; None on the last."""
        return self.world.rank + 1 if self.partition < self.partitions - 1 else None


def open_mesh(world: World, *, partitions: int) -> Mesh:
    """Return this rank's place among `partitions` x `world.size / partitions` ranks.

    Collective: every rank of `world` must call this, while nothing else is on its way.

    Raises:
        UsageError: `partitions` does not divide the number of ranks.
    """
    if partitions < 1 or world.size % partitions:
        raise UsageError(
            f"{world.size} ranks cannot form lines of {partitions}: the number of partitions must divide the number of "
            f"ranks; start {partitions} ranks, or a multiple"
        )
    plain = Mesh(world, partitions)
    if partitions == 1:
        return plain
    # Sets are made on all ranks, of all ranks, in the same order.
    sets = [world.among(range(partition, world.size, partitions)) for partition in range(partitions)]
    return Mesh(world, partitions, peers=sets[plain.partition])


def open_line(mesh: Mesh) -> World:
    """Return the ranks of this rank's line, by partition, for what they settle among themselves, as a vote.

    Each further set of ranks that a rank is in costs it a short exchange every millisecond: made only where asked for.

    Collective: every rank of `mesh.world` must call this, while nothing else is on its way.
    """
    width = mesh.partitions
    lines = [mesh.world.among(range(replica * width, (replica + 1) * width)) for replica in range(mesh.replicas)]
    line = lines[mesh.replica]
    assert line is not None, "a rank is in its own line"
    return line
