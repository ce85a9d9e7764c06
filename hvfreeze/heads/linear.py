"""Logistic or linear regression over all ranks: rows stay on their ranks, and each pass needs one allreduce.

    fit = fit_linear(rows, task=Classes(10), world=world)       # penalty chosen on the held-out rows
    logits = features @ fit.weight.t() + fit.bias               # for raw features: the standardisation is folded in

Minimises over n rows with weights w, standardised features z and coefficients W without the intercept b

    sum w loss(W z + b, label) / sum w  +  penalty x |W|^2

For classes, the unique minimum is that of scikit-learn's LogisticRegression(C=1 / (2 x penalty x n)) on the same
standardised rows; for numbers, that of its Ridge. The penalty is chosen on held-out rows along a path from strong to
weak with warm starts, or for few rows by cross-validation. The final fit uses all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.agreement import gather_objects
from hvfreeze.comm.world import World
from hvfreeze.data.shards import draw
from hvfreeze.errors import UsageError
from hvfreeze.heads.moments import Covariance, Standard, check_choice, covariance
from hvfreeze.heads.outliers import Prepared, prepare
from hvfreeze.heads.projection import gather_info
from hvfreeze.heads.requested_sums import RequestedSums
from hvfreeze.heads.rows import RowInfo, Rows
from hvfreeze.heads.solution import PenaltyTrial, Solution
from hvfreeze.imports import import_whole
from hvfreeze.tasks import Calibration, Classes, MultiLabel, Numbers, Task, doubt


@dataclass(frozen=True)
class Subset:
    """The split of rows into fitted and evaluating ones."""

    fold: int | None = None
    """Index of the evaluating fold: 0 has the held-out rows, the others divide the other samples at random."""
    folds: int = 1

    def judging(self, rows: RowInfo) -> Tensor:
        """Return a mask of the evaluating rows, (B,) bool; the others are fitted."""
        if self.fold is None:
            return torch.zeros_like(rows.held_out)
        # Labels may repeat in the order of samples, and ranks do in their numbers.
        fold = (draw("fold", rows.samples.numpy()) % np.uint64(max(1, self.folds - 1))).astype(np.int64)
        return torch.where(rows.held_out, 0, 1 + torch.from_numpy(fold)) == self.fold


@dataclass(frozen=True)
class Point:
    """The mean loss over the fitted rows of all ranks at one point, without a penalty."""

    weights: Tensor
    """Coefficients for standardised features, (C, D + 1) float64; the last column is the intercept."""
    loss: float
    """Mean loss in nats, or squared errors."""
    gradient: Tensor
    """Gradient of the loss, (C, D + 1) float64."""
    curvature: float
    """Mean second derivative of the loss by the outputs, over fitted rows and outputs."""
    judges: Tensor
    """Sums over the evaluating rows, (5,) float64: weighted losses, weighted losses averaged over all classes, weights,
    scores, and the number of rows."""

    @property
    def held_out_loss(self) -> float:
        """Mean loss of the evaluating rows; NaN without any."""
        return float(self.judges[0] / self.judges[2])

    @property
    def held_out_score(self) -> float:
        """Accuracy or R^2 of the evaluating rows, at most 1; NaN without any."""
        return float(self.judges[3] / self.judges[4])


class RowTerms(NamedTuple):
    """The terms of rows in the loss and its derivatives, (B,) each except `residuals`."""

    losses: Tensor
    residuals: Tensor
    """Derivatives by the outputs, (C, B)."""
    bends: Tensor
    """Second derivatives by the outputs, summed over outputs."""


def terms_of(task: Task, answers: Tensor, labels: Tensor) -> RowTerms:
    """Return the terms of rows for outputs, (C, B) float32: classes first, which is 2x faster for few of them."""
    if isinstance(task, Classes):
        logs, places = answers.log_softmax(0), torch.arange(len(labels))
        losses = -logs[labels, places]
        chances = logs.exp_()
        bends = (chances - chances.square()).sum(0)
        chances[labels, places] -= 1
        return RowTerms(losses, chances, bends)
    if isinstance(task, MultiLabel):
        truth, chances = labels.t().float(), answers.sigmoid()
        losses = functional.binary_cross_entropy_with_logits(answers, truth, reduction="none").sum(0)
        return RowTerms(losses, chances - truth, (chances * (1 - chances)).sum(0))
    errors = answers - task.targets(labels).t().float()
    losses = errors.square().mean(0)
    return RowTerms(losses, errors * (2 / len(errors)), torch.full_like(losses, 2.0))


def judged_by(task: Task, answers: Tensor, labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean losses over all possible labels, and the scores of rows, (B,) each; for outputs, (C, B)."""
    if isinstance(task, Classes):
        return -answers.log_softmax(0).mean(0), (answers.argmax(0) == labels).float()
    if isinstance(task, MultiLabel):
        return losses, ((answers > 0) == (labels.t() > 0.5)).float().mean(0)
    return losses, 1 - losses


