"""The matrix of likenesses over all ranks, and products with it, which rank 0 asks for and all ranks make together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.solution import Stopped

T = TypeVar("T")


def gaussian(points: Tensor, centres: Tensor) -> Tensor:
    """Return exp(-|a - z|^2), (A, N), for `points`, (A, K), and `centres`, (N, K)."""
    exponents = torch.addmm(-centres.square().sum(1), points, centres.t(), alpha=2)
    # In place: matrices of this size cost more to get memory for than to compute.
    return exponents.sub_(points.square().sum(1, keepdim=True)).clamp_(max=0).exp_()


TILE = 512
"""Rows and columns of the matrix, computed at a time."""
ROUNDED_FROM = 16_384
"""Rows from which on likenesses are rounded to 16 bits, kept or not: it halves what keeping them takes. The errors,
4e-6 of standard deviation, make those of the whole matrix 9e-6 times the root of its rows: far below every penalty."""
LEVELS = 65_534
"""Steps between 0 and 1 of a rounded likeness: an even number, so that 1 is not beyond the largest of 16 bits."""


BLOCK_BYTES = 2**26
"""That are taken at a time for likenesses that are kept: tiles one by one would lie between what is left of making
them, and take half as much again."""
ALIGNED = 64
"""Likenesses, a whole number of which each tile takes: products may depend on where their factors begin."""


class Tiles:
    """Tiles of a matrix of likenesses, of which as many are kept as memory is allowed for; the others are made anew.

    The bits do not depend on what is kept.
    """

    def __init__(self, *, memory_bytes: int, rounded: bool, cells: int = TILE * TILE) -> None:
        """Take the memory for tiles, whether likenesses are rounded, and a tile's most `cells`."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._left = memory_bytes
        self._block = torch.empty(0, dtype=torch.short if rounded else torch.float32)
        self._wide = torch.empty(cells) if rounded else None

    def __call__(self, place: tuple[int, int], points: Tensor, centres: Tensor) -> Tensor:
        """Return the tile of `points` and `centres`, (A, B) float32, which is at `place`; to be read until the next."""
        kept = self._kept.get(place)
        if kept is None:
            kept = gaussian(points, centres)
            if self._wide is not None:
                kept = kept.sub_(0.5).mul_(LEVELS).round_().to(self._block.dtype)
            cells = -(-kept.numel() // ALIGNED) * ALIGNED
            if cells * kept.element_size() <= self._left:
                kept = self._kept[place] = self._room(cells)[: kept.numel()].view_as(kept).copy_(kept)
        if self._wide is None:
            return kept
        return self._wide[: kept.numel()].view_as(kept).copy_(kept).mul_(1 / LEVELS).add_(0.5)

    def _room(self, cells: int) -> Tensor:
        """Return memory for as many likenesses, of which there is enough."""
        each = self._block.element_size()
        if len(self._block) < cells:
            self._block = self._block.new_empty(max(cells, min(BLOCK_BYTES, self._left) // each))
        self._left -= cells * each
        room, self._block = self._block[:cells], self._block[cells:]
        return room


class Led(ABC):
    """Products with vectors that rank 0 asks for, while the other ranks follow.

    Rank 0 alone decides which product comes next, as in `linear.SoftmaxLoss`: no decision rests on arithmetic that
    could differ between processors. `passes` counts products.
    """

    def __init__(self, *, size: int, world: World, watch: Callable[[str], bool]) -> None:
        """Take the vectors' length, and what is told how far it is, often, and says whether this rank wants to stop."""
        self.size = size
        self._world, self._watch = world, watch
        self._reached, self._stopped = "", False
        self.passes, self.exchanged_bytes = 0, 0

    @property
    def ranks(self) -> int:
        """That make products together."""
        return self._world.size

    def times(self, vectors: Tensor) -> Tensor:
        """Return the product with `vectors`, (size, C), over all ranks: see `_partial`, but (..., size, C).

        Rank 0 calls this while every other rank of the world is in `lead`. Collective.

        Raises:
            Stopped: some rank wants to stop.
        """
        self._ask(vectors.shape[1])
        across = vectors.t().float().contiguous()
        self._world.broadcast_(across, name="head.vectors")
        return self._product(across).transpose(-1, -2)

    def lead(self, work: Callable[[], T]) -> T | None:
        """Return on rank 0 the result of `work`, which may use `times`, while the others follow. Collective.

        None on them, and where one wants to stop.
        """
        if self._world.rank > 0:
            while columns := self._ask(0):
                vectors = torch.empty(columns, self.size)
                self._world.broadcast_(vectors, name="head.vectors")
                with suppress(Stopped):
                    self._product(vectors)
            return None
        result = None
        with suppress(Stopped):
            result = work()
        self._ask(0)
        return result

    def look(self, done: float) -> bool:
        """Tell how far a pass is, 0 to 1, and return whether this rank wants to stop; its part is not needed then."""
        note = f"pass {self.passes}, {100 * done:.0f} %{self._reached}"
        self._stopped = self._watch(note) or self._stopped
        return self._stopped

    def tell(self, error: float, tolerance: float) -> None:
        """Take how near the solution is, for the next notes."""
        self._reached = f"; off by {100 * error:.1f} %, {100 * tolerance:.1f} % will do"

    def count_bytes(self, tensor: Tensor) -> None:
        """Count what this rank gives to an allreduce."""
        if self._world.size > 1:
            self.exchanged_bytes += tensor.numel() * tensor.element_size()

    @abstractmethod
    def _partial(self, vectors: Tensor) -> Tensor:
        """Return this rank's part of the product with `vectors`, (C, size), as (..., C, size), alike on all ranks."""

    def _ask(self, columns: int) -> int:
        message = torch.tensor([columns], dtype=torch.int32)
        self._world.broadcast_(message, name="head.command")
        return int(message)

    def _product(self, vectors: Tensor) -> Tensor:
        self.passes += 1
        self.look(0)
        part = self._partial(vectors)
        # One element more: whether this rank wants to stop.
        flat = torch.cat([part.flatten(), torch.tensor([self._stopped], dtype=part.dtype)])
        self.count_bytes(flat)
        flat = self._world.allreduce_sum(flat, name="head.products")
        if flat[-1]:
            raise Stopped
        return flat[:-1].view(part.shape)


class Gram(Led):
    """K V for V, (N, C), with K[i, j] = exp(-|z_i - z_j|^2), (N, N).

    K is symmetric, so only tiles on and above its diagonal are made, and dealt out to the ranks in turn, whoever holds
    the rows.
    """

    def __init__(
        self,
        points: Tensor,
        *,
        world: World,
        memory_bytes: int,
        watch: Callable[[str], bool] = lambda note: False,
    ) -> None:
        """Take all ranks' points, (N, K), the same on every rank; for `watch` see `Led`."""
        super().__init__(size=len(points), world=world, watch=watch)
        self._points = points.split(TILE)
        self._tiles = Tiles(memory_bytes=memory_bytes, rounded=len(points) >= ROUNDED_FROM)

    def _partial(self, vectors: Tensor) -> Tensor:
        # Vectors first: this order of the product is three times as fast for few of them.
        whole = torch.zeros_like(vectors)
        given, sums = vectors.split(TILE, 1), whole.split(TILE, 1)
        places = list(self._places())
        for number, (above, right) in enumerate(places):
            tile = self._tiles((above, right), self._points[above], self._points[right])
            sums[above].addmm_(given[right], tile.t())
            if above != right:
                sums[right].addmm_(given[above], tile)
            if self.look((number + 1) / len(places)):
                break
        return whole

    def _places(self) -> Iterator[tuple[int, int]]:
        count = len(self._points)
        every = ((above, right) for above in range(count) for right in range(above, count))
        yield from (place for number, place in enumerate(every) if number % self._world.size == self._world.rank)


MOST_STEPS = 200


class Solved(NamedTuple):
    """Where the solver ended."""

    vectors: Tensor
    """X, (N, C) float64."""
    left: Tensor
    """The residual B - A X, (N, C) float64."""
    steps: int
    error: float
    """The largest |left| of a column as a part of its right side, or as `solve` was asked to measure it."""


def solve(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    *,
    inverse: Callable[[Tensor], Tensor],
    tolerance: float,
    most_steps: int,
    tell: Callable[[float, float], None],
    inverse_is_close: bool = False,
) -> Solved:
    """Return X with A X = B by conjugate gradients, for A symmetric and positive; each column is solved by itself.

    Args:
        product: returns A V for V, (N, C) float64; A may be another one for each column.
        right: B, (N, C) float64.
        inverse: returns about A^-1 V; symmetric and positive too.
        tolerance: for `Solved.error`.
        most_steps: after which it ends all the same.
        tell: takes `Solved.error` so far and the tolerance, before each product.
        inverse_is_close: `inverse` is A^-1 but for a small factor: sizes of `Solved.error` are then roots of
            V' A^-1 V. Of a least squares problem this measures how far its answers are off.
    """

    def ratio(above: Tensor, below: Tensor) -> Tensor:
        # 0 where a column is solved and nothing is left to divide by.
        return torch.where(below > 0, above / below, 0.0)

    found, left, steps = torch.zeros_like(right), right.clone(), 0
    direction = inverse(left)
    slope = (left * direction).sum(0)
    whole = slope if inverse_is_close else right.square().sum(0)

    def measured() -> float:
        rest = slope if inverse_is_close else left.square().sum(0)
        return float(ratio(rest, whole).clamp(min=0).sqrt().max())

    error = measured()
    while error > tolerance and steps < most_steps:
        tell(error, tolerance)
        moved = product(direction)
        length = ratio(slope, (direction * moved).sum(0))
        found += length * direction
        left -= length * moved
        closer = inverse(left)
        before, slope = slope, (left * closer).sum(0)
        direction = closer + ratio(slope, before) * direction
        steps, error = steps + 1, measured()
    return Solved(found, left, steps, error)
