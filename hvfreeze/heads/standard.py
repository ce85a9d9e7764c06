"""The mean and scale of every feature over all ranks, and what folds them into a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads.rows import Rows
from hvfreeze.ranks.world import World

SMALLEST_VARIATION = 1e-6
"""A feature whose standard deviation is a smaller part of its mean is rounding of float32, not information."""
LARGEST_MEAN = 30
"""In standard deviations; products of features with a larger mean lose digits in float32, so the mean is taken off."""


@dataclass(frozen=True)
class Standard:
    """What makes each feature's mean 0 and its variance 1: (x - mean) * scale.

    Attributes:
        mean: (D,) float64.
        scale: (D,) float64; 1 where the feature is constant.
        count: rows of all ranks.
        held_out: those of them that are held out.
        origin: (D,) float32, what is taken off features before they are multiplied; all 0 unless a mean is large.
    """

    mean: Tensor
    scale: Tensor
    count: int
    held_out: int
    origin: Tensor

    @property
    def offset(self) -> Tensor:
        """The mean of what `taken` gives, (D,) float64."""
        return self.mean - self.origin

    def taken(self, features: Tensor) -> Tensor:
        """Return features, (B, D) of any floating type, as float32 and less `origin`."""
        # Mostly there is nothing to take off, and a copy of all rows to save in every pass.
        return features.float() - self.origin if self.origin.any() else features.float()

    def folded(self, weights: Tensor, *, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight, (C, D), and bias, (C,), for features of mean `mean` and this scale.

        `weights`, (C, D + 1), are for standardised features; the last column is the intercept. All are float64.
        """
        weight = weights[:, :-1] * self.scale
        return weight, weights[:, -1] - weight @ mean


def measure(rows: Rows, *, world: World) -> Standard:
    """Return the standardisation of all ranks' rows, held-out ones too, in one pass; the same bits on every rank.

    Deviations are taken from the first row of the lowest rank that has any, so that a large mean does not swallow a
    small variance. Collective: every rank of `world` must call this.

    Raises:
        NumericsError: a feature is NaN or infinite, on any rank.
        UsageError: no rank has a row.
    """
    first = next((chunk.features[0].double() for chunk in rows.chunks()), None)
    filled = world.allreduce_sum(_one_hot(world, first is not None), name="head.filled")
    if not filled.any():
        error = UsageError("head fit: there are no samples to fit on; give more training samples")
        error.everywhere = True
        raise error
    origin = torch.zeros(rows.width, dtype=torch.float64) if first is None else first
    world.broadcast_(origin, name="head.origin", root=int(filled.nonzero()[0]))
    moments = torch.zeros(2, rows.width + 1, dtype=torch.float64)
    shift = origin.float()
    for chunk in rows.chunks():
        deviations = chunk.features.float() - shift
        moments[0, :-1] += deviations.sum(0)
        moments[0, -1] += len(deviations)
        moments[1, -1] += chunk.held_out.sum()
        moments[1, :-1] += deviations.square_().sum(0)
    moments = world.allreduce_sum(moments, name="head.moments")
    if not moments.isfinite().all():
        columns = (~moments.isfinite()).any(0).nonzero().flatten().tolist()
        raise NumericsError(
            f"head fit: {len(columns)} of {rows.width} features are NaN or infinite, the first is number {columns[0]}; "
            "the weights or the images are damaged, or the precision is too small for the network"
        )
    count = moments[0, -1]
    offset = moments[0, :-1] / count
    deviation = (moments[1, :-1] / count - offset.square()).clamp(min=0).sqrt()
    mean = shift.double() + offset
    constant = deviation <= SMALLEST_VARIATION * mean.abs()
    scale = torch.where(constant, 1.0, 1.0 / deviation)
    far = bool((mean.abs() * scale)[~constant].gt(LARGEST_MEAN).any())
    taken_off = mean.float() if far else torch.zeros_like(shift)
    return Standard(mean, scale, int(count), int(moments[1, -1]), taken_off)


def check_choice(standard: Standard, penalties: int) -> None:
    """Refuse to choose among several penalties where no rows are held out; on all ranks alike.

    Raises:
        UsageError: there are none.
    """
    if penalties > 1 and standard.held_out == 0:
        error = UsageError(
            f"head fit: {penalties} penalties and no held-out samples to choose by; give more training samples"
        )
        error.everywhere = True
        raise error


def _one_hot(world: World, on: bool) -> Tensor:
    vector = torch.zeros(world.size, dtype=torch.int32)
    vector[world.rank] = int(on)
    return vector
