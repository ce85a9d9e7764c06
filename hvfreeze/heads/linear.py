"""Logistic or linear regression over all ranks: rows stay where they are, every pass over them is one allreduce.

    fit = fit_linear(rows, task=Classes(10), world=world)       # penalty chosen on the rows that are held out
    logits = features @ fit.weight.t() + fit.bias               # for raw features: the standardisation is folded in

Minimises over n rows with weights w, standardised features z and coefficients W without the intercept b

    sum w loss(W z + b, label) / sum w  +  penalty x |W|^2

For classes this has the one minimum of scikit-learn's LogisticRegression(C=1 / (2 x penalty x n)) on the same
standardised rows, for numbers that of its Ridge. The penalty is chosen on held-out rows along a path from strong to
weak, each solution the start of the next; of few rows by cross-validation. Then everything, held-out rows too, is
fitted with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.heads.moments import Covariance, Prepared, Standard, check_choice, covariance, prepare
from hvfreeze.heads.projection import gather_info
from hvfreeze.heads.rows import Chunk, RowInfo, Rows
from hvfreeze.heads.solution import PenaltyTrial, Solution, Stopped
from hvfreeze.tasks import Calibration, Classes, MultiLabel, Numbers, Task, doubt


@dataclass(frozen=True)
class Subset:
    """Which rows are fitted, and which judge."""

    fold: int | None = None
    """That judges and is not fitted: 0 is of the held-out rows, the others are divided by their samples' numbers."""
    folds: int = 1

    def message(self) -> list[float]:
        """Return it as numbers."""
        return [-1.0 if self.fold is None else float(self.fold), float(self.folds)]

    @classmethod
    def read(cls, fold: float, folds: float) -> Subset:
        """Return what `message` wrote."""
        return cls(None if fold < 0 else int(fold), int(folds))

    def judging(self, rows: RowInfo) -> Tensor:
        """Return which of the rows judge, (B,) bool; the others are fitted."""
        if self.fold is None:
            return torch.zeros_like(rows.held_out)
        return torch.where(rows.held_out, 0, 1 + rows.samples % max(1, self.folds - 1)) == self.fold


@dataclass(frozen=True)
class Point:
    """The mean loss over the fitted rows of all ranks at one point, without a penalty."""

    weights: Tensor
    """(C, D + 1) float64, for standardised features; the last column is the intercept."""
    loss: float
    """In nats, or squared errors."""
    gradient: Tensor
    """(C, D + 1) float64."""
    curvature: float
    """Mean second derivative by an output, over fitted rows and outputs: how strongly the loss bends here."""
    judges: Tensor
    """(5,) float64, sums over the rows that judge: weighted losses, weighted losses if each class were the row's, the
    weights, the scores, and how many rows they are."""

    @property
    def held_out_loss(self) -> float:
        """Mean over the rows that judge; NaN without any."""
        return float(self.judges[0] / self.judges[2])

    @property
    def held_out_score(self) -> float:
        """At most 1: the accuracy, or R^2; NaN without rows that judge."""
        return float(self.judges[3] / self.judges[4])


class RowTerms(NamedTuple):
    """What rows give to the loss, its derivatives and the score, (B,) each but for `residuals`."""

    losses: Tensor
    residuals: Tensor
    """(C, B): derivatives by the outputs."""
    bends: Tensor
    """Second derivatives by the outputs, summed over these."""
    unsure: Tensor
    """Mean loss over what the label could be."""
    scores: Tensor


