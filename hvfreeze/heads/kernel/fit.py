"""Kernel ridge regression over all ranks: features stay where they are, compact points of them go to all.

    fit = fit_kernel(rows, classes=10, world=world, memory_bytes=2**30)
    take(layer, fit)

With points z of the N rows of all ranks, K[i, j] = exp(-|z_i - z_j|^2) and Y[i] the row's class as a one less 1 / C,

    (K + penalty) A = Y

has one solution, that of scikit-learn's KernelRidge; it depends on no learning rate and no order. What a row's sums say
is not yet a probability: they are multiplied by what makes the cross-entropy of held-out rows least.

The penalty is chosen on held-out rows, of many rows on a part of them; then everything is fitted with it, held-out rows
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.heads.kernel.choice import Choice, best_scale, choose, targets, tried
from hvfreeze.heads.kernel.conjugate import MOST_STEPS, solve
from hvfreeze.heads.kernel.gram import Gram
from hvfreeze.heads.kernel.projection import gathered, points_of, project
from hvfreeze.heads.nystrom import covariance
from hvfreeze.heads.rows import Rows
from hvfreeze.heads.solution import Solution, Stopped
from hvfreeze.heads.standard import check_choice, measure
from hvfreeze.ranks.world import World

PENALTIES = (1.0, 0.3, 0.1, 0.03)
TOLERANCE = 0.03
"""What may be missing of the right sides: less changed no accuracy."""
MOST_COMPARED = 5_000
"""Rows on which the penalty is chosen, held-out ones among them: how weak it may be changes little with more."""
MOST_ROWS = 50_000
"""Every pair of rows is compared: with so many, lines of 10 GB for all ranks."""

T = TypeVar("T")


@dataclass(frozen=True)
class KernelFit(Solution):
    """A solved head, equal on all ranks bit for bit but for its answers; see `KernelHead` for the other tensors.

    Attributes:
        answers: what it says of this rank's own rows, in their order, (B, C) float32.
        projection: (K, D) float32.
        shift: (K,) float32.
        centres: (N, K) float32.
        weight: (C, N) float32.
    """

    answers: Tensor
    projection: Tensor
    shift: Tensor
    centres: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Found:
    """What rank 0 finds out beside the points, which all ranks know."""

    solution: Solution
    weight: Tensor
    """(C, N) float32."""
    answers: Tensor
    """To all rows, (N, C) float32."""


def fit_kernel(
    rows: Rows,
    *,
    classes: int,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
    judged: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> KernelFit | None:
    """Return the head that solves kernel ridge regression on the rows of all ranks, the same bits on every rank.

    None where some rank wants to stop before.

    Collective: every rank of `world` must call this, a rank without rows too.

    Args:
        rows: this rank's rows.
        classes: C, at least 2.
        world: the ranks.
        memory_bytes: as many of this rank's lines of K, of 4 x N bytes each, are kept; the others are computed anew for
            each product.
        penalties: above 0; with one, nothing is chosen.
        tolerance: what may be missing of the right sides, as a part of them.
        most_steps: of the solver; `KernelFit.converged` tells whether they sufficed.
        judged: whether held-out rows are to judge the penalty by a fit to all others, also where a part has chosen it.
        stop: asked in every product; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, penalties that are not above 0, no rows or too many.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or len(set(values)) < len(values):
        raise UsageError(f"penalties ({values}) must be above 0 and different, at least one")
    standard = measure(rows, world=world)
    check_choice(standard, len(values))
    check_count(standard.count)
    matrix, shift = project(rows, standard, world=world)
    mine = points_of(rows, matrix, shift)
    counts = world.allgather_object(len(mine[0]), name="head.counts")
    centres, labels, held_out = (gathered(column, counts, world=world) for column in mine)
    first = sum(counts[: world.rank])
    open_gram = partial(Gram, world=world, memory_bytes=memory_bytes, stop=stop)
    whole = part = open_gram(centres, first=first, count=counts[world.rank])
    choice: Choice | None = Choice(values[0], 1.0, ())
    if len(values) > 1:
        some = torch.arange(0, len(centres), -(-len(centres) // MOST_COMPARED))
        if len(some) < len(centres):
            before, within = (int((some < end).sum()) for end in (first, first + counts[world.rank]))
            part = open_gram(centres[some], first=before, count=within - before)
        choosing = partial(choose, part, labels[some], held_out[some].bool(), classes=classes, penalties=values)
        choosing = partial(choosing, whole=part is whole)
        choice = world.broadcast_object(led(part, choosing, world=world), name="head.choice")
    if choice is None:
        return None
    if part is not whole:
        whole.passes, whole.exchanged_bytes = part.passes, part.exchanged_bytes
        part.forget()
    judging = held_out.bool() if judged and part is not whole else None
    solving = partial(
        finish, whole, labels, choice, classes=classes, held_out=judging, tolerance=tolerance, most_steps=most_steps
    )
    found = world.broadcast_object(led(whole, solving, world=world), name="head.fit")
    if found is None:
        return None
    return KernelFit(
        **vars(found.solution),
        answers=found.answers[first : first + counts[world.rank]],
        projection=matrix,
        shift=shift,
        centres=centres,
        weight=found.weight,
    )


def check_count(views: int) -> None:
    """Refuse more rows than can be compared; to be called on all ranks alike.

    Raises:
        UsageError: there are more than `MOST_ROWS`.
    """
    if views > MOST_ROWS:
        error = UsageError(
            f"head fit: {views} views of samples, and with kernel every pair of them is compared: it takes at most "
            f"{MOST_ROWS}; pass --head-fit exact, or --mirror off where that halves them"
        )
        error.everywhere = True
        raise error


def led(gram: Gram, work: Callable[[], T], *, world: World) -> T | None:
    """Return on rank 0 what `work` does with the gram while the others follow; None on them, and where one stops it.

    Collective: every rank of `world` must call this.
    """
    result = None
    if world.rank > 0:
        gram.follow()
    else:
        with suppress(Stopped):
            result = work()
        gram.stop()
    return result


def finish(
    gram: Gram,
    labels: Tensor,
    choice: Choice,
    *,
    classes: int,
    held_out: Tensor | None,
    tolerance: float,
    most_steps: int,
) -> Found:
    """Return the solution on all rows, held-out ones judge it before where they are given; see `choose` for who calls.

    Raises:
        Stopped: some rank wants to stop.
    """
    right, everything = targets(labels, classes), torch.ones(len(labels), dtype=torch.bool)
    fitted_to = partial(
        solve,
        gram.times,
        right,
        torch.full((classes,), choice.penalty, dtype=torch.float64),
        leading=covariance(gram.sketch().double()),
        tolerance=tolerance,
        most_steps=most_steps,
    )
    if held_out is not None:
        others = fitted_to(fitted=~held_out)
        answers = gram.times(others.vectors)[held_out].double()
        choice = choice.judged(*tried(choice.penalty, answers, labels[held_out], steps=others.steps, whole=True))
    solved = fitted_to(fitted=everything)
    # What the solver has left tells the answers without another product.
    said = right - solved.left - choice.penalty * solved.vectors
    scale = choice.scale if choice.trials else best_scale(said, labels)[0]
    solution = Solution(
        choice.penalty,
        choice.trials,
        float(functional.cross_entropy(scale * said, labels)),
        len(labels),
        solved.steps,
        # Mean and deviation, the sketch of the features and their projection took one pass each.
        gram.passes + 3,
        solved.error,
        solved.error <= tolerance,
        gram.exchanged_bytes,
    )
    return Found(solution, (scale * solved.vectors).t().float().contiguous(), (scale * said).float())
