"""Conjugate gradients for many right sides and penalties at once: a step is one product with the matrix for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.heads.nystrom import Covariance

MOST_STEPS = 200


@dataclass(frozen=True)
class Solved:
    """What was found.

    Attributes:
        vectors: X, (N, M) float64.
        left: what is missing of the right sides, B - (K + penalty) X, (N, M) float64.
        steps: that were made.
        error: the largest |left| of a column as a part of its right side.
    """

    vectors: Tensor
    left: Tensor
    steps: int
    error: float


def solve(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    penalties: Tensor,
    *,
    fitted: Tensor,
    leading: Covariance,
    tolerance: float,
    most_steps: int,
) -> Solved:
    """Return X with (K + penalty) X = B, by column, where the rows that are not fitted are left out of K, X and B.

    Args:
        times: gives K V for V, (N, M).
        right: B, (N, M) float64.
        penalties: (M,) float64, above 0.
        fitted: (N,) bool.
        leading: eigenvectors and eigenvalues of K, a few of the largest, for the preconditioner.
        tolerance: that `Solved.error` is to reach.
        most_steps: after which it ends all the same.
    """
    mask = fitted.double()[:, None]
    least = leading.values[-1] + penalties
    correction = 1 / (leading.values[:, None] + penalties) - 1 / least

    # What is nearly the inverse need not be known to more digits.
    directions, factors = leading.directions.float(), correction.float()

    def inverse(vectors: Tensor) -> Tensor:
        inside = directions @ (factors * (directions.t() @ vectors.float()))
        return mask * (vectors / least + inside)

    def product(vectors: Tensor) -> Tensor:
        return mask * (times(vectors).double() + penalties * vectors)

    right = mask * right
    size = right.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    found, left = torch.zeros_like(right), right.clone()
    direction = inverse(left)
    slope = (left * direction).sum(0)
    steps, error = 0, float((left.norm(dim=0) / size).max())
    while error > tolerance and steps < most_steps:
        moved = product(direction)
        length = _ratio(slope, (direction * moved).sum(0))
        found, left = found + length * direction, left - length * moved
        closer = inverse(left)
        before, slope = slope, (left * closer).sum(0)
        direction = closer + _ratio(slope, before) * direction
        steps, error = steps + 1, float((left.norm(dim=0) / size).max())
    return Solved(found, left, steps, error)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return the quotient, 0 where a column is solved and nothing is left to divide by."""
    return torch.where(below > 0, above / below, 0.0)
