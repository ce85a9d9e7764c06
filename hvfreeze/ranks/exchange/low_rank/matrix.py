"""One matrix of low rank: its products with thin ones, in runs of rows that stay in the processor.

A matrix is too large for the processor's caches, so each pass over it is a pass over memory. What is done to its
entries is done run by run, and the views that this takes are made once: they take as long as small products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_TOGETHER = 16
WRITTEN_AT_ONCE = 2**18
"""Elements, one mebibyte: what is written is still in the processor when it is read again; less makes more calls."""
PROJECTED_AT_ONCE = 2**16
"""Elements, a quarter of a mebibyte: so little is multiplied as it lies, more is copied into another order first."""


@dataclass
class Matrix:
    """One parameter's share of the buffers, all of them views: n x m, but `left` (P^T) r x n and `right` (Q^T) r x m.

    Both thin ones lie row by row, and long rows are what products with few columns are fast for.
    """

    error: Tensor
    """M while a step is under way."""
    error_shaped: Tensor
    """The same with the parameter's shape and strides, as is `gradient_shaped`."""
    gradient: Tensor
    gradient_shaped: Tensor
    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        """Make the views of all runs of rows."""
        self.basis = torch.zeros_like(self.left).t()
        """P of the last step, n x r with orthonormal columns."""
        self.rows, few = (run_of(self.error.shape[1], size) for size in (WRITTEN_AT_ONCE, PROJECTED_AT_ONCE))
        errors, lefts = self.error.split(self.rows), self.left.split(self.rows, dim=1)
        shaped, transposed = self.error_shaped.split(self.rows), [error.t() for error in errors]
        self._added = list(zip(shaped, transposed, lefts, strict=True))
        self._projected = list(zip(self.basis.t().split(few, dim=1), self.error.split(few), strict=True))
        bases, gradients = self.basis.split(self.rows), self.gradient.split(self.rows)
        self._decompressed = list(zip(bases, gradients, errors, strict=True))

    def add(self, gradient: Tensor | None) -> None:
        """Let `error` be M = gradient + error, None for no gradient, and `left` be (M Q)^T."""
        parts: Sequence[Tensor | None] = [None] * len(self._added) if gradient is None else gradient.split(self.rows)
        for part, (error, transposed, left) in zip(parts, self._added, strict=True):
            if part is not None:
                error.add_(part)
            torch.mm(self.right, transposed, out=left)

    def project(self) -> None:
        """Let `basis` be P, made orthonormal, and `right` be (M^T P)^T."""
        self.basis.copy_(torch.linalg.qr(self.left.t()).Q)
        self.right.zero_()
        for basis, error in self._projected:
            self.right.addmm_(basis, error)

    def decompress(self) -> None:
        """Let `gradient` be P Q^T, and `error` what that leaves out."""
        for basis, gradient, error in self._decompressed:
            error.sub_(put_product(basis, self.right, gradient))


def run_of(m: int, elements: int) -> int:
    """Return how many rows of m have about so many elements: a multiple of what products are fast for."""
    return max(1, elements // m // ROWS_TOGETHER) * ROWS_TOGETHER


def put_product(left: Tensor, right: Tensor, into: Tensor) -> Tensor:
    """Let `into` be left @ right, and return it."""
    # With few columns, adding to zeros takes less time than writing over what was there.
    return into.zero_().addmm_(left, right)
