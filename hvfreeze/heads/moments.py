"""Standardisation and leading covariance of all ranks' features, before a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads.rows import RowInfo, Rows
from hvfreeze.wording import first_few

SMALLEST_VARIATION = 1e-6
"""Ratio of standard deviation to mean below which a feature is float32 rounding noise."""
LARGEST_MEAN = 30
"""Mean in standard deviations above which it is subtracted, because float32 products would lose digits."""


class FeaturesError(NumericsError):
    """The features of some `samples`, by number, do not allow a fit."""

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples = tuple(samples)


NO_CLASSES = torch.zeros(0, dtype=torch.int64)


def numbered(samples: Sequence[int]) -> str:
    """Return the numbers of the first five samples, for messages."""
    return f"{'sample' if len(samples) == 1 else 'samples'} {first_few([*map(str, samples)], most=5)}"


@dataclass(frozen=True)
class Standard:
    """The standardisation of features to mean 0 and variance 1: (x - mean) * scale."""

    mean: Tensor
    """Mean of each feature, (D,) float64."""
    scale: Tensor
    """Inverse standard deviation of each feature, (D,) float64; 1 for constant features."""
    count: int
    """Number of rows of all ranks."""
    weight: float
    """Sum of their weights."""
    held_out: int
    """Number of held-out rows of all ranks."""
    origin: Tensor
    """Offset subtracted from features before products, (D,) float32; all 0 unless a mean is large."""

    @property
    def offset(self) -> Tensor:
        """Mean of the output of `taken`, (D,) float64."""
        return self.mean - self.origin

    def taken(self, features: Tensor) -> Tensor:
        """Return features, (B, D) of any floating type, minus `origin`, as float32."""
        # Usually the origin is 0, which saves a copy of all rows in each pass.
        return features.float() - self.origin if self.origin.any() else features.float()

    def folded(self, weights: Tensor, *, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Fold the standardisation with mean `mean` into `weights`; return weight, (C, D), and bias, (C,).

        `weights`, (C, D + 1), are for standardised features, with the intercept in the last column. All are float64.
        """
        weight = weights[:, :-1] * self.scale
        return weight, weights[:, -1] - weight @ mean


def measure(rows: Rows, *, world: World) -> Standard:
    """Return the standardisation of all ranks' weighted rows, held-out ones too; bitwise equal on all. Collective.

    Takes one pass. Deviations are relative to the first row of the lowest rank with rows, so that a large mean does not
    hide a small variance.

    Raises:
        FeaturesError: a feature is NaN or Inf on any rank.
        UsageError: no rank has a row.
    """
    first = next((chunk.features[0].double() for chunk in rows.chunks()), None)
    filled = world.allgather_object(first is not None, name="head.filled")
    if not any(filled):
        raise UsageError("head fit: there are no samples to fit; use more training samples").on_all_ranks()
    origin = torch.zeros(rows.width, dtype=torch.float64) if first is None else first
    world.broadcast_(origin, name="head.origin", root=filled.index(True))
    moments = torch.zeros(2, rows.width + 2, dtype=torch.float64)
    shift = origin.float()
    for chunk in rows.chunks():
        deviations = chunk.features.float() - shift
        weighted = weigh(deviations, chunk.info.weights)
        moments[0, :-2] += weighted.sum(0)
        moments[0, -2:] += torch.stack([torch.tensor(len(deviations)), chunk.info.weights.double().sum()])
        moments[1, -2] += chunk.info.held_out.sum()
        moments[1, :-2] += deviations.mul_(weighted).sum(0)
    moments = world.allreduce_sum(moments, name="head.moments")
    if not moments.isfinite().all():
        columns = (~moments.isfinite()).any(0).nonzero().flatten().tolist()
        # NaN or Inf in the reference row does not make the other rows invalid.
        samples = damaged(rows, torch.zeros_like(shift), world=world) or damaged(rows, shift, world=world)
        raise FeaturesError(
            f"head fit: {len(columns)} of {rows.width} features, or their squares, are NaN or Inf, "
            f"starting with feature {columns[0]}, in {numbered(samples)}; check the weights and "
            f"these images, or use --precision float32",
            samples,
        )
    count, weight = moments[0, -2:].tolist()
    offset = moments[0, :-2] / weight
    deviation = (moments[1, :-2] / weight - offset.square()).clamp(min=0).sqrt()
    mean = shift.double() + offset
    constant = deviation <= SMALLEST_VARIATION * mean.abs()
    scale = torch.where(constant, 1.0, 1.0 / deviation)
    far = bool((mean.abs() * scale)[~constant].gt(LARGEST_MEAN).any())
    taken_off = mean.float() if far else torch.zeros_like(shift)
    return Standard(mean, scale, int(count), weight, int(moments[1, -2]), taken_off)


