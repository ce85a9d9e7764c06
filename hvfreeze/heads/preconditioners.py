"""Preconditioners for conjugate gradients: the same problem with few centres, by Cholesky factorisation.

With centres C, K_C' W K_C + penalty K_CC is the matrix of kernel ridge regression with weights for centres alone (Rudi,
Carratino and Rosasco, "FALKON: An Optimal Large Scale Kernel Method", NIPS 2017). Its factor from a sample of the rows
preconditions a problem with as many centres. By the Woodbury identity, the factor from few centres (Williams and
Seeger, NIPS 2000) preconditions the problem in which all rows are centres.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvfreeze.heads.kernel_products import TILE, gaussian

CENTRES = 1024
"""Number of Nystrom centres of the preconditioner, if all rows are centres of the problem."""
JITTER = 1e-7
"""Share of the diagonal's mean added to the diagonal, for equal centres; times 10 until the factorisation succeeds."""


def cholesky(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a positive definite matrix, (M, M) float64, up to rounding.

    Adds to the diagonal until the factorisation succeeds; overwrites `matrix`.
    """
    mean, added = float(matrix.diagonal().mean()), JITTER
    matrix.diagonal().add_(JITTER * mean)
    while True:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
        matrix.diagonal().add_(9 * added * mean)
        added *= 10


def centres_inverse(centres: Tensor, normal: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies by (`normal` + penalty K_CC)^-1, for `normal`, (M, M), about K_C' W K_C."""
    factor = cholesky(normal.double().add_(gaussian(centres, centres), alpha=penalty))
    return lambda vectors: torch.cholesky_solve(vectors, factor)


class NystromInverse:
    """The Nystrom approximation of (S K S + penalty)^-1 for the Gram matrix K, (N, N), and the diagonal S of root
    weights.

    With K about C K_CC^-1 C' + rest, where C has the kernel values of rows and centres, and delta = penalty + rest, it
    is (1 - S C (delta K_CC + C' S^2 C)^-1 C' S) / delta. Each S has its own factor.
    """

    def __init__(self, rows: Tensor, roots: Sequence[Tensor], penalty: float, *, centres: int = CENTRES) -> None:
        """Take the projected rows, (N, K) float32, each S, (N,) float64 with 0 for excluded rows, and the penalty.

        Not a collective. The first S includes all rows.
        """
        chosen = rows[:: -(-len(rows) // centres)]
        # Allocated at once, like in `CentreProducts.answers`.
        self._values = torch.empty(len(rows), len(chosen))
        normals = [torch.zeros(len(chosen), len(chosen), dtype=torch.float64) for _ in roots]
        weights = [root.square().float() for root in roots]
        for start in range(0, len(rows), TILE):
            part = slice(start, start + TILE)
            tile = self._values[part].copy_(gaussian(rows[part], chosen))
            for number, normal in enumerate(normals):
                # Later ones differ from the first only in the excluded rows.
                weight = weights[number][part] - (weights[0][part] if number else 0)
                some = weight != 0
                normal += tile[some].t() @ (tile[some] * weight[some, None])
        core = gaussian(chosen.double(), chosen.double())
        explained = torch.cholesky_solve(normals[0], cholesky(core.clone())).trace() / weights[0].sum()
        self._delta = penalty + max(0.0, 1 - float(explained))
        self._roots = roots
        self._factors = [
            cholesky(self._delta * core + normals[0] + (normal if number else 0))
            for number, normal in enumerate(normals)
        ]

    def times(self, vectors: Tensor) -> Tensor:
        """Return the product with `vectors`, (N, C) float64; each S has an equal share of the columns, in order."""
        shares = vectors.chunk(len(self._roots), 1)
        scaled = torch.cat([(root[:, None] * share).float() for root, share in zip(self._roots, shares)], 1)
        inside = (self._values.t() @ scaled).double().chunk(len(self._roots), 1)
        solved = [torch.cholesky_solve(share, factor) for share, factor in zip(inside, self._factors)]
        beside = (self._values @ torch.cat(solved, 1).float()).chunk(len(self._roots), 1)
        explained = torch.cat([root[:, None] * share for root, share in zip(self._roots, beside)], 1)
        return (vectors - explained) / self._delta
