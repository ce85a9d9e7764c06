"""Rows compared with some of them only, the centres: for more rows than can all be compared with each other.

With K_C the likenesses of all N rows to M centres and K_CC those of the centres to each other,

    (K_C' K_C + penalty K_CC) A = K_C' Y

is kernel ridge regression whose solution has weights for centres alone (Rudi, Carratino and Rosasco, "FALKON: An
Optimal Large Scale Kernel Method", NIPS 2017). With all rows as centres it is that of all rows. Rows stay on their
rank; a pass over them multiplies by K_C and, while a strip of it is at hand, by its transpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.gram import MORE_LANDMARKS, Led, Solved, Tiles, leading, solve

STRIP = 256
"""Rows that are compared with all centres at a time."""
CENTRES_TOLERANCE = 0.02
"""For the residual, as a part of the right sides: less changed no accuracy."""


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

    def right_sides(self, targets: Tensor) -> Tensor:
        """Return K_C' Y, (M, C) float64, for this rank's rows of Y, (B, C) float32. Collective, outside of `lead`."""
        sums, done = torch.zeros(targets.shape[1], self.size, dtype=torch.float64), 0
        for number, (strip, _, _, left) in enumerate(self._rows):
            given = targets[done : done + len(strip)].t().contiguous()
            given[self._columns :, left] = 0
            sums += given @ self._tiles((number, 0), strip, self._centres)
            done += len(strip)
            self.look(done / max(1, len(self._rows) * STRIP))
        self.count_bytes(sums)
        return self._world.allreduce_sum(sums, name="head.right").t()

    def answers(self, weights: Tensor) -> Tensor:
        """Return K_C A of this rank's rows, (B, C) float32, for A, (M, C). Not a collective."""
        across = weights.t().float().contiguous()
        parts = [
            (across @ self._tiles((number, 0), strip, self._centres).t()).t()
            for number, (strip, *_) in enumerate(self._rows)
        ]
        return torch.cat([torch.zeros(0, len(across)), *parts])

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
    products: CentreProducts, centres: Tensor, right: Tensor, *, penalty: float, rows: int, most_steps: int
) -> Solved:
    """Return A, (M, C), with (K_C' K_C + penalty K_CC) A = `right`. To be called in `CentreProducts.lead`.

    Args:
        products: with K_C.
        centres: (M, K).
        right: K_C' Y, (M, C) float64.
        penalty: above 0.
        rows: N, of all ranks.
        most_steps: after which it ends all the same.
    """
    # Likenesses count twice here, and so do errors of their eigenvalues.
    known, share = leading(centres, landmarks=MORE_LANDMARKS, exact=True), rows / len(centres)

    def eigenvalues(values: Tensor) -> Tensor:
        # About those of K_C' K_C + penalty K_CC where the centres are like all rows.
        return values * (share * values + penalty)

    factors = 1 / eigenvalues(known.values)[:, None]
    rest = 1 / eigenvalues(torch.tensor([known.rest], dtype=torch.float64))

    def product(vectors: Tensor) -> Tensor:
        both = products.times(vectors)
        return both[0] + penalty * both[1]

    return solve(
        product,
        right,
        inverse=lambda vectors: known.apply(factors, rest, vectors),
        tolerance=CENTRES_TOLERANCE,
        most_steps=most_steps,
        tell=products.tell,
    )
