"""The kernel's matrix over all ranks' rows: each rank computes the lines of its own rows, and products with vectors.

Rank 0 leads, as in `heads.linear.loss`: it alone decides what is multiplied next; the other ranks follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hvfreeze.heads.kernel.module import gaussian
from hvfreeze.heads.nystrom import test_matrix
from hvfreeze.heads.solution import Stopped
from hvfreeze.ranks.world import World

LINES = 512
"""Of the matrix, computed at a time."""
FEWEST_COLUMNS, ROWS_A_COLUMN = 128, 128
"""Of the sketch: a larger matrix has more large eigenvalues, which the preconditioner must know."""
STOP, SKETCH = 0, 1
"""What rank 0 asks for beside products with as many vectors as the number says."""


class Gram:
    """K, (N, N), with K[i, j] = exp(-|z_i - z_j|^2); float32, as many lines kept as memory is allowed for.

    Attributes:
        rows: N.
        passes: products with K so far.
        exchanged_bytes: that this rank gave to allreduces.
    """

    def __init__(
        self,
        centres: Tensor,
        *,
        first: int,
        count: int,
        world: World,
        memory_bytes: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take all ranks' points, (N, K), and which of them are this rank's own."""
        self._centres, self._first = centres, first
        self._own = centres[first : first + count]
        self._world, self._stop = world, stop
        self._kept: list[Tensor] = []
        self._most_kept = memory_bytes // (4 * LINES * max(1, len(centres)))
        self.rows = len(centres)
        self.passes = 0
        self.exchanged_bytes = 0

    def sketch(self) -> Tensor:
        """Return K T, (N, R) float32, for T = `test_matrix(N, R)`, with the larger R the more rows; see `times`."""
        self._ask(SKETCH)
        return self._product(self._test_matrix())

    def times(self, vectors: Tensor) -> Tensor:
        """Return K V, (N, M) float32, for `vectors` of two columns or more.

        Collective: rank 0 calls this while every other rank of the world is in `follow`.

        Raises:
            Stopped: some rank wants to stop.
        """
        self._ask(vectors.shape[1])
        vectors = vectors.float().contiguous()
        self._world.broadcast_(vectors, name="head.vectors")
        return self._product(vectors)

    def stop(self) -> None:
        """End the other ranks' `follow`. Collective: rank 0 calls this."""
        self._ask(STOP)

    def forget(self) -> None:
        """Give the memory of the lines back. Not a collective."""
        self._kept, self._most_kept = [], 0

    def follow(self) -> None:
        """Take part in every product that rank 0 asks for, until it stops. Collective: all ranks but 0 call this."""
        while columns := self._ask(STOP):
            vectors = torch.empty(len(self._centres), columns)
            if columns == SKETCH:
                vectors = self._test_matrix()
            else:
                self._world.broadcast_(vectors, name="head.vectors")
            try:
                self._product(vectors)
            except Stopped:
                continue

    def _test_matrix(self) -> Tensor:
        return test_matrix(self.rows, max(FEWEST_COLUMNS, self.rows // ROWS_A_COLUMN)).float()

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
