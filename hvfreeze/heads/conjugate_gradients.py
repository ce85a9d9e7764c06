"""Preconditioned conjugate gradients for several right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Solved(NamedTuple):
    """The result of the solver."""

    vectors: Tensor
    """Approximate X, (N, C) float64."""
    residual: Tensor
    """Residual B - A X, (N, C) float64."""
    steps: int
    error: float
    """Estimated largest relative error of a column, in the norm of A."""


def solve(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    *,
    inverse: Callable[[Tensor], Tensor],
    tolerance: float,
    most_steps: int,
    report: Callable[[float, float], None],
) -> Solved:
    """Return X with A X = B, (N, C), where A is symmetric and positive definite; columns are independent.

    Args:
        product: returns A V for V, (N, C) float64; A may differ between columns.
        right: B, (N, C) float64.
        inverse: the preconditioner, returns about A^-1 V; also symmetric and positive definite.
        tolerance: limit of `Solved.error`, which uses `inverse` instead of A^-1.
        most_steps: limit of the iterations.
        report: called with the current error and the tolerance before each product.
    """

    def ratio(above: Tensor, below: Tensor) -> Tensor:
        # 0 for a converged column, without a division by 0.
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
