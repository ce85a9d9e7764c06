"""A cheap inverse of the loss's second derivative, from one pass over the rows: a randomised Nystrom approximation.

Frangella, Tropp and Udell, "Randomized Nystrom Preconditioning" (SIAM J. Matrix Anal. Appl. 44, 2023): the covariance
of the features is A = U diag(values) U' + the rest, with U of a few columns, and the second derivative
of the loss with penalty is close to curvature x A + 2 penalty. Many features are much alike, so a few directions bend a
hundred times more than the others; without this, the minimiser would spend most of its passes on learning which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.heads.rows import Rows
from hvfreeze.heads.standard import Standard
from hvfreeze.ranks.world import World

RANK = 128
SEED = 20230423


@dataclass(frozen=True)
class Covariance:
    """The leading part of the standardised features' covariance.

    Attributes:
        directions: (D, K) float64, orthonormal columns.
        values: (K,) float64, decreasing.
    """

    directions: Tensor
    values: Tensor

    def inverse(self, gradient: Tensor, *, curvature: float, penalty: float) -> Tensor:
        """Return what the inverse of curvature x A + 2 penalty makes of `gradient`, (C, D + 1).

        Directions outside `directions` count as if their variance were the least of `values`; the intercept, the last
        column, bends by `curvature` alone.
        """
        # Where every row is certain, nothing bends but the penalty.
        curvature = max(curvature, 1e-6)
        coefficients = gradient[:, :-1]
        least = curvature * self.values[-1] + 2 * penalty
        correction = 1 / (curvature * self.values + 2 * penalty) - 1 / least
        result = torch.empty_like(gradient)
        result[:, :-1] = coefficients / least + ((coefficients @ self.directions) * correction) @ self.directions.t()
        result[:, -1] = gradient[:, -1] / curvature
        return result


def sketch(rows: Rows, standard: Standard, *, world: World, columns: int = RANK) -> Tensor:
    """Return A T, (D, K) float64, for the covariance A of all ranks' standardised rows and T = `test_matrix(D, K)`.

    One pass over the rows. Collective: every rank of `world` must call this.
    """
    scaled = test_matrix(rows.width, columns) * standard.scale[:, None]
    factor, shift = scaled.float(), (standard.offset @ scaled).float()
    # The last row sums the products themselves: with it the mean can be taken off afterwards.
    sums = torch.zeros(rows.width + 1, scaled.shape[1], dtype=torch.float64)
    for chunk in rows.chunks():
        features = standard.taken(chunk.features)
        products = features @ factor - shift
        sums[:-1] += features.t() @ products
        sums[-1] += products.sum(0, dtype=torch.float64)
    sums = world.allreduce_sum(sums, name="head.sketch")
    return (sums[:-1] - standard.offset[:, None] * sums[-1]) * standard.scale[:, None] / standard.count


def test_matrix(width: int, columns: int = RANK) -> Tensor:
    """Return (D, K) of random signs, float64: exact on every machine, which draws of other laws need not be."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (width, min(columns, width)), generator=generator)
    return (2 * signs - 1).double()


def covariance(product: Tensor) -> Covariance:
    """Return the leading part of A from `product` = A T, (D, K), of `sketch`; of a matrix of any other kind too."""
    matrix = test_matrix(*product.shape)
    # A little of the identity keeps the small matrix positive definite; it is taken off again at the end.
    lift = 1e-6 * float(product.norm()) / float(matrix.norm()) + torch.finfo(torch.float64).tiny
    lifted = product + lift * matrix
    core = matrix.t() @ lifted
    values, vectors = torch.linalg.eigh((core + core.t()) / 2)
    kept = values > 1e-10 * values[-1]
    root = lifted @ (vectors[:, kept] / values[kept].sqrt())
    squares, turned = torch.linalg.eigh(root.t() @ root)
    squares, turned = squares.flip(0).clamp(min=torch.finfo(torch.float64).tiny), turned.flip(1)
    return Covariance(root @ (turned / squares.sqrt()), (squares - lift).clamp(min=0))
