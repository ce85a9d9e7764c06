"""Rows compared with some of them only, the centres: for more rows than can all be compared with each other.

With K_C the likenesses of all N rows to M centres and K_CC those of the centres to each other,

    (K_C' K_C + penalty K_CC) A = K_C' Y

is kernel ridge regression whose solution has weights for centres alone (Rudi, Carratino and Rosasco, "FALKON: An
Optimal Large Scale Kernel Method", NIPS 2017). With all rows as centres it is that of all rows. Rows stay on their
rank; a pass over them multiplies by K_C and, while a strip of it is at hand, by its transpose.

Conjugate gradients are preconditioned by the same matrix from a sample of the rows, factorised, of at most
`MOST_FACTORED` centres. FALKON takes the centres themselves for the sample; they know too little of rows that are no
centres, and with penalties this weak it takes nearly twice as many passes. Of more centres only the largest eigenvalues
are known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.gram import Led, Solved, Tiles, gaussian, solve
from hvfreeze.heads.kernel_choice import targets
from hvfreeze.heads.landmarks import leading

SAMPLED = 8
"""Rows in the sample for each centre: the error then falls to about a third in a step."""
MOST_FACTORED = 12_000
"""Centres: the factor of more would take over 1.2 GB."""
JITTER = 1e-7
"""Added to the diagonal, as a part of its mean: equal centres then do no harm."""
STRIP = 256
"""Rows that are compared with all centres at a time."""
CENTRES_TOLERANCE = 0.02
"""For the residual, as a part of the right sides: less changed no accuracy."""
ANSWERS_TOLERANCE = 0.01
"""For how far answers are off, as a part of them, where a factor tells it: accuracy is that of the solution from three
times as much on, in half the steps that the residual takes to fall as far."""


class CentreProducts(Led):
    """K_C' K_C V and K_CC V for V, (M, C): each rank sums over its own rows.

    Some columns, the last ones, leave some rows out.
    """

    def __init__(
        self,
        points: Tensor,
        centres: Tensor,
        *,
        places: Tensor,
        left_out: Tensor,
        columns: int,
        rounded: bool,
        world: World,
        memory_bytes: int,
        watch: Callable[[str], bool],
    ) -> None:
        """Take this rank's rows, and the centres of all ranks.

        Args:
            points: of this rank's rows, (B, K).
            centres: (M, K), the same on every rank.
            places: (B,) int64, for each of the rows where it is among the centres; -1 for one that is none.
            left_out: (B,) bool, rows that only the first columns count.
            columns: how many columns count all rows.
            world: the ranks.
            rounded: whether likenesses are rounded, see `gram.ROUNDED_FROM`.
            memory_bytes: for likenesses that are kept; others are computed anew in each pass.
            watch: see `Led`.
        """
        super().__init__(size=len(centres), world=world, watch=watch)
        self._centres, self._columns = centres, columns
        self._rows = [
            (strip, there >= 0, there[there >= 0], left)
            for strip, there, left in zip(*(each.split(STRIP) for each in (points, places, left_out)))
            if len(strip)
        ]
        self._tiles = Tiles(memory_bytes=memory_bytes, rounded=rounded, cells=STRIP * len(centres))

    def normal_matrix(self, points: Tensor) -> Tensor:
        """Return K_C' K_C, (M, M) float32, of all ranks' `points` alone, (B, K) here. Collective, outside of `lead`."""
        sums, strips = torch.zeros(self.size, self.size), points.split(STRIP)
        for number, strip in enumerate(strips):
            tile = gaussian(strip, self._centres)
            sums.addmm_(tile.t(), tile)
            if self.look((number + 1) / len(strips)):
                break
        self.count_bytes(sums)
        self._world.wait(self._world.start_allreduce_(sums, name="head.normal"))
        return sums

    def right_sides(self, labels: Tensor, classes: int, *, copies: int) -> Tensor:
        """Return K_C' Y, (M, copies x classes) float64, Y for this rank's rows of `labels`, (B,). Collective.

        Outside of `lead`. As many columns as all rows count for are the first copy; the last one leaves rows out.
        """
        sums, done = torch.zeros(copies * classes, self.size, dtype=torch.float64), 0
        for number, (strip, _, _, left) in enumerate(self._rows):
            given = targets(labels[done : done + len(strip)], classes).float().t().repeat(copies, 1)
            given[self._columns :, left] = 0
            sums += given @ self._tiles((number, 0), strip, self._centres)
            done += len(strip)
            self.look((number + 1) / len(self._rows))
        self.count_bytes(sums)
        return self._world.allreduce_sum(sums, name="head.right").t()

    def answers(self, weights: Tensor) -> Tensor:
        """Return K_C A of this rank's rows, (B, C) float32, for A, (M, C). Not a collective."""
        across, done = weights.t().float().contiguous(), 0
        # Taken at once: parts of it, which stay, would lie between strips, which go, and what these leave would never
        # be whole again. That took gigabytes.
        answers = torch.empty(sum(len(strip) for strip, *_ in self._rows), len(across))
        for number, (strip, *_) in enumerate(self._rows):
            tile = self._tiles((number, 0), strip, self._centres)
            answers[done : done + len(strip)] = (across @ tile.t()).t()
            done += len(strip)
        return answers

    def _partial(self, vectors: Tensor) -> Tensor:
        # float64: the sums of the largest eigenvalues would swallow the smallest, which a weak penalty counts on.
        sums = torch.zeros(2, *vectors.shape, dtype=torch.float64)
        for number, (strip, is_centre, there, left) in enumerate(self._rows):
            tile = self._tiles((number, 0), strip, self._centres)
            answers = vectors @ tile.t()
            sums[1][:, there] = answers[:, is_centre].double()
            answers[self._columns :, left] = 0
            sums[0] += answers @ tile
            if self.look((number + 1) / len(self._rows)):
                break
        return sums


