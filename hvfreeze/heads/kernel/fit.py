"""Kernel ridge regression over all ranks: features stay where they are, compact points of them go to all.

    fit = fit_kernel(rows, classes=10, world=world)
    head.take(fit)

With points z of the N rows of all ranks, K[i, j] = exp(-|z_i - z_j|^2) and Y[i] the row's class as a one less 1 / C,

    (K + penalty) A = Y

has one solution, that of scikit-learn's KernelRidge; it depends on no learning rate and no order. What a row's sums say
is not yet a probability: they are multiplied by what makes the cross-entropy of held-out rows least.

The penalty is chosen on held-out rows, all that are tried being solved at once; then everything is fitted with it,
held-out rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.heads.kernel.conjugate import Solved, solve
from hvfreeze.heads.kernel.gram import Gram
from hvfreeze.heads.kernel.projection import gathered, points_of, project
from hvfreeze.heads.nystrom import Covariance, covariance
from hvfreeze.heads.rows import Rows
from hvfreeze.heads.solution import Solution, Stopped, Trial
from hvfreeze.heads.standard import Standard, measure
from hvfreeze.ranks.world import World

PENALTIES = (1.0, 0.3, 0.1, 0.03)
LEAST_GAIN = 0.01
"""Of two penalties the weaker is chosen, unless the stronger lowers the held-out loss by more than this part."""
TOLERANCE, CHOICE_TOLERANCE = 1e-2, 0.1
"""What may be missing of the right sides: tighter ones changed no accuracy."""
MOST_STEPS = 200
MOST_COLUMNS = 640
"""Right sides at a time: beyond, all vectors together would take more memory than the matrix."""
SCALES = tuple(10 ** (part / 20) for part in range(-20, 41))
"""From 0.1 to 100, among which the factor of the sums is chosen."""
MOST_ROWS = 50_000
"""Every pair of rows is compared: with so many, lines of 10 GB for all ranks."""


@dataclass(frozen=True)
class KernelFit(Solution):
    """A solved head, equal on all ranks bit for bit; see `KernelHead` for the tensors.

    Attributes:
        answers: what it says of this rank's own rows, in their order, (B, C) float32; other ranks have others.
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
    """What rank 0 has found, beside the points that all ranks know: the weight, and answers to all rows."""

    solution: Solution
    weight: Tensor
    answers: Tensor


