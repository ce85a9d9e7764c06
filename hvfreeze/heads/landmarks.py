"""What some of its rows tell of a matrix of likenesses: what conjugate gradients with it are preconditioned by.

A Nystrom approximation from some of the points, evenly spread (Williams and Seeger, NIPS 2000). It needs no product
with the matrix itself. What is left of the matrix is taken to be the same in all other directions: points of hundreds
of numbers have likenesses whose small eigenvalues lie close together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.heads.gram import TILE, gaussian

LANDMARKS, MORE_LANDMARKS, MORE_FROM = 1024, 2048, 16_384
"""Points that the approximation is made of, and of so many points on: products are then dear, and these save some."""
SEEN = 4
"""Of so many points one tells which directions are the largest: all would take four times as long, and save no step."""
JITTER, LEAST = 1e-5, 1e-3
"""Added to the diagonal of the landmarks' likenesses, so that equal points do no harm; and the least mean of the
eigenvalues that are left, which is divided by."""


def landmarks_of(rows: int) -> int:
    """Return how many points the approximation for so many rows is made of, about."""
    return LANDMARKS if rows < MORE_FROM else MORE_LANDMARKS


class Landmarks(NamedTuple):
    """Some of the points; likenesses to them times `matrix` are F, (N, L), with K about F F'."""

    points: Tensor
    """(L, K)."""
    matrix: Tensor
    """(L, L) float32."""

    @classmethod
    def among(cls, points: Tensor, count: int) -> Landmarks:
        """Return about `count` of the points, (N, K) float32."""
        chosen = points[:: -(-len(points) // count)]
        core = gaussian(chosen.double(), chosen.double())
        core.diagonal().add_(JITTER)
        root = torch.linalg.cholesky(core)
        whole = torch.eye(len(root), dtype=torch.float64)
        return cls(chosen, torch.linalg.solve_triangular(root, whole, upper=False).t().float())

    def largest(self, points: Tensor, directions: int) -> tuple[Tensor, Tensor]:
        """Return (R,) eigenvalues of F' F for `points`, decreasing, and (L, R) float64 directions in F's columns."""
        squares = torch.zeros(len(self.points), len(self.points), dtype=torch.float64)
        for part in points.split(TILE):
            features = gaussian(part, self.points) @ self.matrix
            squares += features.t() @ features
        values, turned = torch.linalg.eigh(squares)
        values, turned = values.flip(0)[:directions], turned.flip(1)[:, :directions]
        kept = values > 1e-6 * values[0]
        return values[kept], turned[:, kept]

    def seen_in(self, points: Tensor, turned: Tensor) -> Tensor:
        """Return F `turned`, (N, R) float32, for `points`, (N, K)."""
        back = self.matrix @ turned.float()
        # Taken at once, as `CentreProducts.answers` are.
        seen = torch.empty(len(points), back.shape[1])
        for part, given in zip(points.split(TILE), seen.split(TILE)):
            torch.matmul(gaussian(part, self.points), back, out=given)
        return seen


class Factor:
    """B and a number, the rest, with K about B B' + rest for K = exp(-|z_i - z_j|^2), (N, N)."""

    def __init__(self, points: Tensor) -> None:
        """Take z, (N, K) float32. Not a collective."""
        count = landmarks_of(len(points))
        landmarks = Landmarks.among(points, count)
        _, turned = landmarks.largest(points[::SEEN], count // 2)
        self._columns = landmarks.seen_in(points, turned)
        # The diagonal of K is all ones.
        self._rest = max(LEAST, 1 - float(self._columns.square().sum()) / len(points))
        self._whole = self._columns.t() @ self._columns
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def inverse(self, penalties: Tensor, *, fitted: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what multiplies (N, C) float64 by about (K + penalty)^-1, by column.

        Rows that are not fitted are left out of K, not of its inverse, which is another matrix: with what the inverse
        of all K says of the others, conjugate gradients take three times as many steps. Vectors are 0 there.

        Args:
            penalties: (C,) float64, above 0.
            fitted: (N, 1) or (N, C) bool.
        """
        masks, which = fitted.unique(dim=1, return_inverse=True)
        which, added = which.expand(len(penalties)), self._rest + penalties
        groups = [(which == number, *self._eigenvalues(mask)) for number, mask in enumerate(masks.unbind(1))]
        places = fitted.double()

        def apply(vectors: Tensor) -> Tensor:
            # With a = rest + penalty: (B B' + a)^-1 = (1 - B (B'B + a)^-1 B') / a.
            inside = (self._columns.t() @ vectors.float()).double()
            for some, values, turned in groups:
                scaled = (turned.t() @ inside[:, some]) / (values[:, None] + added[some])
                inside[:, some] = turned @ scaled
            beside = (self._columns @ inside.float()).double()
            return vectors.sub(beside).div_(added).mul_(places)

        return apply

    def _eigenvalues(self, fitted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues and eigenvectors of B'B for the rows `fitted`, (N,) bool."""
        for mask, values, turned in self._parts:
            if mask.equal(fitted):
                return values, turned
        others = self._columns[~fitted]
        values, turned = torch.linalg.eigh((self._whole - others.t() @ others).double())
        self._parts.append((fitted, values.clamp(min=0), turned))
        return self._parts[-1][1:]


class Leading(NamedTuple):
    """The largest eigenvalues of a symmetric matrix, (N, N), and the mean of the others."""

    directions: Tensor
    """(N, R) float64, orthonormal."""
    values: Tensor
    """(R,) float64, decreasing."""
    rest: float

    def apply(self, factors: Tensor, rest: Tensor, vectors: Tensor) -> Tensor:
        """Return the matrix with other eigenvalues, times `vectors`, (N, C) float64.

        `factors`, (R, 1), are those of `directions`, and `rest`, (1,), is that of all others.
        """
        inside = self.directions @ ((factors - rest) * (self.directions.t() @ vectors))
        return inside.add_(rest * vectors)


DIRECTIONS = 512
"""Eigenvalues that are used: the smaller ones are less exact."""


def leading(points: Tensor, *, landmarks: int = MORE_LANDMARKS) -> Leading:
    """Return the largest eigenvalues of exp(-|z_i - z_j|^2) for `points`, (N, K) float32. Not a collective.

    For what multiplies by the square of the matrix, where its largest eigenvalues must not leak into others.
    `landmarks` is how many points they are found from.
    """
    some = Landmarks.among(points, landmarks)
    values, turned = some.largest(points, DIRECTIONS)
    directions = torch.linalg.qr(some.seen_in(points, turned / values.sqrt()).double()).Q
    # The diagonal is all ones.
    rest = (len(points) - float(values.sum())) / max(1, len(points) - len(values))
    return Leading(directions, values, min(max(rest, LEAST), float(values[-1])))
