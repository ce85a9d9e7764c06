"""Kernel ridge regression over all ranks: features stay where they are, compact points of them go to all.

    fit = fit_kernel(rows, classes=10, world=world, memory_bytes=2**30)
    take(layer, fit)

With points z of the N rows of all ranks, K[i, j] = exp(-|z_i - z_j|^2) and Y[i] the row's class as a one less 1 / C,

    (K + penalty) A = Y

has one solution, that of scikit-learn's KernelRidge; it depends on no learning rate and no order. The sums of a row
become logits by the factor at which the cross-entropy of rows that were not fitted is least. Penalty and factor, and
whether mirror images help, are chosen as `kernel_choice` says; then everything is fitted, held-out rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.heads.gram import Gram, Solved, gaussian, solve
from hvfreeze.heads.kernel_choice import (
    MOST_COLUMNS,
    MOST_STEPS,
    AllRows,
    Choice,
    Tried,
    choose,
    choose_closely,
    targets,
)
from hvfreeze.heads.moments import Prepared, check_choice, covariance, prepare
from hvfreeze.heads.rows import Rows
from hvfreeze.heads.solution import MirrorTrial, Solution

MOST_DIRECTIONS = 512
"""Of the features, in which rows are compared."""


class KernelHead(nn.Module):
    """Features, (B, D), to logits, (B, C): over all centres z, exp(-|P x + p - z|^2) times its weight for the class.

    `projection` P is (K, D), K = min(D, `MOST_DIRECTIONS`), with standardisation and bandwidth folded in; `shift` p is
    (K,), `centres` (N, K), the training rows of all ranks, and `weight` (C, N); all float32.
    """

    projection: Tensor
    shift: Tensor
    centres: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        """Take D and C; until it is solved, there are no centres and all logits are 0."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        width = min(in_features, MOST_DIRECTIONS)
        self.register_buffer("projection", torch.zeros(width, in_features))
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("centres", torch.zeros(0, width))
        self.weight = nn.Parameter(torch.zeros(out_features, 0))

    def hold(self, rows: int) -> None:
        """Make room for `rows` centres, to be filled."""
        self.centres = self.centres.new_zeros(rows, self.centres.shape[1])
        self.weight.data = self.weight.new_zeros(self.out_features, rows)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, float32."""
        # Distances are small differences of large products: bfloat16 would leave nothing of them.
        with torch.autocast("cpu", enabled=False):
            points = functional.linear(features.float(), self.projection, self.shift)
            return functional.linear(gaussian(points, self.centres), self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        centres = state_dict.get(f"{prefix}centres")
        if isinstance(centres, Tensor) and len(centres) != len(self.centres):
            self.hold(len(centres))
        super()._load_from_state_dict(state_dict, prefix, *rest)


WHITENED = 0.15
"""Each direction is divided by its variance to this power: between 0, where the few strongest directions decide all
distances, and a half, where all weigh the same."""
LEAST_VARIANCE = 1e-7
"""Of a direction, as a part of all: less is rounding."""
DISTANCE = 1.5
"""The mean squared distance of two rows after scaling: with less all rows look alike, with more none does."""


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


def points_of(rows: Rows, matrix: Tensor, shift: Tensor, *, world: World) -> AllRows:
    """Return all ranks' rows as points. One pass over the rows. Collective."""
    points, marks = [torch.zeros(0, len(matrix))], [torch.zeros(0, 4, dtype=torch.int64)]
    for chunk in rows.chunks():
        points.append(torch.addmm(shift, chunk.features.float(), matrix.t()))
        # Of samples that two ranks give one number, each is its own.
        samples = chunk.samples * world.size + world.rank
        marks.append(torch.stack([chunk.labels, samples, chunk.held_out.long(), chunk.mirrored.long()], 1))
    mine = torch.cat(points)
    counts = world.allgather_object(len(mine), name="head.counts")
    whole = gathered(mine, counts, world=world)
    labels, samples, held_out, mirrored = gathered(torch.cat(marks), counts, world=world).unbind(1)
    first = sum(counts[: world.rank])
    return AllRows(whole, labels.contiguous(), samples.contiguous(), held_out.bool(), mirrored.bool(), first, len(mine))


def gathered(mine: Tensor, counts: Sequence[int], *, world: World) -> Tensor:
    """Return all ranks' rows of `mine`, (N, ...), in rank order; `counts` has each rank's number. Collective."""
    whole = torch.zeros(sum(counts), *mine.shape[1:], dtype=mine.dtype)
    for root, part in enumerate(whole.split(list(counts))):
        if root == world.rank:
            part.copy_(mine)
        if len(part):
            world.broadcast_(part, name="head.points", root=root)
    return whole


