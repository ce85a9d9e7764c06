"""Preconditioned conjugate gradients for many right sides at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Solved(NamedTuple):
    """Where the solver ended."""

    vectors: Tensor
    """X, (N, C) float64."""
    residual: Tensor
    """B - A X, (N, C) float64."""
    steps: int
    error: float
    """About the largest distance of a column from its solution, as a share of it, in the norm of A."""


def solve(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    *,
    inverse: Callable[[Tensor], Tensor],
    tolerance: float,
    most_steps: int,
    report: Callable[[float, float], None],
) -> Solved:
    """Return X with A X = B, for A symmetric and positive; each column is solved by itself.

    Args:
        product: returns A V for V, (N, C) float64; A may be another one for each column.
        right: B, (N, C) float64.
        inverse: returns about A^-1 V; symmetric and positive too.
        tolerance: for `Solved.error`, which is measured with `inverse` in place of A^-1.
        most_steps: of the solver.
        report: takes the error so far and the tolerance, before each product.
    """

    def ratio(above: Tensor, below: Tensor) -> Tensor:
        # 0 where a column is solved and nothing is left to divide by.
        return torch.where(below > 0, above / below, 0.0)

    found, residual, steps = torch.zeros_like(right), right.clone(), 0
    direction = inverse(residual)
    slope = (residual * direction).sum(0)
    whole, error = slope, 1.0 if bool((slope > 0).any()) else 0.0
    while error > tolerance and steps < most_steps:
        report(error, tolerance)
        moved = product(direction)
        length = ratio(slope, (direction * moved).sum(0))
        found += length * direction
        residual -= length * moved
        closer = inverse(residual)
        before, slope = slope, (residual * closer).sum(0)
        direction = closer + ratio(slope, before) * direction
        steps, error = steps + 1, float(ratio(slope, whole).clamp(min=0).sqrt().max())
    return Solved(found, residual, steps, error)