def fit_kernel(
    rows: Rows,
    *,
    classes: int,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
    stop: Callable[[], bool] = lambda: False,
) -> KernelFit | None:
    """Return the head that solves kernel ridge regression on the rows of all ranks, the same bits on every rank.

    None where some rank wants to stop before.

    Collective: every rank of `world` must call this, a rank without rows too.

    Args:
        rows: this rank's rows.
        classes: C, at least 2.
        world: the ranks.
        memory_bytes: this rank's lines of K, 4 x N x its own rows, are kept where they take no more, else computed anew
            for each product.
        penalties: above 0; with one, nothing is chosen.
        tolerance: what may be missing of the right sides, as a part of them.
        most_steps: of the solver; `KernelFit.converged` tells whether they sufficed.
        stop: asked in every product; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, penalties that are not above 0, no rows or too many.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or len(set(values)) < len(values):
        raise UsageError(f"penalties ({values}) must be above 0 and different, at least one")
    standard = measure(rows, world=world)
    check(standard, values)
    matrix, shift = project(rows, standard, world=world)
    mine = points_of(rows, matrix, shift)
    counts = world.allgather_object(len(mine[0]), name="head.counts")
    centres, labels, held_out = (gathered(column, counts, world=world) for column in mine)
    first, count = sum(counts[: world.rank]), counts[world.rank]
    gram = Gram(centres, first=first, count=count, world=world, memory_bytes=memory_bytes, stop=stop)
    found: Found | None = None
    if world.rank > 0:
        gram.follow()
    else:
        with suppress(Stopped):
            search = Search(gram, labels, held_out.bool(), classes=classes, tolerance=tolerance, most_steps=most_steps)
            found = search.found(values)
        gram.stop()
    found = world.broadcast_object(found, name="head.fit")
    if found is None:
        return None
    return KernelFit(
        **vars(found.solution),
        answers=found.answers[first : first + count],
        projection=matrix,
        shift=shift,
        centres=centres,
        weight=found.weight,
    )


def check(standard: Standard, penalties: Sequence[float]) -> None:
    """Refuse rows that cannot be fitted, on all ranks alike."""
    message = ""
    if len(penalties) > 1 and standard.held_out == 0:
        message = f"{len(penalties)} penalties and no held-out samples to choose by; give more training samples"
    if standard.count > MOST_ROWS:
        message = (
            f"{standard.count} views of samples, and with kernel every pair of them is compared: it takes at most "
            f"{MOST_ROWS}; pass --head-fit exact"
        )
    if message:
        error = UsageError(f"head fit: {message}")
        error.everywhere = True
        raise error


class Search:
    """What rank 0 does while the others follow."""

    def __init__(
        self, gram: Gram, labels: Tensor, held_out: Tensor, *, classes: int, tolerance: float, most_steps: int
    ) -> None:
        self._gram, self._labels, self._held_out = gram, labels, held_out
        self._right = functional.one_hot(labels, classes).double() - 1 / classes
        self._tolerance, self._most_steps = tolerance, most_steps

    def found(self, penalties: Sequence[float]) -> Found:
        """Return the solution with the penalty that held-out rows choose.

        Raises:
            Stopped: some rank wants to stop.
        """
        leading = covariance(self._gram.sketch().double())
        start, scale, penalty = torch.zeros_like(self._right), 1.0, penalties[0]
        trials: tuple[Trial, ...] = ()
        if len(penalties) > 1:
            start, scale, penalty, trials = self._choose(penalties, leading)
        everything = torch.ones_like(self._held_out)
        solved = self._solve([penalty], start, everything, leading, self._tolerance)
        said = self._right - solved.left - penalty * solved.vectors
        if not trials:
            scale, _ = best_scale(said, self._labels)
        gram = self._gram
        solution = Solution(
            penalty,
            trials,
            float(functional.cross_entropy(scale * said, self._labels)),
            len(self._labels),
            solved.steps,
            # Mean and deviation, the sketch of the features and their projection took one pass each.
            gram.passes + 3,
            solved.error,
            solved.error <= self._tolerance,
            gram.exchanged_bytes,
        )
        return Found(solution, (scale * solved.vectors).t().float().contiguous(), (scale * said).float())

    def _choose(
        self, penalties: Sequence[float], leading: Covariance
    ) -> tuple[Tensor, float, float, tuple[Trial, ...]]:
        """Return the vectors, scale and penalty that are chosen, and all that were tried."""
        classes, trials, kept = self._right.shape[1], [], []
        together = max(1, MOST_COLUMNS // classes)
        for place in range(0, len(penalties), together):
            some = penalties[place : place + together]
            start = torch.zeros(len(self._labels), classes * len(some), dtype=torch.float64)
            solved = self._solve(some, start, ~self._held_out, leading, CHOICE_TOLERANCE)
            said = self._gram.times(solved.vectors)[self._held_out].double()
            for penalty, vectors, answers in zip(some, solved.vectors.split(classes, 1), said.split(classes, 1)):
                scale, loss = best_scale(answers, self._labels[self._held_out])
                right = (answers.argmax(1) == self._labels[self._held_out]).double().mean()
                trials.append(Trial(penalty, loss, float(right), solved.steps))
                kept.append((vectors, scale))
        # Rows that are left out here are fitted in the end, and with more rows a weaker penalty is the better one.
        bound = (1 + LEAST_GAIN) * min(trial.held_out_loss for trial in trials)
        good = [place for place, trial in enumerate(trials) if trial.held_out_loss <= bound]
        best = min(good, key=lambda place: trials[place].penalty)
        return *kept[best], trials[best].penalty, tuple(trials)

    def _solve(
        self, penalties: Sequence[float], start: Tensor, fitted: Tensor, leading: Covariance, tolerance: float
    ) -> Solved:
        columns = torch.tensor(penalties, dtype=torch.float64).repeat_interleave(self._right.shape[1])
        return solve(
            self._gram.times,
            self._right.repeat(1, len(penalties)),
            columns,
            start=start,
            fitted=fitted,
            leading=leading,
            tolerance=tolerance,
            most_steps=self._most_steps,
        )


def best_scale(answers: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return of `SCALES` the one by which `answers`, (B, C), have the least cross-entropy, and that."""
    losses = [float(functional.cross_entropy(scale * answers, labels)) for scale in SCALES]
    best = min(range(len(SCALES)), key=losses.__getitem__)
    return SCALES[best], losses[best]