PENALTIES = (1.0, 0.3, 0.1, 0.03)
TOLERANCE = 0.03
"""For the residual, as a part of the right sides: less changed no accuracy."""
MOST_LEFT_OUT = 1_000
"""Rows of which each is left out in turn: all of them choose then, which takes a tenth of a second on one core."""
MOST_COMPARED = 5_000
"""Rows on which the penalty is chosen, held-out ones among them: more rows change the choice little."""
MOST_ROWS = 50_000
"""Every pair of rows is compared: with so many, lines of 10 GB for all ranks."""


@dataclass(frozen=True)
class KernelFit(Solution):
    """A solved head, equal on all ranks bit for bit but for `answers` and `used`; see `KernelHead` for the others."""

    answers: Tensor
    """The logits of this rank's own rows that were fitted, in their order, (B, C) float32."""
    used: Tensor
    """(N,) bool, which of this rank's rows, in their order, were fitted."""
    projection: Tensor
    shift: Tensor
    centres: Tensor
    weight: Tensor


def fit_kernel(
    rows: Rows,
    *,
    classes: int,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
    trained: bool = False,
    compare_mirrored: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> KernelFit | None:
    """Return the head that solves kernel ridge regression on the rows of all ranks, equal on all of them. Collective.

    None where some rank wants to stop before.

    Args:
        rows: this rank's rows; there may be none.
        classes: C, at least 2.
        world: the ranks.
        memory_bytes: for the solver's vectors, and for as many of this rank's lines of K, of 4 x N bytes each, as
            fit beside them; the others are computed anew for each product.
        penalties: above 0; with one, nothing is chosen.
        tolerance: for the residual, as a part of the right sides.
        most_steps: of the solver; `KernelFit.converged` tells whether they sufficed.
        trained: whether the network was trained on the rows that are not held out, whose features know their labels:
            then only held-out rows choose, also of few.
        compare_mirrored: whether mirror images are left out where the head is better without them.
        stop: asked in every product; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, penalties that are not above 0, no rows or too many.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or len(set(values)) < len(values):
        raise UsageError(f"penalties ({values}) must be above 0 and different, at least one")
    prepared = prepare(rows, world=world, columns=min(rows.width, MOST_DIRECTIONS))
    check_choice(prepared.standard, len(values))
    check_count(prepared.standard.count)
    matrix, shift = project(prepared, world=world)
    everything = points_of(prepared.rows, matrix, shift, world=world)
    columns = classes * max(2, min(len(values), MOST_COLUMNS // classes)) if 2 * classes <= MOST_COLUMNS else classes
    open_gram = partial(Gram, world=world, memory_bytes=memory_bytes, columns=columns, stop=stop)
    few = len(everything.labels) <= MOST_LEFT_OUT or len(values) == 1
    part = everything.part(MOST_LEFT_OUT if few else MOST_COMPARED)
    choosing = partial(
        chosen,
        classes=classes,
        penalties=values,
        whole=len(part.labels) == len(everything.labels),
        choosing=part.held_out if trained and part.held_out.any() else torch.ones_like(part.held_out),
        open_gram=None if few else open_gram,
        world=world,
    )
    found = choosing(part)
    if found is None:
        return None
    used, spent, mirror = everything, found.spent, None
    if compare_mirrored and can_do_without(part):
        kept = ~part.mirrored
        without = choosing(part.only(kept), choosing=choosing.keywords["choosing"][kept])
        if without is None:
            return None
        mirror, spent = compared(found.choice, without.choice), spent + without.spent
        if not mirror.taken:
            found, used = without, everything.only(~everything.mirrored)
    whole = open_gram(used.points, first=used.first, count=used.count)
    solving = partial(finish, whole, used, found.choice, classes=classes, tolerance=tolerance, most_steps=most_steps)
    result = world.broadcast_object(whole.lead(solving), name="head.fit")
    if result is None:
        return None
    solution, weight, answers = result
    fitted = prepared.used.clone()
    if mirror is not None and not mirror.taken:
        fitted[prepared.used] = ~everything.mirrored[everything.own]
    solution = replace(
        solution,
        # The projection took one pass more.
        passes=prepared.passes + 1 + spent.passes + whole.passes,
        exchanged_bytes=spent.exchanged_bytes + whole.exchanged_bytes,
        mirror=mirror,
        left_out=prepared.left_out,
    )
    return KernelFit(
        **vars(solution),
        answers=answers[used.own],
        used=fitted,
        projection=matrix,
        shift=shift,
        centres=used.points,
        weight=weight,
    )


class Spent(NamedTuple):
    """Products that were made, and bytes that each rank gave to allreduces for them."""

    passes: int = 0
    exchanged_bytes: int = 0

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.passes + other.passes, self.exchanged_bytes + other.exchanged_bytes)


class Found(NamedTuple):
    """A choice, and what it took."""

    choice: Choice
    spent: Spent


def chosen(
    part: AllRows,
    *,
    classes: int,
    penalties: Sequence[float],
    whole: bool,
    choosing: Tensor,
    open_gram: Callable[..., Gram] | None,
    world: World,
) -> Found | None:
    """Return the choice for a head that is fitted to `part`, None where some rank wants to stop. Collective.

    Without `open_gram` each sample is left out in turn, and the rows `choosing` choose; else held-out rows do.
    """
    if open_gram is None:
        choose_here = partial(choose_closely, part, classes=classes, penalties=penalties, choosing=choosing)
        mine = choose_here() if world.rank == 0 else None
        found = world.broadcast_object(mine, name="head.choice")
        assert found is not None, "rank 0's"
        return Found(found, Spent())
    gram = open_gram(part.points, first=part.first, count=part.count)
    work = partial(choose, gram, part, classes=classes, penalties=penalties, whole=whole)
    choice = world.broadcast_object(gram.lead(work), name="head.choice")
    return None if choice is None else Found(choice, Spent(gram.passes, gram.exchanged_bytes))


def can_do_without(rows: AllRows) -> bool:
    """Tell whether there are mirror images, and every sample is there as it is too."""
    plain = rows.samples[~rows.mirrored]
    return bool(rows.mirrored.any()) and len(plain.unique()) == len(rows.samples.unique())


def compared(with_them: Choice, without: Choice) -> MirrorTrial:
    """Return what the two choices say of mirror images."""
    ours, theirs = with_them.plain, without.plain
    assert ours is not None and theirs is not None
    return MirrorTrial(ours.loss, theirs.loss, ours.accuracy, theirs.accuracy, ours.rows)


def check_count(views: int) -> None:
    """Raise UsageError for more rows than can be compared; to be called on all ranks alike."""
    if views > MOST_ROWS:
        error = UsageError(
            f"head fit: {views} views of samples, and with kernel every pair of them is compared: it takes at most "
            f"{MOST_ROWS}; pass --head-fit exact, or --mirror off where that halves them"
        )
        error.everywhere = True
        raise error


def finish(
    gram: Gram, rows: AllRows, choice: Choice, *, classes: int, tolerance: float, most_steps: int
) -> tuple[Solution, Tensor, Tensor]:
    """Return the solution on all rows, its weight, (C, N), and its answers to all rows, (N, C), both float32.

    To be called in `Gram.lead`. Where a part of the rows has chosen the penalty, the held-out rows judge a fit to all
    others beside it: in one product of the matrix with twice as many vectors, which takes little longer.
    """
    penalty, scale, trials, _ = choice
    right, everything = targets(rows.labels, classes), torch.ones(len(rows.labels), 1, dtype=torch.bool)
    to_judge = bool(trials) and not all(trial.whole for trial in trials)
    together = to_judge and 2 * classes <= MOST_COLUMNS

    def fitted_to(*masks: Tensor) -> Solved:
        columns = classes * len(masks)
        return solve(
            gram.times,
            right.repeat(1, len(masks)),
            torch.full((columns,), penalty, dtype=torch.float64),
            fitted=torch.cat([mask.expand(-1, classes) for mask in masks], 1),
            leading=leading,
            tolerance=tolerance,
            most_steps=most_steps,
        )

    leading, others = covariance(gram.sketch().double()), ~rows.held_out[:, None]
    solved = fitted_to(everything, others) if together else fitted_to(everything)
    if to_judge:
        judged = solved.vectors[:, classes:] if together else fitted_to(others).vectors
        answers = gram.times(judged).double()
        tried = Tried.of(penalty, answers, rows, choosing=rows.held_out, steps=solved.steps, whole=True)
        scale, trials = tried.scale, tuple(tried.trial if trial.penalty == penalty else trial for trial in trials)
    vectors, left = solved.vectors[:, :classes], solved.left[:, :classes]
    # With the residual the answers need no other product.
    sums = right - left - penalty * vectors
    solution = Solution(
        penalty,
        trials,
        float(functional.cross_entropy(scale * sums, rows.labels)),
        len(rows.labels),
        solved.steps,
        0,
        solved.error,
        solved.error <= tolerance,
        0,
    )
    return solution, (scale * vectors).t().float().contiguous(), (scale * sums).float()
