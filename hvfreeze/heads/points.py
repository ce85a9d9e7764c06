"""Rows as points, `MOST_DIRECTIONS` numbers each, in which a kernel head compares them; and points of other ranks.

Of many rows a sample decides how points are made, and features are not kept: each is needed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.moments import (
    EXTREME,
    FeaturesError,
    Prepared,
    Sketch,
    check_extreme,
    covariance,
    far_ones,
    numbered,
    prepare,
    without_whole_classes,
)
from hvfreeze.heads.rows import WholeRows, gather

MOST_DIRECTIONS = 512
"""Of the features, in which rows are compared."""
WHITENED = 0.15
"""Each direction is divided by its variance to this power: between 0, where the few strongest directions decide all
distances, and a half, where all weigh the same."""
LEAST_VARIANCE = 1e-7
"""Of a direction, as a part of all: less is rounding."""
DISTANCE = 1.5
"""The mean squared distance of two rows after scaling: with less all rows look alike, with more none does."""


@dataclass(frozen=True)
class Marks:
    """What is known of the rows of all ranks beside their points, in the order of samples, the same on every rank."""

    labels: Tensor
    """(N,) int64."""
    samples: Tensor
    """(N,) int64, ascending, equal for the views of one sample."""
    held_out: Tensor
    """(N,) bool."""
    mirrored: Tensor
    """(N,) bool."""
    own: Tensor
    """(B,) int64, where this rank's own rows are, in their order."""

    def only(self, kept: Tensor) -> Marks:
        """Return those of the rows of which `kept`, (N,) bool, is true."""
        return Marks(self.labels[kept], self.samples[kept], self.held_out[kept], self.mirrored[kept], self.moved(kept))

    def moved(self, kept: Tensor) -> Tensor:
        """Return where this rank's own rows of which `kept`, (N,) bool, is true are among all such."""
        return (kept.cumsum(0) - 1)[self.own[kept[self.own]]]

    def part(self, most: int) -> Tensor:
        """Return, (N,) bool, all views of every so many samples, at most about `most` rows.

        Where no held-out ones are among them, with all of these: they are few then.
        """
        step = -(-len(self.labels) // most)
        if step < 2:
            return torch.ones_like(self.held_out)
        some = torch.isin(self.samples, self.samples.unique()[::step])
        return some if (some & self.held_out).any() else some | self.held_out

    def spread(self, count: int) -> Tensor:
        """Return, (N,) bool, `count` rows, as evenly spread over the samples as can be."""
        rows = len(self.labels)
        kept = torch.zeros_like(self.held_out)
        kept[torch.arange(min(count, rows)) * rows // max(1, min(count, rows))] = True
        return kept


@dataclass(frozen=True)
class AllRows(Marks):
    """Rows of all ranks with their points."""

    points: Tensor
    """(N, K) float32."""

    def only(self, kept: Tensor) -> AllRows:
        """Return those of the rows of which `kept`, (N,) bool, is true."""
        return AllRows(**vars(super().only(kept)), points=self.points[kept])


class OwnPoints(NamedTuple):
    """This rank's rows as points, but for those that are left out."""

    points: Tensor
    """(B, K) float32: P x + p."""
    marks: Tensor
    """(4, B) int64; see `Sketch`."""
    used: Tensor
    """(rows,) bool, which of this rank's rows these are."""
    matrix: Tensor
    """P, (K, D) float32, equal on all ranks."""
    shift: Tensor
    """p, (K,) float32."""
    left_out: tuple[int, ...]
    """Samples of all ranks that are left out, ascending."""
    passes: int
    """Over rows of features; over a sample, counted as if it were all."""


def points_of(
    rows: WholeRows, *, directions: int = MOST_DIRECTIONS, world: World, stop: Callable[[int], bool]
) -> OwnPoints | None:
    """Return this rank's rows as points of so many numbers at most, None where some rank wants to stop. Collective.

    `stop` is called with the number of this rank's rows that have been read, after every chunk.

    Raises:
        FeaturesError: a feature is NaN or infinite, or too many samples are extreme; on all ranks.
        UsageError: no rank has a row.
    """
    offered = rows.sample()
    some = rows if offered is None else offered
    if gather(some, world=world, stop=stop):
        return None
    prepared = prepare(some, world=world, columns=min(rows.width, directions))
    matrix, shift = project(prepared, world=world)
    if offered is None:
        points = [torch.addmm(shift, chunk.features.float(), matrix.t()) for chunk in prepared.rows.chunks()]
        mine = torch.cat([torch.zeros(0, len(matrix)), *points])
        return OwnPoints(mine, prepared.marks, prepared.used, matrix, shift, prepared.left_out, prepared.passes + 1)
    return _all_points(rows, prepared, matrix, shift, world=world, stop=stop)


def _all_points(
    rows: WholeRows, prepared: Prepared, matrix: Tensor, shift: Tensor, *, world: World, stop: Callable[[int], bool]
) -> OwnPoints | None:
    """Pass over all rows, with what a sample of them has decided; without those that are extreme. Collective."""
    points, marks = torch.zeros(rows.count, len(matrix)), torch.zeros(4, rows.count, dtype=torch.int64)
    done, stopped = 0, False
    for chunk in rows.chunks():
        place = slice(done, done + len(chunk.labels))
        torch.addmm(shift, chunk.features.float(), matrix.t(), out=points[place])
        marks[:, place] = chunk.marks()
        done += len(chunk.labels)
        stopped = stop(done)
        if stopped:
            break
    if world.allreduce_sum(torch.tensor([int(stopped)], dtype=torch.int32), name="head.points.stop").item():
        return None
    sizes = points.square().sum(1).double()
    _check_finite(marks[0, ~sizes.isfinite()], world=world)
    found = Sketch(torch.zeros(0, 0), sizes, marks)
    extreme = far_ones(found, sizes, EXTREME, world=world)
    if extreme:
        extreme = without_whole_classes(extreme, found, world=world)
        check_extreme(extreme, found, world=world)
    used = ~torch.isin(marks[0], torch.tensor(extreme, dtype=torch.int64))
    if not used.all():
        points, marks = points[used], marks[:, used]
    return OwnPoints(points, marks, used, matrix, shift, tuple(extreme), prepared.passes + 1)


def _check_finite(damaged: Tensor, *, world: World) -> None:
    """Raise FeaturesError, on all ranks, where any has `damaged` samples, by number."""
    everyones = world.allgather_object(damaged.unique().tolist(), name="head.damaged")
    samples = sorted({sample for theirs in everyones for sample in theirs})
    if samples:
        raise FeaturesError(
            f"head fit: features are NaN or infinite, or their squares are, in {numbered(samples)}: the weights or the "
            "images are damaged, or the precision is too small for the network",
            samples,
        )


def project(prepared: Prepared, *, world: World) -> tuple[Tensor, Tensor]:
    """Return P, (K, D), and p, (K,), float32, equal on all ranks: P x + p are a row's leading directions. Collective.

    K is the number of the sketch's columns.
    """
    product, standard = prepared.product, prepared.standard
    width = product.shape[1]
    matrix, shift = torch.zeros(width, len(product)), torch.zeros(width)
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


def marks_of(mine: OwnPoints, *, world: World) -> Marks:
    """Return the marks of all ranks' rows. Collective.

    Rows stand in the order of their samples, so that what is chosen among them does not depend on who holds which.
    """
    marks = mine.marks.t().contiguous()
    # Of samples that two ranks give one number, each is its own.
    marks[:, 0] = marks[:, 0] * world.size + world.rank
    counts = world.allgather_object(len(marks), name="head.counts")
    whole = gathered(marks, counts, world=world)
    order = whole[:, 0].argsort(stable=True)
    samples, labels, held_out, mirrored = whole[order].unbind(1)
    first = sum(counts[: world.rank])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    own = place[first : first + len(marks)]
    return Marks(labels.contiguous(), samples.contiguous(), held_out.bool(), mirrored.bool(), own)


def everyones(mine: Tensor, marks: Marks, kept: Tensor, *, world: World) -> AllRows:
    """Return the rows of all ranks of which `kept`, (N,) bool, is true, with their points. Collective.

    `mine` are the points of this rank's rows, (B, K).
    """
    points = mine[kept[marks.own]]
    only = marks.only(kept)
    counts = world.allgather_object(len(points), name="head.counts")
    places = gathered(only.own, counts, world=world)
    whole = torch.zeros(len(only.labels), mine.shape[1])
    for root, there in enumerate(places.split(list(counts))):
        if len(there):
            part = points if root == world.rank else torch.zeros(len(there), points.shape[1])
            world.broadcast_(part, name="head.points", root=root)
            whole[there] = part
    return AllRows(**vars(only), points=whole)


def gathered(mine: Tensor, counts: Sequence[int], *, world: World) -> Tensor:
    """Return all ranks' rows of `mine`, (N, ...), in rank order; `counts` has each rank's number. Collective."""
    whole = torch.zeros(sum(counts), *mine.shape[1:], dtype=mine.dtype)
    for root, part in enumerate(whole.split(list(counts))):
        if root == world.rank:
            part.copy_(mine)
        if len(part):
            world.broadcast_(part, name="head.parts", root=root)
    return whole
