"""Multinomial logistic regression over all ranks: rows stay where they are, every pass over them is one allreduce.

    fit = fit_softmax(rows, classes=10, world=world)            # penalty chosen on the rows that are held out
    logits = features @ fit.weight.t() + fit.bias               # for raw features: the standardisation is folded in

Minimises over n rows with standardised features z and coefficients W without the intercept b

    1/n sum -log softmax(W z + b)[label]  +  penalty x |W|^2

which has the one minimum of scikit-learn's LogisticRegression(C=1 / (2 x penalty x n)) on the same standardised rows.
The penalty is chosen on held-out rows along a path from strong to weak, each solution the start of the next; of few
rows by cross-validation. Then everything, held-out rows too, is fitted with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.heads.moments import Covariance, Prepared, Standard, check_choice, covariance, prepare
from hvfreeze.heads.rows import Chunk, Rows
from hvfreeze.heads.solution import MirrorTrial, PenaltyTrial, Solution, Stopped, doubt

STOP, EVALUATE = 0.0, 1.0
"""Rank 0's commands, beside the weights that it sends."""


@dataclass(frozen=True)
class Subset:
    """Which rows are fitted, and which judge."""

    fold: int | None = None
    """That judges and is not fitted: 0 is of the held-out rows, the others are divided by their samples' numbers."""
    folds: int = 1
    mirrored: bool = True
    """Whether mirror images are fitted; none judge then."""

    def message(self) -> list[float]:
        """Return it as numbers."""
        return [-1.0 if self.fold is None else float(self.fold), float(self.folds), float(self.mirrored)]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> Subset:
        """Return what `message` wrote."""
        fold, folds, mirrored = numbers
        return cls(None if fold < 0 else int(fold), int(folds), bool(mirrored))

    def of(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return which of the rows are fitted, and which judge, (B,) bool each."""
        counted = torch.ones_like(chunk.held_out) if self.mirrored else ~chunk.mirrored
        if self.fold is None:
            return counted, torch.zeros_like(counted)
        mine = torch.where(chunk.held_out, 0, 1 + chunk.samples % max(1, self.folds - 1)) == self.fold
        return counted & ~mine, counted & mine


@dataclass(frozen=True)
class Point:
    """The mean loss over the fitted rows of all ranks at one point, without a penalty."""

    weights: Tensor
    """(C, D + 1) float64, for standardised features; the last column is the intercept."""
    loss: float
    """In nats."""
    gradient: Tensor
    """(C, D + 1) float64."""
    curvature: float
    """Mean of p (1 - p) over fitted rows and classes: how strongly the loss bends here, at most 1/4."""
    judges: Tensor
    """(2, 4) float64, sums over the rows that judge, and over those of them that are no mirror images: the losses, the
    losses if each class were the row's, which rows are right, and how many they are."""

    @property
    def held_out_loss(self) -> float:
        """Mean over the rows that judge; NaN without any."""
        return float(self.judges[0, 0] / self.judges[0, 3])

    @property
    def held_out_accuracy(self) -> float:
        """0 to 1; NaN without any."""
        return float(self.judges[0, 2] / self.judges[0, 3])


HEADER = 4
"""Numbers before the weights that rank 0 sends: the command and the subset."""
NUMBERS = 3 + 2 * 4 + 1
"""Sums before the gradient: of the fitted rows, of those that judge, and whether to stop."""


class SoftmaxLoss:
    """The mean of -log p(label) over the rows of all ranks, p = softmax(weights . [standardised features, 1]).

    Products are float32, sums over chunks and ranks float64.
    """

    def __init__(
        self, rows: Rows, standard: Standard, *, classes: int, world: World, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._rows, self._standard, self._world, self._stop = rows, standard, world, stop
        self.shape = (classes, rows.width + 1)
        self.passes, self.exchanged_bytes = 0, 0

    def at(self, weights: Tensor, subset: Subset) -> Point:
        """Return the loss at `weights` over the rows that `subset` fits; raise Stopped on rank 0.

        Rank 0 calls this while every other rank of the world is in `follow`, also after it is stopped. Collective.
        """
        self._send(EVALUATE, subset, weights)
        point, stopped = self._evaluate(weights, subset)
        if stopped:
            raise Stopped
        return point

    def zero(self) -> Tensor:
        """Return weights of zero, (C, D + 1) float64."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def stop(self) -> None:
        """End the other ranks' `follow`. Rank 0 calls this. Collective."""
        self._send(STOP, Subset(), self.zero())

    def follow(self) -> None:
        """Take part in every evaluation of rank 0, until it stops. All ranks but 0 call this. Collective."""
        while True:
            message = torch.empty(HEADER + math.prod(self.shape), dtype=torch.float64)
            self._world.broadcast_(message, name="head.weights")
            if message[0] == STOP:
                return
            self._evaluate(message[HEADER:].view(self.shape), Subset.read(message[1:HEADER].tolist()))

    def _send(self, command: float, subset: Subset, weights: Tensor) -> None:
        message = torch.cat([torch.tensor([command, *subset.message()], dtype=torch.float64), weights.flatten()])
        self._world.broadcast_(message, name="head.weights")

    def _evaluate(self, weights: Tensor, subset: Subset) -> tuple[Point, bool]:
        self.passes += 1
        mine = self._local_sums(weights, subset)
        self.exchanged_bytes += mine.numel() * mine.element_size() if self._world.size > 1 else 0
        sums = self._world.allreduce_sum(mine, name="head.loss")
        loss, count, curvature = sums[:3].tolist()
        stopped, raw = bool(sums[NUMBERS - 1]), sums[NUMBERS:].view(self.shape)
        gradient = torch.empty_like(raw)
        # d/dW of standardised features, from sums over raw ones.
        gradient[:, :-1] = (raw[:, :-1] - raw[:, -1:] * self._standard.offset) * self._standard.scale / count
        gradient[:, -1] = raw[:, -1] / count
        judges = sums[3 : NUMBERS - 1].view(2, 4)
        return Point(weights, loss / count, gradient, curvature / (count * self.shape[0]), judges), stopped

    def _local_sums(self, weights: Tensor, subset: Subset) -> Tensor:
        """Return this rank's sums: numbers, then the gradient for raw features and the intercept."""
        weight, bias = self._standard.folded(weights, mean=self._standard.offset)
        weight, bias = weight.float(), bias.float()[:, None]
        result = torch.zeros(NUMBERS + math.prod(self.shape), dtype=torch.float64)
        numbers, judges = result[:3], result[3 : NUMBERS - 1].view(2, 4)
        gradient = result[NUMBERS:].view(self.shape)
        result[NUMBERS - 1] = self._stop()
        for chunk in self._rows.chunks():
            fits, held = subset.of(chunk)
            if not (fits | held).any():
                continue
            features, fitted = self._standard.taken(chunk.features), fits.float()
            # Classes first: this order of the product is twice as fast for few classes.
            logits = torch.addmm(bias, weight, features.t())
            logs = logits.log_softmax(0)
            losses = -logs.gather(0, chunk.labels[None])[0]
            if held.any():
                right, anything = (logits.argmax(0) == chunk.labels).float(), -logs.mean(0)
                for row, mask in zip(judges, (held, held & ~chunk.mirrored), strict=True):
                    row += _sums(losses * mask, anything * mask, right * mask, mask.float())
            residuals = logs.exp_()
            bends = (residuals - residuals.square()).sum(0)
            numbers += _sums(losses * fitted, fitted, bends * fitted)
            residuals[chunk.labels, torch.arange(len(chunk.labels))] -= 1
            residuals *= fitted
            gradient[:, :-1] += residuals @ features
            gradient[:, -1] += residuals.sum(1, dtype=torch.float64)
        return result


def _sums(*columns: Tensor) -> Tensor:
    return torch.stack(columns).sum(1, dtype=torch.float64)


SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
LONGEST_SEARCH = 20
"""Evaluations along one direction."""
MEMORY_BYTES = 2**30
MOST_PAIRS = 20
ROUNDING = 1e-7
"""Relative rounding of a loss whose products are float32: smaller differences say nothing."""

Evaluate = Callable[[Tensor], Point]


class Pair(NamedTuple):
    """A step, the change of the gradient with penalty along it, and their product."""

    step: Tensor
    change: Tensor
    bend: float


def _pair(step: Tensor, change: Tensor, penalty: float) -> Pair:
    """Return the pair for `penalty`, from the change of the loss's gradient alone."""
    total = _with_penalty(change, step, penalty)
    return Pair(step, total, _dot(step, total))


class Lbfgs:
    """Minimises loss + penalty x |coefficients|^2; remembers pairs from one call to the next."""

    def __init__(self, covariance: Covariance) -> None:
        self._covariance = covariance
        self._pairs: deque[tuple[Tensor, Tensor]] = deque()

    def minimise(
        self,
        evaluate: Evaluate,
        point: Point,
        *,
        penalty: float,
        tolerance: float,
        most_steps: int,
        fewest_steps: int = 0,
    ) -> tuple[Point, int]:
        """Return the minimum, searched from `point`, and the steps; `evaluate` returns the loss without penalty.

        It stops where `relative_error` is at most `tolerance`, or after `most_steps`, but not before `fewest_steps`: a
        new penalty can leave the old solution within a loose tolerance.
        """
        steps = 0
        pairs = [_pair(step, change, penalty) for step, change in self._pairs]
        while steps < most_steps:
            if steps >= fewest_steps and relative_error(point, penalty) <= tolerance:
                break
            direction = self._direction(point, pairs, penalty)
            found = _line_search(evaluate, point, direction, penalty)
            if found is None:
                # Rounding hides what is left to gain along any direction.
                break
            self._remember(found.weights - point.weights, found.gradient - point.gradient)
            pairs = [*pairs, _pair(*self._pairs[-1], penalty)][-len(self._pairs) :]
            point = found
            steps += 1
        return point, steps

    def _remember(self, step: Tensor, change: Tensor) -> None:
        room = MEMORY_BYTES // (3 * step.numel() * step.element_size())
        while len(self._pairs) >= min(MOST_PAIRS, max(3, room)):
            self._pairs.popleft()
        self._pairs.append((step, change))

    def _direction(self, point: Point, pairs: list[Pair], penalty: float) -> Tensor:
        """Return the negative of the approximate inverse times the gradient, by the two loops of the book."""
        result = _with_penalty(point.gradient, point.weights, penalty)
        used = [pair for pair in pairs if pair.bend > 0]
        shares = []
        for pair in reversed(used):
            share = _dot(pair.step, result) / pair.bend
            result.sub_(pair.change, alpha=share)
            shares.append(share)
        result = self._covariance.inverse(result, curvature=point.curvature, penalty=penalty)
        if used:
            inverse = self._covariance.inverse(used[-1].change, curvature=point.curvature, penalty=penalty)
            result *= used[-1].bend / _dot(used[-1].change, inverse)
        for pair, share in zip(used, reversed(shares)):
            result.add_(pair.step, alpha=share - _dot(pair.change, result) / pair.bend)
        return result.neg_()


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


def _line_search(evaluate: Evaluate, start: Point, direction: Tensor, penalty: float) -> Point | None:
    """Return a point along `direction` that meets the strong Wolfe conditions; None when rounding hides all of them.

    The loss is convex: its slope rises along the line, so too far and too near bracket the good lengths.
    """
    before, slope = _objective(start, penalty), _dot(_with_penalty(start.gradient, start.weights, penalty), direction)
    if not slope < 0:
        return None
    near, near_slope = 0.0, slope
    far, far_slope = math.inf, math.nan
    length = 1.0
    for _ in range(LONGEST_SEARCH):
        point = evaluate(start.weights + length * direction)
        here = _dot(_with_penalty(point.gradient, point.weights, penalty), direction)
        gain = _objective(point, penalty) - before
        # Near the minimum rounding hides the gain; the slope still tells (Hager and Zhang, SIAM J. Optim. 16, 2005).
        falls = gain <= SUFFICIENT_DECREASE * length * slope or (
            gain <= ROUNDING * abs(before) and here <= (2 * SUFFICIENT_DECREASE - 1) * slope
        )
        if falls and abs(here) <= -CURVATURE * slope:
            return point
        if falls and here < 0:
            near, near_slope = length, here
        else:
            far, far_slope = length, here
        length = _between(near, near_slope, far, far_slope)
    return None


def _between(near: float, near_slope: float, far: float, far_slope: float) -> float:
    if math.isinf(far):
        return 2 * near
    width = far - near
    guess = near - near_slope * width / (far_slope - near_slope) if far_slope > 0 else math.nan
    middle = near + 0.5 * width
    return min(max(guess, near + 0.1 * width), far - 0.1 * width) if math.isfinite(guess) else middle


PENALTIES = tuple(10 ** (-half / 2) for half in range(17))
"""From 1 to 1e-8, two a decade."""
STRONGER = (10.0, 100.0, 1e3, 1e4)
"""Where even 1 is too weak, as where features say nothing of the labels."""
TOLERANCE = 0.1
FEW_ROWS, FOLDS = 400, 5
"""With at most so many rows, a tenth of them would be too few to choose by: all are, in so many parts."""
PATH_TOLERANCE = 2.0
"""While the penalty is chosen: solutions this close to the minimum have its held-out loss, nearly."""
LEAST_GAIN = 1e-3
"""The path ends where the held-out loss falls by a smaller part of itself, or rises."""
MOST_STEPS = 500
"""Of the minimiser, for one penalty."""


@dataclass(frozen=True)
class HeadFit(Solution):
    """A solved head, equal on all ranks bit for bit but for `used`; `error` bounds the distance of the coefficients."""

    weight: Tensor
    """(C, D) float32, for raw features."""
    bias: Tensor
    """(C,) float32."""
    coefficients: Tensor
    """(C, D + 1) float64, for standardised features; the last column is the intercept, of mean 0."""
    used: Tensor
    """(N,) bool, which of this rank's rows, in their order, were fitted."""


def fit_softmax(
    rows: Rows,
    *,
    classes: int,
    world: World,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = MOST_STEPS,
    trained: bool = False,
    compare_mirrored: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> HeadFit | None:
    """Return the head that minimises the penalised loss over the rows of all ranks, equal on all of them. Collective.

    None where some rank wants to stop before.

    Args:
        rows: this rank's rows; there may be none.
        classes: C, at least 2.
        world: the ranks.
        penalties: decreasing, above 0; with one, nothing is chosen.
        tolerance: relative distance from the minimum, see `relative_error`; on the path it is `PATH_TOLERANCE`.
        most_steps: limit of the minimiser for one penalty; `HeadFit.converged` tells whether it sufficed.
        trained: whether the network was trained on the rows that are not held out, whose features know their labels:
            then only held-out rows choose, also of few.
        compare_mirrored: whether mirror images are left out where the head is better without them.
        stop: asked in every pass; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, or penalties that are not decreasing and above 0.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or values != sorted(set(values), reverse=True):
        raise UsageError(f"penalties ({values}) must be above 0 and decreasing, at least one")
    prepared = prepare(rows, world=world)
    standard = prepared.standard
    check_choice(standard.held_out, len(values))
    loss = SoftmaxLoss(prepared.rows, standard, classes=classes, world=world, stop=stop)
    counts = counts_of(prepared, world=world)
    if world.rank > 0:
        loss.follow()
        return with_used(world.broadcast_object(cast("HeadFit | None", None), name="head.fit"), prepared)
    found: HeadFit | None = None
    with suppress(Stopped):
        choice = Choice(values[0], loss.zero(), Lbfgs(covariance(prepared.product)))
        if len(values) > 1:
            folds = FOLDS if standard.count <= FEW_ROWS and not trained else 1
            stronger = STRONGER if values == list(PENALTIES) else ()
            choosing = Choosing(loss, covariance(prepared.product), values, counts, folds, most_steps, stronger)
            choice = choosing.choose(compare_mirrored=compare_mirrored and counts.plain_samples == counts.samples)
        found = solution(choice, loss, prepared, counts, tolerance=tolerance, most_steps=most_steps)
    loss.stop()
    # Folding too is arithmetic that processors may round differently: rank 0's head is everybody's.
    return with_used(world.broadcast_object(found, name="head.fit"), prepared)


def solution(
    choice: Choice, loss: SoftmaxLoss, prepared: Prepared, counts: Counts, *, tolerance: float, most_steps: int
) -> HeadFit:
    """Return the head fitted to all rows with the chosen penalty. Rank 0 calls this; see `SoftmaxLoss.at`."""
    standard, subset = prepared.standard, Subset(mirrored=choice.mirror is None or choice.mirror.taken)
    evaluate = partial(loss.at, subset=subset)
    point, steps = choice.search.minimise(
        evaluate, evaluate(choice.start), penalty=choice.penalty, tolerance=tolerance, most_steps=most_steps
    )
    coefficients, error = point.weights.clone(), relative_error(point, choice.penalty)
    # The same number added to every intercept changes no probability.
    coefficients[:, -1] -= coefficients[:, -1].mean()
    weight, bias = standard.folded(coefficients, mean=standard.mean)
    return HeadFit(
        choice.penalty,
        choice.trials,
        point.loss,
        standard.count if subset.mirrored else counts.plain_rows,
        steps,
        loss.passes + prepared.passes,
        error,
        error <= tolerance,
        loss.exchanged_bytes,
        weight.float(),
        bias.float(),
        coefficients,
        prepared.used,
        mirror=choice.mirror,
        left_out=prepared.left_out,
    )


def with_used(fit: HeadFit | None, prepared: Prepared) -> HeadFit | None:
    """Return the fit with this rank's `used`."""
    if fit is None:
        return None
    used = prepared.used.clone()
    if fit.mirror is not None and not fit.mirror.taken:
        used[prepared.used] = ~prepared.mirrored
    return replace(fit, used=used)


class Counts(NamedTuple):
    """Of all ranks."""

    samples: int
    held_out: int
    """Samples."""
    plain_samples: int
    """With a row that is no mirror image."""
    plain_rows: int


def counts_of(prepared: Prepared, *, world: World) -> Counts:
    """Return how many samples and rows there are. Collective."""
    samples, plain = prepared.samples, ~prepared.mirrored
    parts = (samples.unique(), samples[prepared.held_out].unique(), samples[plain].unique(), samples[plain])
    mine = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return Counts(*world.allreduce_sum(mine, name="head.counts").tolist())


@dataclass(frozen=True)
class Choice:
    """A penalty, where to start with it, and what was tried."""

    penalty: float
    start: Tensor
    search: Lbfgs
    trials: tuple[PenaltyTrial, ...] = ()
    points: tuple[Point, ...] = ()
    """Of each fold, the solution with this penalty."""
    mirror: MirrorTrial | None = None


@dataclass(frozen=True)
class Choosing:
    """Chooses by rows that were not fitted. To be used on rank 0, while the others are in `SoftmaxLoss.follow`."""

    loss: SoftmaxLoss
    covariance: Covariance
    penalties: Sequence[float]
    counts: Counts
    folds: int
    """With 1 the held-out rows judge, else all."""
    most_steps: int
    stronger: Sequence[float] = ()
    """Tried where the strongest of `penalties` is worse than a head that says nothing."""

    def choose(self, *, compare_mirrored: bool) -> Choice:
        """Return the best penalty; with `compare_mirrored`, without mirror images where these do not help."""
        choice = self.path(mirrored=True)
        if not compare_mirrored:
            return choice
        # Where all penalties are too weak with mirror images, the one that was taken says nothing of others.
        other = self.path(mirrored=False) if choice.penalty >= self.penalties[0] else None
        mirror = self.trial(choice.points, other.points if other else self.nearby(choice))
        if not mirror.taken:
            choice = other or self.path(mirrored=False)
        return replace(choice, mirror=mirror)

    def nearby(self, choice: Choice) -> list[Point]:
        """Return each fold's solution without mirror images with the penalty of a choice, found from its solutions."""
        found = []
        for subset, point in zip(self.subsets(mirrored=False), choice.points, strict=True):
            # Evaluated anew: the loss and gradient of the point are of other rows.
            start = self.loss.at(point.weights, subset)
            found.append(self.minimum(Lbfgs(self.covariance), subset, start, choice.penalty)[0])
        return found

    def path(self, *, mirrored: bool) -> Choice:
        """Return the penalty by which the rows that judge have the least loss, from strong to where that falls no more.

        The trials are of held-out rows.
        """
        subsets = self.subsets(mirrored=mirrored)
        searches, start = [Lbfgs(self.covariance) for _ in subsets], self.loss.zero()
        nothing = tuple(self.loss.at(start, subset) for subset in subsets)
        tried: list[tuple[float, float, tuple[Point, ...]]] = []
        trials: list[PenaltyTrial] = []

        def attempt(penalty: float, starts: tuple[Point, ...]) -> float:
            found = [self.minimum(*parts, penalty) for parts in zip(searches, subsets, starts, strict=True)]
            solved, steps = tuple(point for point, _ in found), found[0][1]
            trials.append(PenaltyTrial(penalty, solved[0].held_out_loss, solved[0].held_out_accuracy, steps))
            tried.append((self.judged(solved), penalty, solved))
            return tried[-1][0]

        # Of few samples a strong penalty may be worse than no head: it leaves little but the intercepts, which say of
        # each sample that its class is rarer among the others. So the first solution is compared with the second.
        least, taken = math.inf, 0
        for place, penalty in enumerate(self.penalties):
            judged = attempt(penalty, tried[-1][2] if tried else nothing)
            if judged > (1 - LEAST_GAIN) * least:
                break
            least, taken = judged, place
        if least > self.judged(nothing):
            # Every penalty makes a head that is too sure of what says little.
            for penalty in self.stronger:
                if attempt(penalty, nothing) < self.judged(nothing):
                    break
            taken = min(range(len(tried)), key=lambda place: tried[place][0])
        _, chosen, best = tried[taken]
        return Choice(chosen, best[0].weights, searches[0], tuple(trials), best)

    def subsets(self, *, mirrored: bool) -> list[Subset]:
        """Return what is fitted and what judges, for each fold."""
        return [Subset(fold, self.folds, mirrored) for fold in range(self.folds)]

    def minimum(self, search: Lbfgs, subset: Subset, point: Point, penalty: float) -> tuple[Point, int]:
        """Return nearly the solution with a penalty, searched from `point`, and the steps."""
        return search.minimise(
            partial(self.loss.at, subset=subset),
            point,
            penalty=penalty,
            tolerance=PATH_TOLERANCE,
            most_steps=self.most_steps,
            fewest_steps=1,
        )

    def judged(self, points: Sequence[Point], *, plain: bool = False) -> float:
        """Return the mean loss over the rows that judge, `plain` of those that are no mirror images; see `doubt`."""
        sums = torch.stack([point.judges[int(plain)] for point in points]).sum(0)
        losses, anything, _, count = (float(number) for number in sums)
        classes = self.loss.shape[0]
        spread = doubt(self.counts.samples if self.folds > 1 else self.counts.held_out) * classes / (classes - 1)
        return ((1 - spread) * losses + spread * anything) / count

    def trial(self, points: Sequence[Point], without: Sequence[Point]) -> MirrorTrial:
        """Return what the same rows, no mirror images, say of solutions with mirror images, and without."""
        rights = [sum(float(point.judges[1, 2]) for point in some) for some in (points, without)]
        count = sum(float(point.judges[1, 3]) for point in points)
        return MirrorTrial(
            self.judged(points, plain=True),
            self.judged(without, plain=True),
            rights[0] / count,
            rights[1] / count,
            self.counts.samples if self.folds > 1 else self.counts.held_out,
        )
