"""The directions in which rows are compared: the leading principal ones, partly whitened, at a common distance.

None of it depends on which rank holds which row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvfreeze.heads.kernel.module import MOST_DIRECTIONS
from hvfreeze.heads.nystrom import covariance, sketch
from hvfreeze.heads.rows import Rows
from hvfreeze.heads.standard import Standard
from hvfreeze.ranks.world import World

WHITENED = 0.15
"""Each direction is divided by its variance to this power: between 0, where the few strongest directions decide all
distances, and a half, where all weigh the same."""
LEAST_VARIANCE = 1e-7
"""Of a direction, as a part of all: less is rounding."""
DISTANCE = 1.5
"""What the mean squared distance of two rows becomes: with less all rows look alike, with more none does."""


def project(rows: Rows, standard: Standard, *, world: World) -> tuple[Tensor, Tensor]:
    """Return P, (K, D), and p, (K,), float32, the same on every rank: P x + p are a row's leading directions.

    One pass over the rows. Collective: every rank of `world` must call this.
    """
    width = min(rows.width, MOST_DIRECTIONS)
    product = sketch(rows, standard, world=world, columns=width)
    matrix, shift = torch.zeros(width, rows.width), torch.zeros(width)
    if world.rank == 0:
        leading = covariance(product)
        # A feature that varies at all has variance 1 here: where none does, no direction is left.
        kept = leading.values > LEAST_VARIANCE * leading.values.sum().clamp(min=1)
        variances = leading.values[kept].pow(1 - 2 * WHITENED)
        size = (DISTANCE / (2 * variances.sum())).sqrt()
        scaled = leading.directions[:, kept] * leading.values[kept].pow(-WHITENED) * size
        weights = (scaled * standard.scale[:, None]).t()
        matrix[: len(weights)] = weights.float()
        shift[: len(weights)] = -(weights @ standard.mean).float()
    world.broadcast_(matrix, name="head.projection")
    world.broadcast_(shift, name="head.shift")
    return matrix, shift


def points_of(rows: Rows, matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's rows as points, (N, K), their labels, and as uint8 which are held out, in one pass."""
    found = [(torch.addmm(shift, c.features.float(), matrix.t()), c.labels, c.held_out.byte()) for c in rows.chunks()]
    if not found:
        return torch.zeros(0, len(matrix)), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
    points, labels, held_out = zip(*found, strict=True)
    return torch.cat(points), torch.cat(labels), torch.cat(held_out)


def gathered(mine: Tensor, counts: Sequence[int], *, world: World) -> Tensor:
    """Return all ranks' rows of `mine`, (N, ...), in rank order; `counts` has each rank's number. Collective."""
    whole = torch.zeros(sum(counts), *mine.shape[1:], dtype=mine.dtype)
    for root, part in enumerate(whole.split(list(counts))):
        if root == world.rank:
            part.copy_(mine)
        if len(part):
            world.broadcast_(part, name="head.points", root=root)
    return whole
