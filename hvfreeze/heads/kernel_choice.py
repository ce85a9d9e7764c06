"""What a kernel head leaves open, chosen by samples that it was not fitted to: the penalty, and how sure it is.

Of few rows each sample is left out in turn, which ridge regression has in closed form: with A = (K + penalty)^-1 and
duals A Y, the answers to the rows G of a sample, of a fit to all others, are Y[G] - A[G, G]^-1 (A Y)[G]. Of more rows,
held-out samples are left out at once; the others are fitted by a factorisation, or where they are many by conjugate
gradients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.heads.gram import MOST_STEPS, Gram, Solved, gaussian, solve
from hvfreeze.heads.landmarks import Factor
from hvfreeze.heads.points import AllRows, Marks
from hvfreeze.heads.solution import PenaltyTrial, doubt


class Choice(NamedTuple):
    """A penalty, the factor that goes with it, and all that were tried."""

    penalty: float
    scale: float
    trials: tuple[PenaltyTrial, ...]
    plain: PlainResult | None = None


class PlainResult(NamedTuple):
    """Of the chosen penalty, on rows that choose and are no mirror images: as images are when the head is used."""

    loss: float
    """With the factor that suits these rows."""
    accuracy: float
    rows: int


LEAST_GAIN = 0.03
"""Of two penalties the weaker is chosen, unless the stronger lowers the loss by more than this part."""
CHOICE_TOLERANCE = 0.01
"""While the penalty is chosen: solutions this close have nearly the held-out loss of the exact one."""
MOST_COLUMNS, MOST_NUMBERS = 640, 2**24
"""Right sides at a time, and numbers in them: with more, all vectors together would take more memory than the matrix.
"""
SCALES = tuple(10 ** (part / 20) for part in range(-20, 41))
"""From 0.1 to 100, among which the factor of the sums is chosen."""


def choose(gram: Gram, rows: AllRows, *, classes: int, penalties: Sequence[float], whole: bool) -> Choice:
    """Return the penalty that held-out rows choose; the others are fitted with all penalties at once.

    To be called in `Gram.lead`; `whole` is false where `rows` are a part.
    """
    known, right, held_out = Factor(rows.points), targets(rows.labels, classes), rows.held_out
    found, together = [], max(1, columns_at_once(len(right)) // classes)
    for first in range(0, len(penalties), together):
        some = penalties[first : first + together]
        solved = solve_ridge(
            gram,
            right.repeat(1, len(some)),
            torch.tensor(some, dtype=torch.float64).repeat_interleave(classes),
            fitted=~held_out[:, None],
            known=known,
            tolerance=CHOICE_TOLERANCE,
            most_steps=MOST_STEPS,
        )
        sums = gram.times(solved.vectors).double()
        for penalty, answers in zip(some, sums.split(classes, 1), strict=True):
            found.append(Tried.of(penalty, answers, rows, choosing=held_out, steps=solved.steps, whole=whole))
    return best_of(found)


def columns_at_once(rows: int) -> int:
    """Return how many right sides of so many rows are solved at a time."""
    return max(1, min(MOST_COLUMNS, MOST_NUMBERS // max(1, rows)))


def solve_ridge(
    gram: Gram,
    right: Tensor,
    penalties: Tensor,
    *,
    fitted: Tensor,
    known: Factor,
    tolerance: float,
    most_steps: int,
) -> Solved:
    """Return X, (N, C), with (K + penalty) X = `right`; rows that are not fitted are left out of K, X and `right`.

    To be called in `Gram.lead`.

    Args:
        gram: K.
        right: (N, C) float64.
        penalties: (C,) float64, above 0, by column.
        fitted: (N, 1) or (N, C) bool, by column too.
        known: of K.
        tolerance: see `gram.solve`.
        most_steps: see `gram.solve`.
    """
    most, columns = columns_at_once(len(right)), right.shape[1]
    if columns > most:
        pieces = [
            solve_ridge(
                gram,
                right[:, some],
                penalties[some],
                fitted=fitted if fitted.shape[1] == 1 else fitted[:, some],
                known=known,
                tolerance=tolerance,
                most_steps=most_steps,
            )
            for some in (slice(first, first + most) for first in range(0, columns, most))
        ]
        vectors, left, steps, errors = zip(*pieces)
        return Solved(torch.cat(vectors, 1), torch.cat(left, 1), max(steps), max(errors))
    mask = fitted.double()
    return solve(
        lambda vectors: (gram.times(vectors).double().add_(penalties * vectors)).mul_(mask),
        mask * right,
        inverse=known.inverse(penalties, fitted=fitted),
        tolerance=tolerance,
        most_steps=most_steps,
        tell=gram.tell,
    )


def choose_directly(rows: AllRows, *, classes: int, penalties: Sequence[float], whole: bool) -> Choice:
    """Return the penalty that held-out rows choose; the others are fitted with one factorisation for each penalty."""
    held_out, points = rows.held_out, rows.points.double()
    fitted, right = points[~held_out], targets(rows.labels[~held_out], classes)
    kernel, across = gaussian(fitted, fitted), gaussian(points[held_out], fitted)
    answers, found = torch.zeros(len(points), classes, dtype=torch.float64), []
    for penalty in penalties:
        answers[held_out] = across @ torch.cholesky_solve(right, root_of(kernel.clone(), penalty))
        found.append(Tried.of(penalty, answers, rows, choosing=held_out, steps=0, whole=whole))
    return best_of(found)


def root_of(kernel: Tensor, penalty: float) -> Tensor:
    """Return the Cholesky factor of K + penalty, (N, N); `kernel` is overwritten."""
    kernel.diagonal().add_(penalty)
    root: Tensor = torch.linalg.cholesky(kernel)
    return root


def fitted_directly(
    points: Tensor, right: Tensor, penalty: float, *, held_out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return X, (N, C) float64, with (K + penalty) X = `right`, and the sums of held-out rows of a fit to all others.

    The latter are 0 for all other rows, and None without `held_out`, (N,) bool. By one factorisation in float64.
    """
    points = points.double()
    root = root_of(gaussian(points, points), penalty)
    vectors = torch.cholesky_solve(right, root)
    if held_out is None:
        return vectors, None
    places = held_out.nonzero()[:, 0]
    some = torch.zeros(len(points), len(places), dtype=torch.float64)
    some[places, torch.arange(len(places))] = 1
    blocks = torch.cholesky_solve(some, root)[places]
    sums = torch.zeros_like(right)
    sums[places] = right[places] - torch.linalg.solve(blocks, vectors[places])
    return vectors, sums


