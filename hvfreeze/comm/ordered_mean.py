"""A mean over ranks whose sum is taken in the order of ranks: the same bits everywhere, as in one process.

Each rank is given one part of everybody's vector, adds the parts up, and hands the mean back: the bytes of a ring
allreduce. What MPI adds in which order would depend on its version, the size and the network.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from hvfreeze.comm.point_to_point import Wire


def average_(flat: Tensor, wire: Wire, *, rank: int, size: int, lanes: tuple[str, str]) -> None:
    """Make `flat` the mean over all ranks' vectors: ((v_0 + v_1) + ...) / n. Collective.

    Args:
        flat: (N,) floats, of one length and type on all ranks.
        wire: between the ranks.
        rank: this one.
        size: how many there are.
        lanes: one for the parts of vectors, one for their means.
    """
    gathering, returning = lanes
    parts = list(flat.tensor_split(size))
    others = [other for other in range(size) if other != rank]
    for other in others:
        wire.put(parts[other], to=other, lane=gathering)
    mine = parts[rank]
    received = [
        mine.clone() if source == rank else wire.get(mine.shape, dtype=flat.dtype, source=source, lane=gathering)
        for source in range(size)
    ]
    *_, total = accumulate(received, torch.add)
    mine.copy_(total / size)
    for other in others:
        wire.put(mine, to=other, lane=returning)
        wire.expect(parts[other].shape, dtype=flat.dtype, source=other, lane=returning)
    # What was put of `flat` must have gone before means are written over it.
    wire.drain()
    for other in others:
        parts[other].copy_(wire.get(parts[other].shape, dtype=flat.dtype, source=other, lane=returning))
