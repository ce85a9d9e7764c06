"""A few of the largest eigenvalues of a matrix of likenesses: what conjugate gradients with it are preconditioned by.

A Nystrom approximation from some of the points, evenly spread (Williams and Seeger, NIPS 2000). It needs no product
with the matrix itself. What is left of the matrix is taken to be the same in all other directions: points of hundreds
of numbers have likenesses whose small eigenvalues lie close together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.heads.gram import TILE, gaussian

LANDMARKS, MORE_LANDMARKS, MORE_FROM = 1024, 2048, 16_384
"""Points that the approximation is made of, and of so many points on: products are then dear, and these save some."""
DIRECTIONS = 512
"""Eigenvalues that are used: the smaller ones are less exact."""
JITTER, LEAST = 1e-5, 1e-3
"""Added to the diagonal of the landmarks' likenesses, so that equal points do no harm; and the least mean of the
eigenvalues that are left, which is divided by."""


class Leading(NamedTuple):
    """The largest eigenvalues of a symmetric matrix, (N, N), and the mean of the others."""

    directions: Tensor
    """(N, R) float32, about orthonormal; or float64, orthonormal."""
    values: Tensor
    """(R,) float64, decreasing."""
    rest: float

    def apply(self, factors: Tensor, rest: Tensor, vectors: Tensor) -> Tensor:
        """Return the matrix with other eigenvalues, times `vectors`, (N, C) float64.

        `factors`, (R, C) or (R, 1), are those of `directions`, and `rest`, (C,) or (1,), is that of all others.
        """
        kind = self.directions.dtype
        inside = self.directions @ ((factors - rest).to(kind) * (self.directions.t() @ vectors.to(kind)))
        return inside.double().add_(rest * vectors)


def leading(points: Tensor, *, landmarks: int | None = None, exact: bool = False) -> Leading:
    """Return the largest eigenvalues of exp(-|z_i - z_j|^2) for `points`, (N, K) float32. Not a collective.

    `landmarks` is how many points they are found from. `exact` is for what multiplies by the square of the matrix: its
    largest eigenvalues must then not leak into others.
    """
    count = len(points)
    landmarks = landmarks or (LANDMARKS if count < MORE_FROM else MORE_LANDMARKS)
    chosen = points[:: -(-count // landmarks)]
    core = gaussian(chosen.double(), chosen.double())
    core.diagonal().add_(JITTER)
    root = torch.linalg.cholesky(core)
    inverse = torch.linalg.solve_triangular(root, torch.eye(len(root), dtype=torch.float64), upper=False).t().float()
    squares = torch.zeros_like(core)
    for part in points.split(TILE):
        features = gaussian(part, chosen) @ inverse
        squares += features.t() @ features
    values, turned = torch.linalg.eigh(squares)
    values, turned = values.flip(0)[:DIRECTIONS], turned.flip(1)[:, :DIRECTIONS]
    kept = values > 1e-6 * values[0]
    values = values[kept]
    back = inverse @ (turned[:, kept] / values.sqrt()).float()
    directions = torch.cat([gaussian(part, chosen) @ back for part in points.split(TILE)])
    if exact:
        directions = torch.linalg.qr(directions.double()).Q
    # The diagonal is all ones.
    rest = (count - float(values.sum())) / max(1, count - len(values))
    return Leading(directions, values, min(max(rest, LEAST), float(values[-1])))