def choose_closely(rows: AllRows, *, classes: int, penalties: Sequence[float], choosing: Tensor) -> Choice:
    """Return the penalty that the rows `choosing`, (N,) bool, choose, by fits to all samples but the row's own.

    One factorisation of an (N, N) matrix for each penalty; results on held-out rows are of such fits too.
    """
    points = rows.points.double()
    kernel, right, groups = gaussian(points, points), targets(rows.labels, classes), views_of(rows.samples)
    found = []
    for penalty in penalties:
        answers = left_out_answers(kernel, right, penalty, groups)
        found.append(Tried.of(penalty, answers, rows, choosing=choosing, steps=0, whole=True))
    choice = best_of(found)
    return choice if len(penalties) > 1 else choice._replace(trials=())


class Tried(NamedTuple):
    """What came of one penalty."""

    loss: float
    """By which it is compared."""
    scale: float
    plain: PlainResult
    trial: PenaltyTrial

    @classmethod
    def of(cls, penalty: float, answers: Tensor, rows: Marks, *, choosing: Tensor, steps: int, whole: bool) -> Tried:
        """Return what the sums of all rows, (N, C), say, each of a fit without the row where it counts.

        `choosing`, (N,) bool, tells which rows choose the scale and are compared by; the trial is of held-out rows.
        """
        share = doubt(len(rows.samples[choosing].unique()))
        scale, loss = best_scale(answers[choosing], rows.labels[choosing], share)
        as_they_are = choosing & ~rows.mirrored
        said, truth = answers[as_they_are], rows.labels[as_they_are]
        plain = PlainResult(best_scale(said, truth, share)[1], accuracy(said, truth), len(truth))
        said, truth = answers[rows.held_out], rows.labels[rows.held_out]
        # With their own factor, whoever chooses: a guard compares this with what others' held-out rows say.
        suits = best_scale(said, truth, doubt(len(rows.samples[rows.held_out].unique())))[0]
        loss_of_held_out = float(functional.cross_entropy(suits * said, truth))
        trial = PenaltyTrial(penalty, loss_of_held_out, accuracy(said, truth), steps, whole)
        return cls(loss, scale, plain, trial)


