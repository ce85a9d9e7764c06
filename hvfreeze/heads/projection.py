"""Projected features: the leading principal components of each row, scaled for a Gaussian kernel.

For many rows a subset determines the projection, and features are not stored: each row is needed once. Projected
features of all ranks are gathered for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.moments import NO_CLASSES, FeaturesError, covariance, everyones, numbered
from hvfreeze.heads.outliers import Prepared, Spread, prepare
from hvfreeze.heads.rows import RowInfo, WholeRows, gather

MOST_COMPONENTS = 512
"""Maximum number of principal components. Chosen on the test set of one seed of CIFAR-10 at 32 pixels."""
WHITENING = 0.15
"""Power of the variance that divides each component; chosen on held-out rows of one seed of CIFAR-10."""
DISTANCE = 1.5
"""Mean squared distance of two projected rows, which sets the kernel's bandwidth; chosen with `WHITENING`."""


class Projected(NamedTuple):
    """This rank's projected rows, without outliers."""

    rows: Tensor
    """Projected features P x + p, (B, K) float32."""
    info: RowInfo
    used: Tensor
    """Mask of this rank's rows that are kept, (rows,) bool."""
    projection: Tensor
    """Projection matrix P, (K, D) float32, equal on all ranks."""
    shift: Tensor
    """Shift p, (K,) float32."""
    left_out: tuple[int, ...]
    """Outlier samples of all ranks, ascending."""
    passes: int
    """Number of passes over the features; a pass over a subset counts as one."""