def solve_centres(
    products: CentreProducts,
    right: Tensor,
    *,
    inverse: Callable[[Tensor], Tensor],
    inverse_is_close: bool,
    penalty: float,
    most_steps: int,
) -> Solved:
    """Return A, (M, C), with (K_C' K_C + penalty K_CC) A = `right`. To be called in `CentreProducts.lead`.

    Args:
        products: with K_C.
        right: K_C' Y, (M, C) float64.
        inverse: see `gram.solve`.
        inverse_is_close: see there; the tolerance is then `ANSWERS_TOLERANCE`.
        penalty: above 0.
        most_steps: after which it ends all the same.
    """

    def product(vectors: Tensor) -> Tensor:
        both = products.times(vectors)
        return both[0] + penalty * both[1]

    return solve(
        product,
        right,
        inverse=inverse,
        inverse_is_close=inverse_is_close,
        tolerance=tolerance_of(inverse_is_close),
        most_steps=most_steps,
        tell=products.tell,
    )


def tolerance_of(inverse_is_close: bool) -> float:
    """Return when the solver ends."""
    return ANSWERS_TOLERANCE if inverse_is_close else CENTRES_TOLERANCE


def inverse_by_factor(centres: Tensor, normal: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
    """Return what multiplies by (`normal` + penalty K_CC)^-1, for `normal`, (M, M), about K_C' K_C."""
    factor = cholesky(normal.double().add_(gaussian(centres, centres), alpha=penalty))
    return lambda vectors: torch.cholesky_solve(vectors, factor)


def inverse_by_landmarks(centres: Tensor, penalty: float, *, rows: int) -> Callable[[Tensor], Tensor]:
    """Return what multiplies by about (K_C' K_C + penalty K_CC)^-1 where the centres are like all `rows`."""
    # Likenesses count twice here, and so do errors of their eigenvalues.
    known, share = leading(centres), rows / len(centres)

    def eigenvalues(values: Tensor) -> Tensor:
        return values * (share * values + penalty)

    factors = 1 / eigenvalues(known.values)[:, None]
    rest = 1 / eigenvalues(torch.tensor([known.rest], dtype=torch.float64))
    return lambda vectors: known.apply(factors, rest, vectors)


def cholesky(matrix: Tensor) -> Tensor:
    """Return the factor of a positive matrix, (M, M) float64, that rounding may have left a little less than that.

    As much is added to its diagonal as that takes; `matrix` is overwritten.
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