def terms_of(task: Task, answers: Tensor, labels: Tensor) -> RowTerms:
    """Return what rows give for `answers`, (C, B) float32: classes first, which is twice as fast for few of them."""
    if isinstance(task, Classes):
        logs, places = answers.log_softmax(0), torch.arange(len(labels))
        losses, unsure = -logs[labels, places], -logs.mean(0)
        right = (answers.argmax(0) == labels).float()
        chances = logs.exp_()
        bends = (chances - chances.square()).sum(0)
        chances[labels, places] -= 1
        return RowTerms(losses, chances, bends, unsure, right)
    if isinstance(task, MultiLabel):
        truth, chances = labels.t().float(), answers.sigmoid()
        losses = functional.binary_cross_entropy_with_logits(answers, truth, reduction="none").sum(0)
        bends = (chances * (1 - chances)).sum(0)
        right = ((answers > 0) == (truth > 0.5)).float().mean(0)
        return RowTerms(losses, chances - truth, bends, losses, right)
    errors = answers - task.targets(labels).t().float()
    losses = errors.square().mean(0)
    return RowTerms(losses, errors * (2 / len(errors)), torch.full_like(losses, 2.0), losses, 1 - losses)


NUMBERS = 3 + 5 + 1
"""Sums before the gradient: of the fitted rows, of those that judge, and whether to stop."""


