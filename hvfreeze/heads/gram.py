"""The matrix of likenesses over all ranks, and the linear system with it, solved by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.moments import Covariance, test_matrix
from hvfreeze.heads.solution import Stopped

T = TypeVar("T")


def gaussian(points: Tensor, centres: Tensor) -> Tensor:
    """Return exp(-|a - z|^2), (A, N), for `points`, (A, K), and `centres`, (N, K)."""
    exponents = torch.addmm(-centres.square().sum(1), points, centres.t(), alpha=2)
    # In place: matrices of this size cost more to get memory for than to compute.
    return exponents.sub_(points.square().sum(1, keepdim=True)).clamp_(max=0).exp_()


LINES = 512
"""Of the matrix, computed at a time."""
FEWEST_COLUMNS, ROWS_A_COLUMN = 128, 128
"""Of the sketch: a larger matrix has more large eigenvalues, which the preconditioner must know."""
STOP, SKETCH = 0, 1
"""Requests of rank 0 beside products with as many vectors as the number says."""


LEADING_BYTES, FOLLOWING_BYTES = 64, 12
"""For each number of a vector: on rank 0 eight in float64, with those that `solve` adds them up in; elsewhere three in
float32, as they come, as they are multiplied, and their product."""


class Gram:
    """K, (N, N) float32, with K[i, j] = exp(-|z_i - z_j|^2): each rank computes the lines of its own rows.

    As many lines are kept as memory is allowed for. Rank 0 leads, as in `linear.SoftmaxLoss`: it alone decides which
    product comes next; the other ranks follow. `passes` counts products.
    """

    def __init__(
        self,
        centres: Tensor,
        *,
        first: int,
        count: int,
        world: World,
        memory_bytes: int,
        columns: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take all ranks' points, (N, K), of which `count` from `first` on are this rank's own.

        Of `memory_bytes` the vectors of a solution with so many `columns` take their part first, lines what is left.
        """
        self._centres, self._first = centres, first
        self._own = centres[first : first + count]
        self._world, self._stop = world, stop
        self._kept: list[Tensor] = []
        each = LEADING_BYTES if world.rank == 0 else FOLLOWING_BYTES
        left = max(0, memory_bytes - each * columns * len(centres))
        self._most_kept = left // (4 * LINES * max(1, len(centres)))
        self.passes, self.exchanged_bytes = 0, 0

    def sketch(self) -> Tensor:
        """Return K T, (N, R) float32, for T = `test_matrix(N, R)`, with the larger R the more rows; see `times`."""
        self._ask(SKETCH)
        return self._product(self._test_matrix())

    def times(self, vectors: Tensor) -> Tensor:
        """Return K V, (N, M) float32, for `vectors` of two columns or more.

        Rank 0 calls this while every other rank of the world is in `follow`. Collective.

        Raises:
            Stopped: some rank wants to stop.
        """
        self._ask(vectors.shape[1])
        vectors = vectors.float().contiguous()
        self._world.broadcast_(vectors, name="head.vectors")
        return self._product(vectors)

    def lead(self, work: Callable[[], T]) -> T | None:
        """Return on rank 0 the result of `work` while the others follow; None on them, and where one stops. Collective.

        `work` may use `sketch` and `times`.
        """
        if self._world.rank > 0:
            self._follow()
            return None
        result = None
        with suppress(Stopped):
            result = work()
        self._ask(STOP)
        return result

    def forget(self) -> None:
        """Give the memory of the lines back. Not a collective."""
        self._kept, self._most_kept = [], 0

    def _follow(self) -> None:
        while columns := self._ask(STOP):
            vectors = torch.empty(len(self._centres), columns)
            if columns == SKETCH:
                vectors = self._test_matrix()
            else:
                self._world.broadcast_(vectors, name="head.vectors")
            with suppress(Stopped):
                self._product(vectors)

    def _test_matrix(self) -> Tensor:
        rows = len(self._centres)
        return test_matrix(rows, max(FEWEST_COLUMNS, rows // ROWS_A_COLUMN)).float()

    def _ask(self, command: int) -> int:
        message = torch.tensor([command], dtype=torch.int32)
        self._world.broadcast_(message, name="head.command")
        return int(message)

    def _product(self, vectors: Tensor) -> Tensor:
        self.passes += 1
        # One element more: whether this rank wants to stop.
        flat = torch.zeros(vectors.numel() + 1)
        whole, place = flat[:-1].view(vectors.shape[::-1]), self._first
        across = vectors.t().contiguous()
        for lines in self._lines():
            # Vectors first: this order of the product is three times as fast for few of them.
            torch.mm(across, lines.t(), out=whole[:, place : place + len(lines)])
            place += len(lines)
        flat[-1] = self._stop()
        if self._world.size > 1:
            self.exchanged_bytes += flat.numel() * flat.element_size()
        flat = self._world.allreduce_sum(flat, name="head.products")
        if flat[-1]:
            raise Stopped
        return flat[:-1].view(vectors.shape[::-1]).t()

    def _lines(self) -> Iterator[Tensor]:
        for place, points in enumerate(self._own.split(LINES) if len(self._own) else ()):
            known = place < len(self._kept)
            lines = self._kept[place] if known else gaussian(points, self._centres)
            if not known and place < self._most_kept:
                self._kept.append(lines)
            yield lines


MOST_STEPS = 200


class Solved(NamedTuple):
    """Where the solver ended."""

    vectors: Tensor
    """X, (N, M) float64."""
    left: Tensor
    """The residual B - (K + penalty) X, (N, M) float64."""
    steps: int
    error: float
    """The largest |left| of a column as a part of its right side."""


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
    """Return X with (K + penalty) X = B by conjugate gradients; rows that are not fitted are left out of K, X and B.

    Each column has a penalty and fitted rows of its own.

    Args:
        times: returns K V for V, (N, M).
        right: B, (N, M) float64.
        penalties: (M,) float64, above 0, by column.
        fitted: (N, 1) or (N, M) bool.
        leading: a few of the largest eigenvalues of K and their eigenvectors, for the preconditioner.
        tolerance: for `Solved.error`.
        most_steps: after which it ends all the same.
    """
    mask = fitted.double()
    least = leading.values[-1] + penalties
    correction = 1 / (leading.values[:, None] + penalties) - 1 / least

    # An approximate inverse need not be known to more digits.
    directions, factors = leading.directions.float(), correction.float()

    def inverse(vectors: Tensor) -> Tensor:
        inside = directions @ (factors * (directions.t() @ vectors.float()))
        return mask * (vectors / least + inside)

    def product(vectors: Tensor) -> Tensor:
        return mask * (times(vectors).double() + penalties * vectors)

    def ratio(above: Tensor, below: Tensor) -> Tensor:
        # 0 where a column is solved and nothing is left to divide by.
        return torch.where(below > 0, above / below, 0.0)

    right = mask * right
    size = right.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    found, left = torch.zeros_like(right), right.clone()
    direction = inverse(left)
    slope = (left * direction).sum(0)
    steps, error = 0, float((left.norm(dim=0) / size).max())
    while error > tolerance and steps < most_steps:
        moved = product(direction)
        length = ratio(slope, (direction * moved).sum(0))
        found, left = found + length * direction, left - length * moved
        closer = inverse(left)
        before, slope = slope, (left * closer).sum(0)
        direction = closer + ratio(slope, before) * direction
        steps, error = steps + 1, float((left.norm(dim=0) / size).max())
    return Solved(found, left, steps, error)