def weigh(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows, (B, D), times their weights, (B,); without a copy if all weights are 1."""
    return rows if bool((weights == 1).all()) else rows * weights[:, None]


def damaged(rows: Rows, shift: Tensor, *, world: World) -> list[int]:
    """Return the samples of all ranks with NaN or Inf in features minus `shift`, or in their squares. Collective."""
    mine = [torch.zeros(0, dtype=torch.int64)]
    for chunk in rows.chunks():
        measurable = (chunk.features - shift).float().square().isfinite().all(1)
        mine.append(chunk.info.samples[~measurable])
    return everyones(torch.cat(mine), world=world)


def everyones(samples: Tensor, *, world: World) -> list[int]:
    """Return the samples of all ranks, ascending. Collective."""
    return sorted(set(world.allgather_rows(samples, name="head.damaged").tolist()))


def check_choice(held_out: int, penalties: int) -> None:
    """Raise UsageError, on all ranks, for several penalties without `held_out` rows."""
    if penalties > 1 and held_out == 0:
        raise UsageError(
            f"head fit: {penalties} penalties and no held-out samples to choose one; use more training samples"
        ).on_all_ranks()


RANK = 128
"""Largest number of eigenvectors that precondition a linear head."""


@dataclass(frozen=True)
class Covariance:
    """The leading eigenvectors of the standardised features' covariance, for a cheap approximate inverse Hessian.

    Many features are correlated, so a few directions have a hundred times the curvature of the others. Source:
    Frangella, Tropp and Udell, "Randomized Nystrom Preconditioning" (SIAM J. Matrix Anal. Appl. 44, 2023).
    """

    directions: Tensor
    """Leading eigenvectors, orthonormal columns, (D, K) float64."""
    values: Tensor
    """Eigenvalues, decreasing, (K,) float64."""

    def root_inverse(self, gradient: Tensor, *, curvature: float, penalty: float) -> Tensor:
        """Return (curvature x covariance + 2 penalty)^(-1/2) times `gradient`, (C, D + 1).

        Directions outside `directions` have the least eigenvalue of `values`; the intercept, the last column, has the
        second derivative `curvature`.
        """
        # If all predictions are certain, only the penalty has curvature.
        curvature = max(curvature, 1e-6)
        coefficients = gradient[:, :-1]
        least = (curvature * self.values[-1] + 2 * penalty).rsqrt()
        correction = (curvature * self.values + 2 * penalty).rsqrt() - least
        result = torch.empty_like(gradient)
        result[:, :-1] = coefficients * least + ((coefficients @ self.directions) * correction) @ self.directions.t()
        result[:, -1] = gradient[:, -1] / curvature**0.5
        return result


class Sketch(NamedTuple):
    """The results of a pass over standardised rows."""

    product: Tensor
    """A T, (D, K) float64, for the covariance A of all ranks' rows and T = `test_matrix(D, K)`; equal on all ranks."""
    sizes: Tensor
    """Estimated squared distance from the mean of each of this rank's rows, (N,) float64."""
    info: RowInfo
    """Labels, weights and samples of this rank's rows."""


def sketch(
    rows: Rows,
    standard: Standard,
    *,
    world: World,
    columns: int = RANK,
    no_labels: Tensor = NO_CLASSES,
    kept: Tensor | None = None,
) -> Sketch:
    """Sketch the covariance of all ranks' rows and estimate the size of each row, in one pass. Collective.

    Only this rank's rows in the mask `kept`, (N,), count in the product, by their weights.
    """
    scaled = test_matrix(rows.width, columns) * standard.scale[:, None]
    factor, shift = scaled.float(), (standard.offset @ scaled).float()
    # The last row sums the products, for subtracting the mean afterwards.
    sums = torch.zeros(rows.width + 1, scaled.shape[1], dtype=torch.float64)
    sizes, infos, place = [torch.zeros(0, dtype=torch.float64)], [RowInfo.none(no_labels)], 0
    for chunk in rows.chunks():
        features = standard.taken(chunk.features)
        products = features @ factor - shift
        # The mean square over random signs estimates that of the row.
        sizes.append(products.double().square().mean(1))
        infos.append(chunk.info)
        if kept is not None:
            products[~kept[place : place + len(products)]] = 0
        place += len(products)
        products = weigh(products, chunk.info.weights)
        sums[:-1] += features.t() @ products
        sums[-1] += products.sum(0, dtype=torch.float64)
    sums = world.allreduce_sum(sums, name="head.sketch")
    product = (sums[:-1] - standard.offset[:, None] * sums[-1]) * standard.scale[:, None] / standard.weight
    return Sketch(product, torch.cat(sizes), RowInfo.together(infos))


def test_matrix(width: int, columns: int = RANK) -> Tensor:
    """Return random signs, (D, K) float64, which are equal on every machine, unlike other distributions."""
    generator = torch.Generator().manual_seed(20230423)
    signs = torch.randint(0, 2, (width, min(columns, width)), generator=generator)
    return (2 * signs - 1).double()


def covariance(product: Tensor) -> Covariance:
    """Return the leading eigenvectors of a symmetric matrix A from `product` = A T, (D, K), of `sketch`."""
    matrix = test_matrix(*product.shape)
    # A small multiple of the identity keeps the matrix positive definite; it is subtracted at the end.
    lift = 1e-6 * float(product.norm()) / float(matrix.norm()) + torch.finfo(torch.float64).tiny
    lifted = product + lift * matrix
    core = matrix.t() @ lifted
    values, vectors = torch.linalg.eigh((core + core.t()) / 2)
    kept = values > 1e-10 * values[-1]
    root = lifted @ (vectors[:, kept] / values[kept].sqrt())
    squares, turned = torch.linalg.eigh(root.t() @ root)
    squares, turned = squares.flip(0).clamp(min=torch.finfo(torch.float64).tiny), turned.flip(1)
    return Covariance(root @ (turned / squares.sqrt()), (squares - lift).clamp(min=0))