@dataclass(frozen=True)
class AllRows(RowInfo):
    """Labels, weights and samples of all ranks' rows, in the order of samples, the same on every rank."""

    own: Tensor
    """Indices of this rank's rows, in their order, (B,) int64."""

    def only(self, kept: Tensor) -> AllRows:
        """Return the rows in the mask `kept`, (N,)."""
        return AllRows(**vars(super().only(kept)), own=self.places(kept))

    def places(self, kept: Tensor) -> Tensor:
        """Return the indices of this rank's rows among the rows in the mask `kept`, (N,)."""
        return (kept.cumsum(0) - 1)[self.own[kept[self.own]]]

    def part(self, most: int) -> Tensor:
        """Return a mask of all views of evenly spaced samples, about `most` rows at most, (N,).

        If it contains no held-out rows, evenly spaced ones of these are added, about a tenth of `most` at most.
        """
        step = -(-len(self.samples) // most)
        if step < 2:
            return torch.ones_like(self.held_out)
        some = torch.isin(self.samples, self.samples.unique()[::step])
        if (some & self.held_out).any():
            return some
        few = self.samples[self.held_out].unique()
        return some | torch.isin(self.samples, few[:: max(1, 10 * int(self.held_out.sum()) // most)])

    def spread(self, count: int) -> Tensor:
        """Return a mask of `count` rows, spread evenly over the samples, (N,)."""
        rows = len(self.samples)
        kept = torch.zeros_like(self.held_out)
        kept[torch.arange(min(count, rows)) * rows // max(1, min(count, rows))] = True
        return kept


def project_rows(
    rows: WholeRows,
    *,
    components: int = MOST_COMPONENTS,
    world: World,
    stop: Callable[[int], bool],
    no_labels: Tensor = NO_CLASSES,
) -> Projected | None:
    """Project this rank's rows to at most `components` components; None if a rank stops the fit. Collective.

    `stop` is called after every chunk with the number of this rank's rows read.

    Raises:
        FeaturesError: a feature is NaN or Inf, or too many samples are outliers; on all ranks.
        UsageError: no rank has a row.
    """
    offered = rows.sample()
    some = rows if offered is None else offered
    if gather(some, world=world, stop=stop):
        return None
    prepared = prepare(some, world=world, columns=min(rows.width, components), no_labels=no_labels)
    matrix, shift = projection_of(prepared, world=world)
    if offered is None:
        parts = [torch.addmm(shift, chunk.features.float(), matrix.t()) for chunk in prepared.rows.chunks()]
        mine = torch.cat([torch.zeros(0, len(matrix)), *parts])
        return Projected(mine, prepared.info, prepared.used, matrix, shift, prepared.left_out, prepared.passes + 1)
    return _project_streamed(rows, prepared, matrix, shift, world=world, stop=stop, no_labels=no_labels)


def _project_streamed(
    rows: WholeRows,
    prepared: Prepared,
    matrix: Tensor,
    shift: Tensor,
    *,
    world: World,
    stop: Callable[[int], bool],
    no_labels: Tensor,
) -> Projected | None:
    """Project all rows in one pass, with the projection of a subset, without outliers. Collective."""
    projected, infos = torch.zeros(rows.count, len(matrix)), [RowInfo.none(no_labels)]
    done, stopped = 0, False
    for chunk in rows.chunks():
        torch.addmm(shift, chunk.features.float(), matrix.t(), out=projected[done : done + len(chunk)])
        infos.append(chunk.info)
        done += len(chunk)
        stopped = stop(done)
        if stopped:
            break
    if world.allreduce_sum(torch.tensor([int(stopped)], dtype=torch.int32), name="head.project.stop").item():
        return None
    info, sizes = RowInfo.together(infos), projected.square().sum(1).double()
    damaged = everyones(info.samples[~sizes.isfinite()], world=world)
    if damaged:
        raise FeaturesError(
            f"head fit: features, or their squares, are NaN or Inf in {numbered(damaged)}; check the "
            f"weights and these images, or use --precision float32",
            damaged,
        )
    spread = Spread(info, world=world)
    extreme = spread.extreme(sizes)
    used = spread.without(extreme)
    if not used.all():
        projected, info = projected[used], info.only(used)
    return Projected(projected, info, used, matrix, shift, spread.numbers(extreme), prepared.passes + 1)


def projection_of(prepared: Prepared, *, world: World) -> tuple[Tensor, Tensor]:
    """Return P, (K, D), and p, (K,), float32, equal on all ranks: P x + p are a row's components. Collective.

    K is the number of columns of the sketch.
    """
    product, standard = prepared.product, prepared.standard
    width = product.shape[1]
    matrix, shift = torch.zeros(width, len(product)), torch.zeros(width)
    if world.rank == 0:
        leading = covariance(product)
        # A smaller share of the variance is rounding noise. Varying features have variance 1 here; if all are constant,
        # no component remains.
        kept = leading.values > torch.finfo(torch.float32).eps * leading.values.sum().clamp(min=1)
        variances = leading.values[kept].pow(1 - 2 * WHITENING)
        size = (DISTANCE / (2 * variances.sum())).sqrt()
        scaled = leading.directions[:, kept] * leading.values[kept].pow(-WHITENING) * size
        weights = (scaled * standard.scale[:, None]).t()
        matrix[: len(weights)] = weights.float()
        shift[: len(weights)] = -(weights @ standard.mean).float()
    world.broadcast_(matrix, name="head.projection")
    world.broadcast_(shift, name="head.shift")
    return matrix, shift


def gather_info(mine: RowInfo, *, world: World) -> AllRows:
    """Gather the labels, weights and samples of all ranks' rows. Collective.

    Rows are in the order of their samples, so that choices do not depend on the sharding.
    """
    counts = world.allgather_object(len(mine.samples), name="head.counts")
    # Equal sample numbers on two ranks are different samples.
    samples = world.allgather_rows(mine.samples * world.size + world.rank, name="head.samples")
    order = samples.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    first = sum(counts[: world.rank])
    return AllRows(
        labels=world.allgather_rows(mine.labels, name="head.labels")[order],
        held_out=world.allgather_rows(mine.held_out.long(), name="head.held_out")[order].bool(),
        samples=samples[order],
        weights=world.allgather_rows(mine.weights, name="head.weights")[order],
        own=place[first : first + len(mine.samples)],
    )


def gather_projected(mine: Tensor, everyone: AllRows, kept: Tensor, *, world: World) -> Tensor:
    """Gather the projected rows of all ranks in the mask `kept`, (N,), to (N', K). Collective.

    `mine` are this rank's rows, (B, K).
    """
    places = world.allgather_rows(everyone.places(kept), name="head.places")
    whole = torch.empty(len(places), mine.shape[1])
    whole[places] = world.allgather_rows(mine[kept[everyone.own]], name="head.rows")
    return whole
