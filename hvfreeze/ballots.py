"""What ranks tell each other in a vote."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvfreeze.world import World


def exchange(
    world: World, proposals: Sequence[int], numbers: Sequence[float], broken: bool
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Return all ranks' proposals (per criterion, per rank), numbers (per rank), and the ranks that are broken.

    Every rank writes its own column of an integer table that is zero elsewhere, floats as their bits, so that the
    sum is exact. Collective: every rank of `world` must call this.
    """
    bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    column = torch.cat([torch.tensor([int(broken), *proposals], dtype=torch.int64), bits])
    table = torch.zeros(len(column), world.size, dtype=torch.int64)
    table[:, world.rank] = column
    table = world.allreduce_sum(table, name="vote.ballots")
    floats = table[len(column) - len(bits) :].T.contiguous().view(torch.float64)
    return table[1 : 1 + len(proposals)].tolist(), floats.tolist(), torch.nonzero(table[0]).flatten().tolist()
