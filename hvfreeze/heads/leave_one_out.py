"""Leave-one-out choice of the penalty for a kernel head of few rows, in closed form.

With G = (S K S + penalty)^-1 for the rows' kernel K and the roots S of their weights, a fit to all other rows has the
raw outputs Y[g] - S[g]^-1 G[g, g]^-1 (G S Y)[g] for the rows g of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.errors import UsageError
from hvfreeze.heads.kernel_products import gaussian
from hvfreeze.heads.projection import AllRows
from hvfreeze.heads.rows import RowInfo
from hvfreeze.heads.solution import PenaltyTrial
from hvfreeze.tasks import Calibration, Task

LEAST_GAIN = 0.03
"""Minimum relative gain for a stronger penalty: the final fit has more rows and prefers a weaker penalty."""


class ClosedForm(NamedTuple):
    """A closed-form fit and its leave-one-out results."""

    penalty: float
    calibration: Calibration
    """Calibration by the choosing rows."""
    trials: tuple[PenaltyTrial, ...]
    """Results of all penalties, in order."""
    weights: Tensor
    """Weights A, (N, outputs) float64."""
    answers: Tensor
    """Raw outputs K A, (N, outputs) float64."""


def fit_few(
    projected: Tensor, rows: AllRows, task: Task, penalties: Sequence[float], *, choosing: Tensor, whole: bool
) -> ClosedForm:
    """Return the fit with the best penalty for the rows `choosing`, a mask, (N,). Not a collective.

    Trials evaluate held-out rows; `whole` is False if `rows` are a subset. Computes a factor of an (N, N) matrix per
    penalty.
    """
    points, roots = projected.double(), rows.weights.double().sqrt()[:, None]
    kernel, targets = gaussian(points, points).mul_(roots).mul_(roots.t()), task.targets(rows.labels)
    groups = views_of(rows.samples)
    found = []
    for penalty in penalties:
        inverse, duals = inverted(kernel, roots * targets, penalty)
        answers = targets - residuals(inverse, duals, groups) / roots
        calibration, loss = judge(task, answers[choosing], rows.only(choosing))
        trial = trial_of(task, penalty, answers[rows.held_out], rows.only(rows.held_out), steps=0, whole=whole)
        fitted = ClosedForm(penalty, calibration, (trial,), roots * duals, targets - penalty * duals / roots)
        found.append((loss, fitted))
    bound = (1 + LEAST_GAIN) * min(loss for loss, _ in found)
    # A NaN loss means that there is nothing to choose by: take the first penalty.
    best = min((fitted for loss, fitted in found if not loss > bound), key=lambda fitted: fitted.penalty)
    return best._replace(trials=tuple(trial for _, fitted in found for trial in fitted.trials))


def judge(task: Task, answers: Tensor, rows: RowInfo) -> tuple[Calibration, float]:
    """Return the calibration of raw outputs, (N, outputs), for these rows, and its loss."""
    samples = len(rows.samples.unique())
    calibration = task.calibrate(answers, rows.labels, rows.weights, samples=samples)
    loss = task.smoothed_loss(calibration.apply(answers), rows.labels, rows.weights, samples=samples)
    return calibration, loss


def trial_of(task: Task, penalty: float, answers: Tensor, held: RowInfo, *, steps: int, whole: bool) -> PenaltyTrial:
    """Return the held-out result for raw outputs, (N, outputs), of a fit without these rows.

    The outputs are calibrated on the same rows, so that losses of different heads are comparable.
    """
    if not len(held.samples):
        return PenaltyTrial(penalty, math.nan, math.nan, steps, whole)
    logits = judge(task, answers, held)[0].apply(answers)
    loss, score = task.loss(logits, held.labels, held.weights), task.score(logits, held.labels)
    return PenaltyTrial(penalty, loss, score, steps, whole, *task.examined(logits, held.labels))


def inverted(kernel: Tensor, right: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return G = (`kernel` + penalty)^-1, (N, N) float64, and G `right`.

    Raises:
        UsageError: the penalty is so small that the matrix is singular, up to rounding.
    """
    shifted = kernel.clone()
    shifted.diagonal().add_(penalty)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if failed:
        raise UsageError(f"penalty ({penalty:g}) is too small for {len(kernel)} rows with equal features; try 1e-6")
    inverse = torch.cholesky_inverse(factor)
    return inverse, inverse @ right


def residuals(inverse: Tensor, duals: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """Return G[g, g]^-1 duals[g], (N, outputs) float64, for the rows g of every group.

    Args:
        inverse: G, (N, N) float64.
        duals: (N, outputs) float64.
        groups: row indices of each group, (groups, rows per group); each row is in one.
    """
    found = torch.empty_like(duals)
    for rows in groups:
        blocks = inverse[rows[:, :, None], rows[:, None, :]]
        found[rows] = torch.linalg.solve(blocks, duals[rows])
    return found


def views_of(samples: Tensor) -> list[Tensor]:
    """Return the row indices of each sample, as (samples, views) for each number of views."""
    _, place, counts = samples.unique(return_inverse=True, return_counts=True)
    order = place.argsort(stable=True)
    ends = counts.cumsum(0)
    return [
        torch.stack([order[ends[counts == count] - count + view] for view in range(count)], 1)
        for count in counts.unique().tolist()
    ]