class SumsOverRanks(RequestedSums[Subset]):
    """The weighted mean loss over the rows of all ranks, of the outputs weights . [standardised features, 1].

    Products are float32, sums over chunks and ranks float64.
    """

    def __init__(
        self, rows: Rows, standard: Standard, *, task: Task, world: World, stop: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(world=world)
        self._rows, self._standard, self._task, self._stop = rows, standard, task, stop
        self.shape = (task.outputs, rows.width + 1)

    def at(self, weights: Tensor, subset: Subset) -> Point:
        """Return the loss at `weights` over the fitted rows of `subset`; see `request`. Collective."""
        fitted, judges, raw = self.request(weights, subset).split([3, 5, math.prod(self.shape)])
        loss, weight, curvature = fitted.tolist()
        raw = raw.view(self.shape)
        gradient = torch.empty_like(raw)
        # The gradient for standardised features, from sums over raw features.
        gradient[:, :-1] = (raw[:, :-1] - raw[:, -1:] * self._standard.offset) * self._standard.scale / weight
        gradient[:, -1] = raw[:, -1] / weight
        return Point(weights, loss / weight, gradient, curvature / (weight * self.shape[0]), judges)

    def zero(self) -> Tensor:
        """Return weights of zero, (C, D + 1) float64."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def _partial(self, point: Tensor, terms: Subset) -> Tensor:
        """Return this rank's sums: three of fitted rows, five of evaluating rows, and the gradient for raw features."""
        weight, bias = (part.float() for part in self._standard.folded(point, mean=self._standard.offset))
        sums, judges, gradient = torch.zeros(3).double(), torch.zeros(5).double(), self.zero()
        self.stopped = self._stop()
        for chunk in self._rows.chunks():
            features, info = self._standard.taken(chunk.features), chunk.info
            held = terms.judging(info)
            # Rows first: this order of the product takes half the time of the other.
            answers = torch.addmm(bias, features, weight.t()).t().contiguous()
            found = terms_of(self._task, answers, info.labels)
            fitted = info.weights * ~held
            sums += _sums(found.losses * fitted, fitted, found.bends * fitted)
            if held.any():
                losses, judging = found.losses[held], info.weights[held]
                unsure, scores = judged_by(self._task, answers[:, held], info.labels[held], losses)
                judges += _sums(losses * judging, unsure * judging, judging, scores, torch.ones_like(scores))
            residuals = found.residuals * fitted
            gradient[:, :-1] += residuals @ features
            gradient[:, -1] += residuals.sum(1, dtype=torch.float64)
        return torch.cat([sums, judges, gradient.flatten()])


def _sums(*columns: Tensor) -> Tensor:
    return torch.stack(columns).sum(1, dtype=torch.float64)


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
    """Minimise loss + penalty x |coefficients|^2 from `start` by scipy's L-BFGS; return the minimum and the steps.

    It stops if `relative_error` is at most `tolerance`, if the gradient's norm is at most `least_gradient`, or after
    `most_steps`, but not before `fewest_steps`: the minimum of the previous penalty may be within a loose tolerance.
    Variables are scaled by the root of the approximate inverse second derivative, so the first step is nearly Newton's.
    """
    # The import takes 0.2 s, and most runs need no linear head.
    minimize = import_whole("scipy.optimize").minimize

    def is_near(point: Point) -> bool:
        gradient = float(_with_penalty(point.gradient, point.weights, penalty).norm())
        return gradient <= least_gradient or relative_error(point, penalty) <= tolerance

    if most_steps == 0 or (fewest_steps == 0 and is_near(start)):
        return start, 0
    scaled = partial(covariance.root_inverse, curvature=start.curvature, penalty=penalty)
    length = float(scaled(_with_penalty(start.gradient, start.weights, penalty)).norm())
    if length == 0:
        return start, 0
    # The last point, the last one after a line search, and the values that scipy got for each.
    last, here, told, told_here, steps = start, start, 0.0, 0.0, 0

    def loss(place: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal last, told
        offset = scaled(torch.from_numpy(place.copy()).view(start.weights.shape)) * length
        last = evaluate(start.weights + offset) if offset.any() else start
        slope, before = _with_penalty(last.gradient, last.weights, penalty), _objective(here, penalty)
        gain = _objective(last, penalty) - before
        if abs(gain) <= torch.finfo(torch.float32).eps * abs(before):
            # Near the minimum the rounding of products hides the decrease; slopes show it (Hager and Zhang, SIAM J.
            # Optim. 16, 2005).
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
    """Return the gradient's norm / (2 penalty x norm of the coefficients); infinite if only the coefficients are 0.

    It bounds the relative distance of the coefficients from the minimum, because the penalty has the second derivative
    2 penalty.
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
"""Candidate penalties from 1 to 1e-8, two per decade. With one per decade, 1,000 images of
CIFAR-10 lose 0.4 points of accuracy and take 1.5 times the passes."""
STRONGER = (10.0, 100.0, 1e3, 1e4)
"""Stronger candidates, for features without information about the labels."""
TOLERANCE = 0.2
"""Relative error of the coefficients. With 300 to 5,000 images of CIFAR-10, 0.05 changes the accuracy by less than 0.2
points."""
FEW_ROWS, FOLDS = 400, 5
"""Number of rows up to which cross-validation chooses the penalty, because a tenth of them is too few; its folds."""
PATH_TOLERANCE = 1.0
"""Tolerance while many rows choose the penalty. With 2, 1,000 images of CIFAR-10 lose 0.3 points; 0.5 takes 20 % more
passes."""
LEAST_GAIN = 1e-3
"""Least relative decrease of the held-out loss that continues the path."""


@dataclass(frozen=True)
class HeadFit(Solution):
    """A fitted head, bitwise equal on all ranks except `used`; `error` bounds the coefficients' relative error."""

    weight: Tensor
    """Weights for raw features, (C, D) float32."""
    bias: Tensor
    """Bias, (C,) float32."""
    coefficients: Tensor
    """Coefficients for standardised features and targets, (C, D + 1) float64; the last column is the intercept."""
    used: Tensor
    """Mask of this rank's rows that were fitted, (N,) bool."""


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
    """Minimise the penalised loss over the rows of all ranks; the head is equal on all of them. Collective.

    None if a rank stops the fit.

    Args:
        rows: this rank's rows; there may be none.
        task: task of the head.
        world: the ranks.
        penalties: decreasing candidates above 0; a single one is used as given.
        tolerance: relative error of the minimum, see `relative_error`; on the path it may be `PATH_TOLERANCE`.
        most_steps: limit of the steps per penalty; `HeadFit.converged` is False if it was reached.
        trained: whether the network was trained on the rows that are not held out. Their features then depend on their
            labels, so only held-out rows choose the penalty, even if rows are few.
        stop: called in every pass; True on any rank stops the fit.

    Raises:
        UsageError: several penalties and no held-out rows, or penalties that are not decreasing and above 0.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or not all(0 < value < math.inf for value in values) or values != sorted(set(values), reverse=True):
        raise UsageError(f"penalties ({values}) must be above 0 and decreasing, at least one")
    prepared = prepare(rows, world=world, no_labels=task.no_labels)
    standard = prepared.standard
    check_choice(standard.held_out, len(values))
    if isinstance(task, Numbers):
        # Processors may round differently: all ranks use rank 0's scale of targets.
        everyone = gather_info(prepared.info, world=world)
        task = world.broadcast_object(task.measured(everyone.labels, everyone.weights), name="head.task")
    sums = SumsOverRanks(prepared.rows, standard, task=task, world=world, stop=stop)
    counts = counts_of(prepared, world=world)

    def minimum() -> tuple[HeadFit, Tensor | None]:
        """Return the fit, and the weights without held-out rows."""
        penalty, start, trials = values[0], sums.zero(), tuple[PenaltyTrial, ...]()
        steered, judge = covariance(prepared.product), None
        if len(values) > 1:
            folds = FOLDS if standard.count <= FEW_ROWS and not trained else 1
            stronger = STRONGER if values == list(PENALTIES) else ()
            penalty, start, trials = Choosing(sums, steered, task, counts, folds, most_steps).path(values, stronger)
            judge = start
        evaluate = partial(sums.at, subset=Subset())
        point, steps = minimise(
            evaluate,
            evaluate(start),
            penalty=penalty,
            covariance=steered,
            tolerance=tolerance,
            most_steps=most_steps,
        )
        return solution(point, penalty, trials, prepared, task, sums, steps=steps, tolerance=tolerance), judge

    found, judge = sums.lead(minimum) or (None, None)
    # Processors may round differently: all ranks use rank 0's head.
    found = world.broadcast_object(examine(found, judge, task, prepared, world=world), name="head.fit")
    return None if found is None else replace(found, used=prepared.used)


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
    """Convert a point to a head for raw features and labels."""
    coefficients, error, standard = point.weights.clone(), relative_error(point, penalty), prepared.standard
    if isinstance(task, Classes):
        # A constant in all intercepts does not change probabilities.
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
    """Return rank 0's fit `found` with held-out metrics. Collective.

    `judge`, (C, D + 1), also from rank 0, are the weights of a head that was fitted without the held-out rows. The fit
    is unchanged if one of them is None, or if the task needs only loss and accuracy.
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
    everyone = gather_objects(world, tuple(torch.cat(part) for part in mine), name="head.examined")
    if found is None:
        return None
    logits, labels = (torch.cat(parts) for parts in zip(*everyone))
    metrics, thresholds = task.examined(logits, labels)
    trials = tuple(
        replace(trial, metrics=metrics, thresholds=thresholds) if trial.penalty == found.penalty else trial
        for trial in found.trials
    )
    return replace(found, trials=trials)


class Counts(NamedTuple):
    """Numbers of samples over all ranks."""

    samples: int
    held_out: int
    """Number of held-out samples."""


def counts_of(prepared: Prepared, *, world: World) -> Counts:
    """Count the samples of all ranks. Collective."""
    samples, held_out = prepared.info.samples, prepared.info.held_out
    mine = torch.tensor([len(samples.unique()), len(samples[held_out].unique())], dtype=torch.int64)
    return Counts(*world.allreduce_sum(mine, name="head.counts").tolist())


@dataclass(frozen=True)
class Choosing:
    """The choice of the penalty by evaluating rows, on rank 0."""

    loss: SumsOverRanks
    covariance: Covariance
    task: Task
    counts: Counts
    folds: int
    """Number of folds; with 1 the held-out rows choose, else all rows."""
    most_steps: int

    def path(
        self, penalties: Sequence[float], stronger: Sequence[float]
    ) -> tuple[float, Tensor, tuple[PenaltyTrial, ...]]:
        """Return the penalty with the least evaluation loss, its weights, and the trials of held-out rows.

        Goes from strong to weak until the loss stops falling. `stronger` penalties are tried if the strongest of
        `penalties` is worse than intercepts alone.
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

        # With few samples a strong penalty may be worse than no head: it leaves mainly the intercepts, and these are
        # too low for each sample's class, which is rarer among the others. So compare the first solution with the
        # second.
        least, taken = math.inf, 0
        for place, penalty in enumerate(penalties):
            judged = attempt(penalty, tried[-1][2] if tried else nothing)
            if judged > (1 - LEAST_GAIN) * least:
                break
            least, taken = judged, place
        if least > self.judged(nothing):
            # Every penalty gives an overconfident head on uninformative features.
            for penalty in stronger:
                if attempt(penalty, nothing) < self.judged(nothing):
                    break
            taken = min(range(len(tried)), key=lambda place: tried[place][0])
        _, chosen, best = tried[taken]
        return chosen, best[0].weights, tuple(trials)

    def minimum(self, subset: Subset, point: Point, penalty: float) -> tuple[Point, int]:
        """Return the approximate minimum for a penalty, from `point`, and the steps."""
        return minimise(
            partial(self.loss.at, subset=subset),
            point,
            penalty=penalty,
            covariance=self.covariance,
            # A pass over few rows is cheap.
            tolerance=PATH_TOLERANCE if self.folds == 1 else TOLERANCE,
            most_steps=self.most_steps,
            fewest_steps=1,
            # If all rows have one label, the intercept diverges and the error does not converge.
            least_gradient=LEAST_GAIN / 10,
        )

    def judged(self, points: Sequence[Point]) -> float:
        """Return the mean loss of the evaluating rows, with labels smoothed by the share `tasks.doubt`."""
        losses, unsure, weight, *_ = torch.stack([point.judges for point in points]).sum(0).tolist()
        outputs = self.task.outputs
        spread = doubt(self.counts.samples if self.folds > 1 else self.counts.held_out) * outputs / max(1, outputs - 1)
        return float(((1 - spread) * losses + spread * unsure) / weight)
