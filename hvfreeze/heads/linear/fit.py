"""Multinomial logistic regression over all ranks: rows stay where they are, every pass over them is one allreduce.

    fit = fit_softmax(rows, classes=10, world=world)            # penalty chosen on the rows that are held out
    logits = features @ fit.weight.t() + fit.bias               # for raw features: the standardisation is folded in

What is minimised is, over n rows with standardised features z and coefficients W without the intercept b,

    1/n sum -log softmax(W z + b)[label]  +  penalty x |W|^2

which has the minimum of scikit-learn's LogisticRegression(C=1 / (2 x penalty x n)) on the same standardised rows. The
problem is convex with one minimum: it does not depend on a learning rate, an order or on who holds which row.

The penalty is chosen on held-out rows along a path from strong to weak, each solution the start of the next; the path
ends when the held-out loss falls no more. Then everything, held-out rows too, is fitted with the chosen penalty: a
tenth more rows shift the best penalty by less than a step of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor

from hvfreeze.errors import UsageError
from hvfreeze.heads.linear.lbfgs import Lbfgs, Minimum
from hvfreeze.heads.linear.loss import SoftmaxLoss
from hvfreeze.heads.nystrom import covariance, sketch
from hvfreeze.heads.rows import Rows
from hvfreeze.heads.solution import Solution, Stopped, Trial
from hvfreeze.heads.standard import Standard, check_choice, measure
from hvfreeze.ranks.world import World

PENALTIES = tuple(10 ** (-half / 2) for half in range(17))
"""From 1 to 1e-8, two a decade."""
TOLERANCE = 0.1
PATH_TOLERANCE = 2.0
"""While the penalty is chosen: solutions this close to the minimum have its held-out loss, nearly."""
LEAST_GAIN = 1e-3
"""The path ends where the held-out loss falls by a smaller part of itself, or rises."""
MOST_STEPS = 500
"""Of the minimiser, for one penalty."""


@dataclass(frozen=True)
class HeadFit(Solution):
    """A solved head, equal on all ranks bit for bit; `error` bounds the distance of the coefficients.

    Attributes:
        weight: (C, D) float32, for raw features.
        bias: (C,) float32.
        coefficients: (C, D + 1) float64, for standardised features; the last column is the intercept, of mean 0.
    """

    weight: Tensor
    bias: Tensor
    coefficients: Tensor


def fit_softmax(
    rows: Rows,
    *,
    classes: int,
    world: World,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
    stop: Callable[[], bool] = lambda: False,
) -> HeadFit | None:
    """Return the head that minimises the penalised mean loss over the rows of all ranks, the same bits on every rank.

    None where some rank wants to stop before.

    Collective: every rank of `world` must call this, a rank without rows too.

    Args:
        rows: this rank's rows.
        classes: C, at least 2.
        world: the ranks.
        penalties: decreasing, above 0; with one, nothing is chosen.
        tolerance: relative distance from the minimum that is allowed: the norm of the gradient must fall to `tolerance`
            x that of the penalty's own gradient. The path is followed at `PATH_TOLERANCE`.
        most_steps: limit of the minimiser for one penalty; `HeadFit.converged` tells whether it sufficed.
        stop: asked in every pass; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, or penalties that are not decreasing and above 0.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or values != sorted(set(values), reverse=True):
        raise UsageError(f"penalties ({values}) must be above 0 and decreasing, at least one")
    standard = measure(rows, world=world)
    check_choice(standard, len(values))
    product = sketch(rows, standard, world=world)
    loss = SoftmaxLoss(rows, standard, classes=classes, world=world, stop=stop)
    if world.rank > 0:
        loss.follow()
        return world.broadcast_object(cast("HeadFit | None", None), name="head.fit")
    found: HeadFit | None = None
    with suppress(Stopped):
        found = _search(loss, standard, product, values, tolerance=tolerance, most_steps=most_steps)
    loss.stop()
    # Folding too is arithmetic that processors may round differently: rank 0's head is everybody's.
    return world.broadcast_object(found, name="head.fit")


def _search(
    loss: SoftmaxLoss,
    standard: Standard,
    product: Tensor,
    penalties: Sequence[float],
    *,
    tolerance: float,
    most_steps: int,
) -> HeadFit:
    search = Lbfgs(covariance(product))
    start, penalty = loss.zero(), penalties[0]
    trials: tuple[Trial, ...] = ()
    if len(penalties) > 1:
        start, penalty, trials = _choose(loss, search, penalties, most_steps=most_steps)
    minimum = search.minimise(
        partial(loss.at, held_out=False),
        loss.at(start, held_out=False),
        penalty=penalty,
        tolerance=tolerance,
        most_steps=most_steps,
    )
    return _head(minimum, standard, penalty, trials, loss)


def _choose(
    loss: SoftmaxLoss, search: Lbfgs, penalties: Sequence[float], *, most_steps: int
) -> tuple[Tensor, float, tuple[Trial, ...]]:
    """Return the weights and penalty with the least held-out loss, and the path up to where that loss falls no more."""
    evaluate = partial(loss.at, held_out=True)
    point = evaluate(loss.zero())
    best, chosen = point, penalties[0]
    trials: list[Trial] = []
    for penalty in penalties:
        minimum = search.minimise(
            evaluate, point, penalty=penalty, tolerance=PATH_TOLERANCE, most_steps=most_steps, fewest_steps=1
        )
        point = minimum.point
        trials.append(Trial(penalty, point.held_out_loss, point.held_out_accuracy, minimum.steps))
        if point.held_out_loss > (1 - LEAST_GAIN) * best.held_out_loss:
            break
        best, chosen = point, penalty
    return best.weights, chosen, tuple(trials)


def _head(
    minimum: Minimum, standard: Standard, penalty: float, trials: tuple[Trial, ...], loss: SoftmaxLoss
) -> HeadFit:
    coefficients = minimum.point.weights.clone()
    # The same number added to every intercept changes no probability.
    coefficients[:, -1] -= coefficients[:, -1].mean()
    weight, bias = standard.folded(coefficients, mean=standard.mean)
    return HeadFit(
        penalty,
        trials,
        minimum.point.loss,
        standard.count,
        minimum.steps,
        # The mean and scale, and the sketch, took one pass each.
        loss.passes + 2,
        minimum.error,
        minimum.converged,
        loss.exchanged_bytes,
        weight.float(),
        bias.float(),
        coefficients,
    )
