"""Mean, scale and leading covariance of every feature over all ranks' rows: what a solver is started and steered by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads.rows import RowInfo, Rows, SomeRows

SMALLEST_VARIATION = 1e-6
"""A feature whose standard deviation is a smaller part of its mean is rounding of float32, not information."""
LARGEST_MEAN = 30
"""In standard deviations; products of features with a larger mean lose digits in float32, so the mean is taken off."""


class FeaturesError(NumericsError):
    """Features of some `samples`, by number, on which no head can be solved."""

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples = tuple(samples)


NO_CLASSES = torch.zeros(0, dtype=torch.int64)


def numbered(samples: Sequence[int], *, most: int = 5) -> str:
    """Return samples by number, the first ones where there are more than `most`."""
    more = len(samples) - most
    shown = ", ".join(map(str, samples[:most])) + (f" and {more} more" if more > 0 else "")
    return f"{'sample' if len(samples) == 1 else 'samples'} {shown}"


@dataclass(frozen=True)
class Standard:
    """Makes each feature's mean 0 and its variance 1: (x - mean) * scale."""

    mean: Tensor
    """(D,) float64."""
    scale: Tensor
    """(D,) float64; 1 where the feature is constant."""
    count: int
    """Rows of all ranks."""
    held_out: int
    """Held-out rows of all ranks."""
    origin: Tensor
    """(D,) float32, taken off features before they are multiplied; all 0 unless a mean is large."""

    @property
    def offset(self) -> Tensor:
        """The mean of the output of `taken`, (D,) float64."""
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
    """Return the standardisation of all ranks' rows, held-out ones too, with the same bits on every rank. Collective.

    One pass. Deviations are taken from the first row of the lowest rank that has any, so that a large mean does not
    swallow a small variance.

    Raises:
        FeaturesError: a feature is NaN or infinite, on any rank.
        UsageError: no rank has a row.
    """
    first = next((chunk.features[0].double() for chunk in rows.chunks()), None)
    filled = torch.zeros(world.size, dtype=torch.int32)
    filled[world.rank] = int(first is not None)
    filled = world.allreduce_sum(filled, name="head.filled")
    if not filled.any():
        raise UsageError("head fit: there are no samples to fit on; give more training samples").on_all_ranks()
    origin = torch.zeros(rows.width, dtype=torch.float64) if first is None else first
    world.broadcast_(origin, name="head.origin", root=int(filled.nonzero()[0]))
    moments = torch.zeros(2, rows.width + 1, dtype=torch.float64)
    shift = origin.float()
    for chunk in rows.chunks():
        deviations = chunk.features.float() - shift
        moments[0, :-1] += deviations.sum(0)
        moments[0, -1] += len(deviations)
        moments[1, -1] += chunk.info.held_out.sum()
        moments[1, :-1] += deviations.square_().sum(0)
    moments = world.allreduce_sum(moments, name="head.moments")
    if not moments.isfinite().all():
        columns = (~moments.isfinite()).any(0).nonzero().flatten().tolist()
        # What is wrong with the row that the others are compared with is not wrong with them.
        samples = damaged(rows, torch.zeros_like(shift), world=world) or damaged(rows, shift, world=world)
        raise FeaturesError(
            f"head fit: {len(columns)} of {rows.width} features are NaN or infinite, the first is number {columns[0]}; "
            f"these, or their squares, are so in {numbered(samples)}: the weights or the images are damaged, or the "
            "precision is too small for the network",
            samples,
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


def damaged(rows: Rows, shift: Tensor, *, world: World) -> list[int]:
    """Return the samples of all ranks whose features, or their squares, less `shift`, are not finite. Collective."""
    mine = [int(chunk.info.samples[row]) for chunk in rows.chunks() for row in immeasurable(chunk.features - shift)]
    return sorted({sample for theirs in world.allgather_object(mine, name="head.damaged") for sample in theirs})


def immeasurable(features: Tensor) -> list[int]:
    """Return the rows of (B, D) features whose squares are not finite."""
    return (~features.float().square().isfinite().all(1)).nonzero().flatten().tolist()


def check_choice(held_out: int, penalties: int) -> None:
    """Raise UsageError, on all ranks, for several penalties and no `held_out` rows to choose among them."""
    if penalties > 1 and held_out == 0:
        raise UsageError(
            f"head fit: {penalties} penalties and no held-out samples to choose by; give more training samples"
        ).on_all_ranks()


RANK = 128
SEED = 20230423


@dataclass(frozen=True)
class Covariance:
    """The leading part of the standardised features' covariance, for a cheap inverse of a loss's second derivative.

    Many features are much alike, so a few directions bend a hundred times more than the others. Source: Frangella,
    Tropp and Udell, "Randomized Nystrom Preconditioning" (SIAM J. Matrix Anal. Appl. 44, 2023).
    """

    directions: Tensor
    """(D, K) float64, orthonormal columns."""
    values: Tensor
    """(K,) float64, decreasing."""

    def root_inverse(self, gradient: Tensor, *, curvature: float, penalty: float) -> Tensor:
        """Return the root of the inverse of curvature x covariance + 2 penalty, times `gradient`, (C, D + 1).

        Directions outside `directions` count as if their variance were the least of `values`; the intercept, the last
        column, bends by `curvature` alone.
        """
        # Where every row is certain, nothing bends but the penalty.
        curvature = max(curvature, 1e-6)
        coefficients = gradient[:, :-1]
        least = (curvature * self.values[-1] + 2 * penalty).rsqrt()
        correction = (curvature * self.values + 2 * penalty).rsqrt() - least
        result = torch.empty_like(gradient)
        result[:, :-1] = coefficients * least + ((coefficients @ self.directions) * correction) @ self.directions.t()
        result[:, -1] = gradient[:, -1] / curvature**0.5
        return result


class Sketch(NamedTuple):
    """What one pass over standardised rows tells."""

    product: Tensor
    """A T, (D, K) float64, for the covariance A of all ranks' rows and T = `test_matrix(D, K)`; equal on all ranks."""
    sizes: Tensor
    """(N,) float64, each of this rank's rows' squared distance from the mean, but for the randomness of T."""
    info: RowInfo
    """Of this rank's rows."""


def sketch(
    rows: Rows,
    standard: Standard,
    *,
    world: World,
    columns: int = RANK,
    no_labels: Tensor = NO_CLASSES,
    kept: Tensor | None = None,
) -> Sketch:
    """Return what one pass over all ranks' rows tells of their leading directions and of each row's size. Collective.

    Of this rank's rows only those that are `kept`, (N,) bool, count in the product.
    """
    scaled = test_matrix(rows.width, columns) * standard.scale[:, None]
    factor, shift = scaled.float(), (standard.offset @ scaled).float()
    # The last row sums the products themselves: with it the mean can be taken off afterwards.
    sums = torch.zeros(rows.width + 1, scaled.shape[1], dtype=torch.float64)
    sizes, infos, place = [torch.zeros(0, dtype=torch.float64)], [RowInfo.none(no_labels)], 0
    for chunk in rows.chunks():
        features = standard.taken(chunk.features)
        products = features @ factor - shift
        # The mean square over random signs is that of the row itself.
        sizes.append(products.double().square().mean(1))
        infos.append(chunk.info)
        if kept is not None:
            products[~kept[place : place + len(products)]] = 0
        place += len(products)
        sums[:-1] += features.t() @ products
        sums[-1] += products.sum(0, dtype=torch.float64)
    sums = world.allreduce_sum(sums, name="head.sketch")
    product = (sums[:-1] - standard.offset[:, None] * sums[-1]) * standard.scale[:, None] / standard.count
    return Sketch(product, torch.cat(sizes), RowInfo.together(infos))


SUSPECT = 5.0
"""Times as far from the mean as most rows: from here on moments are looked at without a row."""
EXTREME = 30.0
"""Times as far from the mean of the others as these are: such a row is left out, lest it alone makes the scale."""
MOST_EXTREME = 0.05
"""Of all samples; more are no few damaged ones."""


class Prepared(NamedTuple):
    """Rows ready to be fitted: without extreme ones, and with what a solver is started and steered by."""

    rows: Rows
    used: Tensor
    """(N,) bool, which of this rank's rows these are."""
    standard: Standard
    product: Tensor
    """See `Sketch`."""
    passes: int
    """Over the rows."""
    info: RowInfo
    """Of this rank's rows that are used."""
    left_out: tuple[int, ...] = ()
    """The samples of all ranks that are not used, ascending."""


def prepare(rows: Rows, *, world: World, columns: int = RANK, no_labels: Tensor = NO_CLASSES) -> Prepared:
    """Return the rows of all ranks but those of extreme samples, their moments and their sketch. Collective.

    One row whose features are a thousand times as large as all others' makes the variance of every feature: what tells
    the others apart is then rounding. A sample is extreme where the others, measured without it, lie close together.

    Raises:
        FeaturesError: a feature is NaN or infinite, or too many samples are extreme; on all ranks.
        UsageError: no rank has a row.
    """
    standard = measure(rows, world=world)
    sketched = partial(sketch, world=world, columns=columns, no_labels=no_labels)
    found = sketched(rows, standard)
    everything = torch.ones(len(found.sizes), dtype=torch.bool)
    suspects = far_ones(found, found.sizes, SUSPECT, world=world)
    if not suspects:
        return Prepared(rows, everything, standard, found.product, 2, found.info)
    passes, known = 2, list[int]()
    # The farthest row also hides those that are less far, as it makes the scale: until no other one shows.
    while suspects != known:
        known, others = suspects, ~torch.isin(found.info.samples, torch.tensor(suspects))
        without = measure(SomeRows(rows, others), world=world)
        again = sketched(rows, without, kept=others)
        suspects = sorted({*known, *far_ones(again, again.sizes[others], SUSPECT, world=world)})
        passes += 2
    extreme = without_whole_classes(far_ones(again, again.sizes[others], EXTREME, world=world), found, world=world)
    if not extreme:
        return Prepared(rows, everything, standard, found.product, passes, found.info)
    check_extreme(extreme, found, world=world)
    used = ~torch.isin(found.info.samples, torch.tensor(extreme))
    left = SomeRows(rows, used)
    if extreme == suspects:
        return Prepared(left, used, without, again.product, passes, found.info.only(used), tuple(extreme))
    standard = measure(left, world=world)
    last = sketched(left, standard)
    return Prepared(left, used, standard, last.product, passes + 2, last.info, tuple(extreme))


def check_extreme(extreme: list[int], found: Sketch, *, world: World) -> None:
    """Raise FeaturesError, on all ranks, where too many samples are extreme to be damaged ones. Collective."""
    count = sum(world.allgather_object(len(found.info.samples.unique()), name="head.samples"))
    if len(extreme) > max(1, MOST_EXTREME * count):
        raise FeaturesError(
            f"head fit: the features of {len(extreme)} of {count} samples lie more than {EXTREME:.0f} times as far "
            f"from the others as these do from each other, which no head can be fitted to: {numbered(extreme)}; look "
            "at these images, at the normalisation (--mean, --std) and at the weights",
            extreme,
        )


def far_ones(found: Sketch, usual: Tensor, times: float, *, world: World) -> list[int]:
    """Return the samples of all ranks with a row more than `times` as far from the mean as the median row. Collective.

    `usual` are the sizes of this rank's rows among which the median is looked for; it is known to a factor of 2.
    """
    halves = torch.zeros(BINS, dtype=torch.int64)
    exponents = usual.clamp(min=torch.finfo(torch.float64).tiny).log2().ceil().clamp(-BINS // 2, BINS // 2 - 1)
    halves += torch.bincount((exponents + BINS // 2).long(), minlength=BINS)
    halves = world.allreduce_sum(halves, name="head.sizes")
    median = int((halves.cumsum(0) * 2 >= halves.sum()).nonzero()[0])
    limit = times**2 * 2.0 ** (median - BINS // 2)
    mine = found.info.samples[found.sizes > limit].unique().tolist()
    return sorted(sample for theirs in world.allgather_object(mine, name="head.far") for sample in theirs)


def without_whole_classes(samples: list[int], found: Sketch, *, world: World) -> list[int]:
    """Return those of the samples of whose class there are others; all where labels are no classes. Collective.

    Where all of a class lie far from the rest, that is what it looks like.
    """
    chosen = torch.isin(found.info.samples, torch.tensor(samples, dtype=torch.int64))
    if found.info.labels.dim() > 1:
        return samples
    numbers, labels_of = found.info.samples[chosen].tolist(), found.info.labels[chosen].tolist()
    mine = (set(found.info.labels[~chosen].tolist()), dict(zip(numbers, labels_of, strict=True)))
    others, labels = zip(*world.allgather_object(mine, name="head.classes"))
    seen = set[int]().union(*others)
    return sorted(sample for theirs in labels for sample, label in theirs.items() if label in seen)


BINS = 256
"""Powers of two by which distances are counted, so that all ranks come to the same median."""


def test_matrix(width: int, columns: int = RANK) -> Tensor:
    """Return (D, K) of random signs, float64: exact on every machine, which draws of other laws need not be."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (width, min(columns, width)), generator=generator)
    return (2 * signs - 1).double()


def covariance(product: Tensor) -> Covariance:
    """Return the leading part of any symmetric matrix A from `product` = A T, (D, K), of `sketch`."""
    matrix = test_matrix(*product.shape)
    # A little of the identity keeps the small matrix positive definite; it is taken off again at the end.
    lift = 1e-6 * float(product.norm()) / float(matrix.norm()) + torch.finfo(torch.float64).tiny
    lifted = product + lift * matrix
    core = matrix.t() @ lifted
    values, vectors = torch.linalg.eigh((core + core.t()) / 2)
    kept = values > 1e-10 * values[-1]
    root = lifted @ (vectors[:, kept] / values[kept].sqrt())
    squares, turned = torch.linalg.eigh(root.t() @ root)
    squares, turned = squares.flip(0).clamp(min=torch.finfo(torch.float64).tiny), turned.flip(1)
    return Covariance(root @ (turned / squares.sqrt()), (squares - lift).clamp(min=0))