class SumsOverRanks:
    """The weighted mean loss over the rows of all ranks, of the outputs weights . [standardised features, 1].

    Products are float32, sums over chunks and ranks float64.
    """

    def __init__(
        self, rows: Rows, standard: Standard, *, task: Task, world: World, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._rows, self._standard, self._task, self._world, self._stop = rows, standard, task, world, stop
        self.shape = (task.outputs, rows.width + 1)
        self.passes, self.exchanged_bytes = 0, 0

    def at(self, weights: Tensor, subset: Subset) -> Point:
        """Return the loss at `weights` over the rows that `subset` fits; raise Stopped on rank 0.

        Rank 0 calls this while every other rank of the world is in `follow`, also after it is stopped. Collective.
        """
        self._send(subset.message(), weights)
        point, stopped = self._evaluate(weights, subset)
        if stopped:
            raise Stopped
        return point

    def zero(self) -> Tensor:
        """Return weights of zero, (C, D + 1) float64."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def stop(self) -> None:
        """End the other ranks' `follow`. Rank 0 calls this. Collective."""
        self._send([0.0, 0.0], self.zero())

    def follow(self) -> None:
        """Take part in every evaluation of rank 0, until it stops. All ranks but 0 call this. Collective."""
        while True:
            message = torch.empty(2 + math.prod(self.shape), dtype=torch.float64)
            self._world.broadcast_(message, name="head.weights")
            fold, folds = message[:2].tolist()
            if folds == 0:
                return
            self._evaluate(message[2:].view(self.shape), Subset.read(fold, folds))

    def _send(self, subset: Sequence[float], weights: Tensor) -> None:
        """Send a subset, or no folds at the end, and where to evaluate."""
        message = torch.cat([torch.tensor(subset, dtype=torch.float64), weights.flatten()])
        self._world.broadcast_(message, name="head.weights")

    def _evaluate(self, weights: Tensor, subset: Subset) -> tuple[Point, bool]:
        self.passes += 1
        mine = self._local_sums(weights, subset)
        self.exchanged_bytes += mine.numel() * mine.element_size() if self._world.size > 1 else 0
        sums = self._world.allreduce_sum(mine, name="head.loss")
        loss, weight, curvature = sums[:3].tolist()
        stopped, raw = bool(sums[NUMBERS - 1]), sums[NUMBERS:].view(self.shape)
        gradient = torch.empty_like(raw)
        # d/dW of standardised features, from sums over raw ones.
        gradient[:, :-1] = (raw[:, :-1] - raw[:, -1:] * self._standard.offset) * self._standard.scale / weight
        gradient[:, -1] = raw[:, -1] / weight
        judges = sums[3 : NUMBERS - 1].clone()
        return Point(weights, loss / weight, gradient, curvature / (weight * self.shape[0]), judges), stopped

    def _local_sums(self, weights: Tensor, subset: Subset) -> Tensor:
        """Return this rank's sums: numbers, then the gradient for raw features and the intercept."""
        weight, bias = self._standard.folded(weights, mean=self._standard.offset)
        weight, bias = weight.float(), bias.float()
        result = torch.zeros(NUMBERS + math.prod(self.shape), dtype=torch.float64)
        gradient = result[NUMBERS:].view(self.shape)
        result[NUMBERS - 1] = self._stop()
        for chunk in self._rows.chunks():
            self._add(chunk, weight, bias, subset.judging(chunk.info), result, gradient)
        return result

    def _add(self, chunk: Chunk, weight: Tensor, bias: Tensor, held: Tensor, result: Tensor, gradient: Tensor) -> None:
        """Add a chunk's sums to `result`, of which `gradient` is a view."""
        features, info = self._standard.taken(chunk.features), chunk.info
        # Rows first: this order of the product takes half the time of the other.
        answers = torch.addmm(bias, features, weight.t()).t().contiguous()
        terms = terms_of(self._task, answers, info.labels)
        fitted, judging = info.weights * ~held, info.weights * held
        result[:3] += _sums(terms.losses * fitted, fitted, terms.bends * fitted)
        if held.any():
            judges = (terms.losses * judging, terms.unsure * judging, judging, terms.scores * held, held.float())
            result[3 : NUMBERS - 1] += _sums(*judges)
        residuals = terms.residuals * fitted
        gradient[:, :-1] += residuals @ features
        gradient[:, -1] += residuals.sum(1, dtype=torch.float64)


def _sums(*columns: Tensor) -> Tensor:
    return torch.stack(columns).sum(1, dtype=torch.float64)


ROUNDING = 1e-7
"""Relative rounding of a loss whose products are float32: smaller differences say nothing."""

Evaluate = Callable[[Tensor], Point]


class _Converged(Exception):
    """The last point is within the tolerance."""


def minimise(
    evaluate: Evaluate,
    start: Point,
    *,
    penalty: float,
    covariance: Covariance,
    tolerance: float,
    most_steps: int,
    fewest_steps: int = 0,
    least_gradient: float = 0.0,
) -> tuple[Point, int]:
    """Return the minimum of loss + penalty x |coefficients|^2, searched from `start`, and the steps, by scipy's L-BFGS.

    It stops where `relative_error` is at most `tolerance`, where the gradient's norm is at most `least_gradient`, or
    after `most_steps`, but not before `fewest_steps`: a new penalty can leave the old solution within a loose
    tolerance. Variables are scaled by the root of about the inverse
    second derivative, so that the first step is about Newton's.
    """
    # It takes 0.2 s to import, and most runs need no linear head.
    from scipy.optimize import minimize

    def is_near(point: Point) -> bool:
        gradient = float(_with_penalty(point.gradient, point.weights, penalty).norm())
        return gradient <= least_gradient or relative_error(point, penalty) <= tolerance

    if most_steps == 0 or (fewest_steps == 0 and is_near(start)):
        return start, 0
    scaled = partial(covariance.root_inverse, curvature=start.curvature, penalty=penalty)
    length = float(scaled(_with_penalty(start.gradient, start.weights, penalty)).norm())
    if length == 0:
        return start, 0
    # The last point, the last one that a line search ended at, and what scipy was told of each.
    last, here, told, told_here, steps = start, start, 0.0, 0.0, 0

    def loss(place: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal last, told
        offset = scaled(torch.from_numpy(place.copy()).view(start.weights.shape)) * length
        last = evaluate(start.weights + offset) if offset.any() else start
        slope, before = _with_penalty(last.gradient, last.weights, penalty), _objective(here, penalty)
        gain = _objective(last, penalty) - before
        if abs(gain) <= ROUNDING * abs(before):
            # Near the minimum rounding hides the gain, and slopes tell it (Hager and Zhang, SIAM J. Optim. 16, 2005).
            slopes = (slope + _with_penalty(here.gradient, here.weights, penalty)) / 2
            gain = _dot(slopes, last.weights - here.weights)
        told = told_here + gain
        if last is not start and steps + 1 >= fewest_steps and is_near(last):
            raise _Converged
        return told / length**2, (scaled(slope) / length).numpy().ravel()

    def accept(_: NDArray[np.float64]) -> None:
        nonlocal here, told_here, steps
        here, told_here, steps = last, told, steps + 1

    options = {"maxiter": most_steps, "ftol": 0.0, "gtol": 0.0}
    try:
        origin = np.zeros(start.weights.numel())
        minimize(loss, origin, jac=True, method="L-BFGS-B", callback=accept, options=options)
    except _Converged:
        return last, steps + 1
    return here, steps


def relative_error(point: Point, penalty: float) -> float:
    """Return the gradient's norm / (2 penalty x norm of the coefficients); infinite where only the latter are all 0.

    It bounds the coefficients' distance from the minimum, relative to their norm: the penalty alone bends by 2 penalty.
    """
    gradient = float(_with_penalty(point.gradient, point.weights, penalty).norm())
    coefficients = float(point.weights[:, :-1].norm())
    if gradient == 0:
        return 0.0
    return gradient / (2 * penalty * coefficients) if coefficients > 0 else math.inf


def _with_penalty(gradient: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """Return the gradient of loss + penalty x |coefficients|^2; the intercept, the last column, is not penalised."""
    result = gradient.clone()
    result[:, :-1].add_(weights[:, :-1], alpha=2 * penalty)
    return result


def _objective(point: Point, penalty: float) -> float:
    return point.loss + penalty * float(point.weights[:, :-1].square().sum())


def _dot(first: Tensor, second: Tensor) -> float:
    return float(torch.dot(first.flatten(), second.flatten()))


PENALTIES = tuple(10 ** (-half / 2) for half in range(17))
"""From 1 to 1e-8, two a decade: with one, 1,000 images of CIFAR-10 lose 0.4 points and take 1.5 times the passes."""
STRONGER = (10.0, 100.0, 1e3, 1e4)
"""Where even 1 is too weak, as where features say nothing of the labels."""
TOLERANCE = 0.1
"""Relative distance of the coefficients: a tenth of it changed no accuracy."""
FEW_ROWS, FOLDS = 400, 5
"""With at most so many rows, a tenth of them would be too few to choose by: all are, in so many parts."""
PATH_TOLERANCE = 1.0
"""While many rows choose the penalty: with 2, 1,000 images of CIFAR-10 lose 0.3 points; 0.5 takes a fifth more passes.
"""
LEAST_GAIN = 1e-3
"""The path ends where the held-out loss falls by a smaller part of itself, or rises."""


@dataclass(frozen=True)
class HeadFit(Solution):
    """A fitted head, equal on all ranks bit for bit but for `used`; `error` bounds the distance of the coefficients."""

    weight: Tensor
    """(C, D) float32, for raw features."""
    bias: Tensor
    """(C,) float32."""
    coefficients: Tensor
    """(C, D + 1) float64, for standardised features and targets; the last column is the intercept."""
    used: Tensor
    """(N,) bool, which of this rank's rows, in their order, were fitted."""


def fit_linear(
    rows: Rows,
    *,
    task: Task,
    world: World,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = 500,
    trained: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> HeadFit | None:
    """Return the head that minimises the penalised loss over the rows of all ranks, equal on all of them. Collective.

    None where some rank wants to stop before.

    Args:
        rows: this rank's rows; there may be none.
        task: what the head answers.
        world: the ranks.
        penalties: decreasing, above 0; with one, nothing is chosen.
        tolerance: relative distance from the minimum, see `relative_error`; on the path it may be `PATH_TOLERANCE`.
        most_steps: limit of the minimiser for one penalty; `HeadFit.converged` tells whether it sufficed.
        trained: whether the network was trained on the rows that are not held out, whose features know their labels:
            then only held-out rows choose, also of few.
        stop: asked in every pass; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, or penalties that are not decreasing and above 0.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or values != sorted(set(values), reverse=True):
        raise UsageError(f"penalties ({values}) must be above 0 and decreasing, at least one")
    prepared = prepare(rows, world=world, no_labels=task.no_labels)
    standard = prepared.standard
    check_choice(standard.held_out, len(values))
    if isinstance(task, Numbers):
        # The scale of targets is arithmetic that processors may round differently: rank 0's is everybody's.
        task = world.broadcast_object(task.measured(gather_info(prepared.info, world=world).labels), name="head.task")
    loss = SumsOverRanks(prepared.rows, standard, task=task, world=world, stop=stop)
    counts = counts_of(prepared, world=world)
    if world.rank > 0:
        loss.follow()
        examine(None, None, task, prepared, world=world)
        return with_used(world.broadcast_object(cast("HeadFit | None", None), name="head.fit"), prepared)
    found: HeadFit | None = None
    judge: Tensor | None = None
    with suppress(Stopped):
        start, trials, steered = loss.zero(), tuple[PenaltyTrial, ...](), covariance(prepared.product)
        penalty = values[0]
        if len(values) > 1:
            folds = FOLDS if standard.count <= FEW_ROWS and not trained else 1
            stronger = STRONGER if values == list(PENALTIES) else ()
            penalty, start, trials = Choosing(loss, steered, task, counts, folds, most_steps).path(values, stronger)
            judge = start
        evaluate = partial(loss.at, subset=Subset())
        point, steps = minimise(
            evaluate,
            evaluate(start),
            penalty=penalty,
            covariance=steered,
            tolerance=tolerance,
            most_steps=most_steps,
        )
        found = solution(point, penalty, trials, prepared, task, loss, steps=steps, tolerance=tolerance)
    loss.stop()
    found = examine(found, judge, task, prepared, world=world)
    # Folding too is arithmetic that processors may round differently: rank 0's head is everybody's.
    return with_used(world.broadcast_object(found, name="head.fit"), prepared)


def solution(
    point: Point,
    penalty: float,
    trials: tuple[PenaltyTrial, ...],
    prepared: Prepared,
    task: Task,
    loss: SumsOverRanks,
    *,
    steps: int,
    tolerance: float,
) -> HeadFit:
    """Return the head of a point, for raw features and labels."""
    coefficients, error, standard = point.weights.clone(), relative_error(point, penalty), prepared.standard
    if isinstance(task, Classes):
        # The same number added to every intercept changes no probability.
        coefficients[:, -1] -= coefficients[:, -1].mean()
    raw = coefficients
    if isinstance(task, Numbers):
        mean, deviation = task.scale()
        raw = coefficients * deviation[:, None]
        raw[:, -1] += mean
    weight, bias = standard.folded(raw, mean=standard.mean)
    return HeadFit(
        penalty,
        trials,
        point.loss,
        standard.count,
        steps,
        loss.passes + prepared.passes,
        error,
        error <= tolerance,
        loss.exchanged_bytes,
        weight.float(),
        bias.float(),
        coefficients,
        prepared.used,
        left_out=prepared.left_out,
    )


def examine(
    found: HeadFit | None, judge: Tensor | None, task: Task, prepared: Prepared, *, world: World
) -> HeadFit | None:
    """Return rank 0's fit with what held-out rows say of the head `judge`, (C, D + 1), not fitted to them. Collective.

    Both are rank 0's; nothing is examined where either is None, or where loss and accuracy tell enough.
    """
    if not task.is_examined:
        return found
    judge = world.broadcast_object(judge if found is not None else None, name="head.judge")
    if judge is None:
        return found
    weight, bias = prepared.standard.folded(judge, mean=prepared.standard.offset)
    mine = [torch.zeros(0, task.outputs)], [task.no_labels]
    for chunk in prepared.rows.chunks():
        held = chunk.only(chunk.info.held_out)
        answers = prepared.standard.taken(held.features) @ weight.t().float() + bias.float()
        if isinstance(task, Numbers):
            answers = Calibration(task.scale()[1], task.scale()[0]).apply(answers)
        mine[0].append(answers)
        mine[1].append(held.info.labels)
    everyone = world.allgather_object(tuple(torch.cat(part) for part in mine), name="head.examined")
    if found is None:
        return None
    logits, labels = (torch.cat(parts) for parts in zip(*everyone))
    metrics, thresholds = task.examined(logits, labels)
    trials = tuple(
        replace(trial, metrics=metrics, thresholds=thresholds) if trial.penalty == found.penalty else trial
        for trial in found.trials
    )
    return replace(found, trials=trials)


def with_used(fit: HeadFit | None, prepared: Prepared) -> HeadFit | None:
    """Return the fit with this rank's `used`."""
    return None if fit is None else replace(fit, used=prepared.used)


class Counts(NamedTuple):
    """Of all ranks."""

    samples: int
    held_out: int
    """Samples."""


def counts_of(prepared: Prepared, *, world: World) -> Counts:
    """Return how many samples there are. Collective."""
    samples, held_out = prepared.info.samples, prepared.info.held_out
    mine = torch.tensor([len(samples.unique()), len(samples[held_out].unique())], dtype=torch.int64)
    return Counts(*world.allreduce_sum(mine, name="head.counts").tolist())


@dataclass(frozen=True)
class Choosing:
    """Chooses by rows that were not fitted. To be used on rank 0, while the others are in `SumsOverRanks.follow`."""

    loss: SumsOverRanks
    covariance: Covariance
    task: Task
    counts: Counts
    folds: int
    """With 1 the held-out rows judge, else all."""
    most_steps: int

    def path(
        self, penalties: Sequence[float], stronger: Sequence[float]
    ) -> tuple[float, Tensor, tuple[PenaltyTrial, ...]]:
        """Return the penalty with the least loss of rows that judge, its weights, and trials of held-out rows.

        From strong to where that falls no more; `stronger` ones are tried where the strongest of `penalties` is worse
        than a head that says nothing.
        """
        subsets = [Subset(fold, self.folds) for fold in range(self.folds)]
        nothing = tuple(self.loss.at(self.loss.zero(), subset) for subset in subsets)
        tried: list[tuple[float, float, tuple[Point, ...]]] = []
        trials: list[PenaltyTrial] = []

        def attempt(penalty: float, starts: tuple[Point, ...]) -> float:
            found = [self.minimum(*parts, penalty) for parts in zip(subsets, starts, strict=True)]
            solved, steps = tuple(point for point, _ in found), found[0][1]
            trials.append(PenaltyTrial(penalty, solved[0].held_out_loss, solved[0].held_out_score, steps))
            tried.append((self.judged(solved), penalty, solved))
            return tried[-1][0]

        # Of few samples a strong penalty may be worse than no head: it leaves little but the intercepts, which say of
        # each sample that its class is rarer among the others. So the first solution is compared with the second.
        least, taken = math.inf, 0
        for place, penalty in enumerate(penalties):
            judged = attempt(penalty, tried[-1][2] if tried else nothing)
            if judged > (1 - LEAST_GAIN) * least:
                break
            least, taken = judged, place
        if least > self.judged(nothing):
            # Every penalty makes a head that is too sure of what says little.
            for penalty in stronger:
                if attempt(penalty, nothing) < self.judged(nothing):
                    break
            taken = min(range(len(tried)), key=lambda place: tried[place][0])
        _, chosen, best = tried[taken]
        return chosen, best[0].weights, tuple(trials)

    def minimum(self, subset: Subset, point: Point, penalty: float) -> tuple[Point, int]:
        """Return nearly the solution with a penalty, searched from `point`, and the steps."""
        return minimise(
            partial(self.loss.at, subset=subset),
            point,
            penalty=penalty,
            covariance=self.covariance,
            # A pass over few rows costs little.
            tolerance=PATH_TOLERANCE if self.folds == 1 else TOLERANCE,
            most_steps=self.most_steps,
            fewest_steps=1,
            # Where all rows have one label, the intercept grows for ever, and no error gets small.
            least_gradient=LEAST_GAIN / 10,
        )

    def judged(self, points: Sequence[Point]) -> float:
        """Return the mean loss over the rows that judge; see `tasks.doubt`."""
        losses, unsure, weight, *_ = torch.stack([point.judges for point in points]).sum(0).tolist()
        outputs = self.task.outputs
        spread = doubt(self.counts.samples if self.folds > 1 else self.counts.held_out) * outputs / max(1, outputs - 1)
        return float(((1 - spread) * losses + spread * unsure) / weight)