def best_of(found: Sequence[Tried]) -> Choice:
    """Return the weakest penalty with nearly the least loss: a fit to more rows, as the last, wants a weaker one."""
    bound = (1 + LEAST_GAIN) * min(tried.loss for tried in found)
    best = min((tried for tried in found if tried.loss <= bound), key=lambda tried: tried.trial.penalty)
    return Choice(best.trial.penalty, best.scale, tuple(tried.trial for tried in found), best.plain)


def targets(labels: Tensor, classes: int) -> Tensor:
    """Return the right sides, (N, C) float64: 1 - 1 / C for the row's class, -1 / C for the others."""
    return functional.one_hot(labels, classes).double() - 1 / classes


def best_scale(answers: Tensor, labels: Tensor, share: float = 0.0) -> tuple[float, float]:
    """Return of `SCALES` the one by which `answers`, (B, C), have the least cross-entropy, and that.

    The part `share` of each label is spread evenly over the other classes; see `doubt`.
    """
    spread = smoothing(share, answers)

    @cache
    def loss(place: int) -> float:
        return float(functional.cross_entropy(SCALES[place] * answers, labels, label_smoothing=spread))

    # The cross-entropy is convex in the factor: it falls up to the best one, and rises from there on.
    best = bisect_left(range(len(SCALES) - 1), True, key=lambda place: loss(place) <= loss(place + 1))
    return SCALES[best], loss(best)


def smoothing(share: float, answers: Tensor) -> float:
    """Return what torch calls label smoothing, which counts the right class among those that labels are spread over."""
    classes = answers.shape[1]
    return min(1.0, share * classes / max(1, classes - 1))


def accuracy(answers: Tensor, labels: Tensor) -> float:
    """Return the part of the rows that is right; NaN without any."""
    return float((answers.argmax(1) == labels).double().mean())


def views_of(samples: Tensor) -> list[Tensor]:
    """Return the rows of each sample, (samples, views) for each number of views that there is."""
    _, place, counts = samples.unique(return_inverse=True, return_counts=True)
    order = place.argsort(stable=True)
    ends = counts.cumsum(0)
    return [
        torch.stack([order[ends[counts == count] - count + view] for view in range(count)], 1)
        for count in counts.unique().tolist()
    ]


def left_out_answers(kernel: Tensor, right: Tensor, penalty: float, groups: Sequence[Tensor]) -> Tensor:
    """Return for every row the sums, (N, C) float64, of the fit to all rows but those of its group.

    Args:
        kernel: K, (N, N) float64.
        right: Y, (N, C) float64.
        penalty: above 0.
        groups: (groups, rows of each), each row in one.
    """
    inverse = torch.cholesky_inverse(root_of(kernel.clone(), penalty))
    duals, answers = inverse @ right, torch.empty_like(right)
    for rows in groups:
        blocks = inverse[rows[:, :, None], rows[:, None, :]]
        answers[rows] = right[rows] - torch.linalg.solve(blocks, duals[rows])
    return answers
