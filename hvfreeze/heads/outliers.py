"""Removal of outlier samples before a fit.

A single row with features a thousand times larger than all others dominates every variance, and reduces the others to
rounding noise. A sample is an outlier if the others, measured without it, are close together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.moments import NO_CLASSES, RANK, FeaturesError, Standard, measure, numbered, sketch
from hvfreeze.heads.rows import RowInfo, Rows, SomeRows

SUSPECT = 5.0
"""Distance from the mean, relative to the median, from which moments are recomputed without a row."""
EXTREME = 30.0
"""Distance from the mean of the others, relative to theirs, from which a row is an outlier and is removed."""
MOST_EXTREME = 0.05
"""Largest share of outliers among all samples."""


class Prepared(NamedTuple):
    """Rows without outliers, with their standardisation and sketch."""

    rows: Rows
    used: Tensor
    """Mask of this rank's rows that are kept, (N,) bool."""
    standard: Standard
    product: Tensor
    """Product of the covariance, see `Sketch`."""
    passes: int
    """Number of passes over the rows."""
    info: RowInfo
    """Labels, weights and samples of this rank's kept rows."""
    left_out: tuple[int, ...] = ()
    """Outlier samples of all ranks, ascending."""


def prepare(rows: Rows, *, world: World, columns: int = RANK, no_labels: Tensor = NO_CLASSES) -> Prepared:
    """Remove outliers, and return the remaining rows with their moments and sketch. Collective.

    Raises:
        FeaturesError: a feature is NaN or Inf, or too many samples are outliers; on all ranks.
        UsageError: no rank has a row.
    """
    standard = measure(rows, world=world)
    found = sketch(rows, standard, world=world, columns=columns, no_labels=no_labels)
    spread, passes = Spread(found.info, world=world), 2
    known, sizes, suspects = spread.no_samples, found.sizes, spread.far(found.sizes, SUSPECT)
    # The farthest row determines the scale and hides nearer outliers, so repeat until there are no more.
    while len(suspects) > len(known):
        known, kept = suspects, spread.without(suspects)
        others = measure(SomeRows(rows, kept), world=world)
        sizes = sketch(rows, others, world=world, columns=columns, no_labels=no_labels, kept=kept).sizes
        suspects = torch.cat([known, spread.far(sizes, SUSPECT, known=known)]).unique()
        passes += 2
    extreme = spread.extreme(sizes, known=known) if len(known) else known
    used = spread.without(extreme)
    if not len(extreme):
        return Prepared(rows, used, standard, found.product, passes, found.info)
    left = SomeRows(rows, used)
    standard = measure(left, world=world)
    last = sketch(left, standard, world=world, columns=columns, no_labels=no_labels)
    return Prepared(left, used, standard, last.product, passes + 2, last.info, spread.numbers(extreme))


class Spread:
    """The samples and classes of all ranks' rows. Every rank finds the same outliers in them.

    Equal sample numbers on two ranks are different samples, so samples are identified by number and rank.
    """

    def __init__(self, info: RowInfo, *, world: World) -> None:
        """Take this rank's rows. Collective."""
        self._world = world
        self._own = info.samples * world.size + world.rank
        self._samples = world.allgather_rows(self._own, name="head.samples")
        # Rows with other labels than classes are treated as rows of one class.
        classes = info.labels if info.labels.dim() == 1 else torch.zeros_like(self._own)
        self._classes = world.allgather_rows(classes, name="head.classes")
        self.no_samples = self._own[:0]

    def far(self, sizes: Tensor, times: float, *, known: Tensor | None = None) -> Tensor:
        """Return the samples with a row more than `times` the median distance from the mean, ascending. Collective.

        `sizes` are the squared distances of this rank's rows, (N,) float64; the median is of rows not in `known`.
        """
        everyones = self._world.allgather_rows(sizes, name="head.sizes")
        usual = everyones if known is None else everyones[~torch.isin(self._samples, known)]
        found: Tensor = self._samples[everyones > times**2 * usual.median()].unique()
        return found

    def extreme(self, sizes: Tensor, *, known: Tensor | None = None) -> Tensor:
        """Return the outliers, for arguments as of `far`; FeaturesError, on all ranks, if they are many. Collective."""
        far = torch.isin(self._samples, self.far(sizes, EXTREME, known=known))
        # A class whose samples are all far from the rest is not damaged.
        outliers: Tensor = self._samples[far & torch.isin(self._classes, self._classes[~far])].unique()
        count, numbers = len(self._samples.unique()), self.numbers(outliers)
        if len(numbers) > max(1, MOST_EXTREME * count):
            raise FeaturesError(
                f"head fit: the features of {len(numbers)} of {count} samples are outliers, more than "
                f"{EXTREME:.0f} times the spread of the others away: {numbered(numbers)}; check these "
                f"images, the normalisation (--mean, --std) and the weights",
                numbers,
            )
        return outliers

    def without(self, samples: Tensor) -> Tensor:
        """Return a mask of this rank's rows of other samples, (N,) bool."""
        return ~torch.isin(self._own, samples)

    def numbers(self, samples: Tensor) -> tuple[int, ...]:
        """Return the numbers of samples."""
        return tuple((samples // self._world.size).tolist())
