"""L-BFGS for a convex loss with a quadratic penalty, which may change between calls without losing what was learnt.

Nocedal and Wright, Numerical Optimization (2006), algorithm 7.4, with a strong Wolfe line search. Each evaluation is a
pass over all rows, so memory and arithmetic here are spent freely to save passes: steps start from an approximate
inverse of the second derivative, and pairs (step s, change y of the gradient) are kept for the loss alone. What the
penalty adds to its second derivative is known, so a pair is right for every penalty: y + 2 penalty s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.heads.linear.loss import Point
from hvfreeze.heads.nystrom import Covariance

SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
LONGEST_SEARCH = 20
"""Evaluations along one direction."""
MEMORY_BYTES = 2**30
MOST_PAIRS = 20
ROUNDING = 1e-7
"""Relative rounding of a loss whose products are float32: smaller differences say nothing."""

Evaluate = Callable[[Tensor], Point]


@dataclass(frozen=True)
class Minimum:
    """Where the minimiser stopped.

    Attributes:
        point: the loss without penalty there.
        steps: steps taken.
        error: gradient's norm / (2 penalty x norm of the coefficients): bounds the coefficients' distance from the
            minimum, relative to their norm, because the penalty alone bends by 2 penalty.
        converged: whether `error` reached the tolerance.
    """

    point: Point
    steps: int
    error: float
    converged: bool


@dataclass(frozen=True)
class Pair:
    """A step, the change of the gradient with penalty along it, and their product."""

    step: Tensor
    change: Tensor
    bend: float

    @classmethod
    def of(cls, step: Tensor, change: Tensor, penalty: float) -> Pair:
        """Return the pair for `penalty`, from the change of the loss's gradient alone."""
        total = _with_penalty(change, step, penalty)
        return cls(step, total, _dot(step, total))


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
    ) -> Minimum:
        """Return the minimum, searched from `point`.

        Args:
            evaluate: gives the loss without penalty at weights, (C, D + 1).
            point: the start; it must come from the same loss.
            penalty: above 0.
            tolerance: stop when the gradient's norm is at most `tolerance` x 2 penalty x norm of the coefficients. The
                coefficients are then within `tolerance` of the minimum's, relative to their norm.
            most_steps: stop after as many steps, not converged.
            fewest_steps: take as many in any case; a new penalty can leave the old solution within a loose tolerance.
        """
        steps = 0
        pairs = [Pair.of(step, change, penalty) for step, change in self._pairs]
        while steps < most_steps:
            if steps >= fewest_steps and relative_error(point, penalty) <= tolerance:
                break
            direction = self._direction(point, pairs, penalty)
            found = _search(evaluate, point, direction, penalty)
            if found is None:
                # Rounding hides what is left to gain along any direction.
                break
            self._remember(found.weights - point.weights, found.gradient - point.gradient)
            pairs = [*pairs, Pair.of(*self._pairs[-1], penalty)][-len(self._pairs) :]
            point = found
            steps += 1
        error = relative_error(point, penalty)
        return Minimum(point, steps, error, error <= tolerance)

    def _remember(self, step: Tensor, change: Tensor) -> None:
        room = MEMORY_BYTES // (3 * step.numel() * step.element_size())
        while len(self._pairs) >= min(MOST_PAIRS, max(3, room)):
            self._pairs.popleft()
        self._pairs.append((step, change))

    def _direction(self, point: Point, pairs: list[Pair], penalty: float) -> Tensor:
        """Return the negative of the approximate inverse times the gradient, by the two loops of the book."""
        result = total_gradient(point, penalty)
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


def total_gradient(point: Point, penalty: float) -> Tensor:
    """Return the gradient of loss + penalty x |coefficients|^2; the intercept, the last column, is not penalised."""
    return _with_penalty(point.gradient, point.weights, penalty)


def relative_error(point: Point, penalty: float) -> float:
    """Return `Minimum.error` at `point`; infinite where all coefficients are 0 and the gradient is not."""
    gradient = float(total_gradient(point, penalty).norm())
    coefficients = float(point.weights[:, :-1].norm())
    if gradient == 0:
        return 0.0
    return gradient / (2 * penalty * coefficients) if coefficients > 0 else math.inf


def _with_penalty(gradient: Tensor, weights: Tensor, penalty: float) -> Tensor:
    result = gradient.clone()
    result[:, :-1].add_(weights[:, :-1], alpha=2 * penalty)
    return result


def _objective(point: Point, penalty: float) -> float:
    return point.loss + penalty * float(point.weights[:, :-1].square().sum())


def _dot(first: Tensor, second: Tensor) -> float:
    return float(torch.dot(first.flatten(), second.flatten()))


def _search(evaluate: Evaluate, start: Point, direction: Tensor, penalty: float) -> Point | None:
    """Return a point along `direction` that meets the strong Wolfe conditions; None when rounding hides all of them.

    The loss is convex, so its slope rises along the line: what is too far and what is too near bracket the good
    lengths, and the secant of the slopes guesses the next one.
    """
    before, slope = _objective(start, penalty), _dot(total_gradient(start, penalty), direction)
    if not slope < 0:
        return None
    near, near_slope = 0.0, slope
    far, far_slope = math.inf, math.nan
    length = 1.0
    for _ in range(LONGEST_SEARCH):
        point = evaluate(start.weights + length * direction)
        here = _dot(total_gradient(point, penalty), direction)
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
