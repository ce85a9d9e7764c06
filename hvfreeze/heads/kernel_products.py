"""Products with the Gram matrix of all ranks' rows; rank 0 requests them and all ranks compute them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.heads.requested_sums import RequestedSums
from hvfreeze.heads.rows import CHUNK_ROWS


def gaussian(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the kernel exp(-|a - z|^2), (A, N), for `rows`, (A, K), and `centres`, (N, K)."""
    exponents = torch.addmm(-centres.square().sum(1), rows, centres.t(), alpha=2)
    # In place: allocating matrices of this size takes longer than computing them.
    return exponents.sub_(rows.square().sum(1, keepdim=True)).clamp_(max=0).exp_()


TILE = CHUNK_ROWS
"""Side of a tile of the Gram matrix, and height of a strip, which has a column per centre."""
ROUNDED_FROM = 16_384
"""Number of rows from which kernel values are rounded to 16 bits, which halves the cache. The rounding error has a
standard deviation of 4e-6, and of 9e-6 times the root of the rows for the whole matrix, far below every penalty."""


class TileCache:
    """Tiles of a Gram matrix, cached up to a memory limit; the others are recomputed.

    Results are bitwise independent of the limit.
    """

    def __init__(self, count: int, *, cells: int, memory_bytes: int, rounded: bool) -> None:
        """Take the number of tiles, the largest size of one, the memory limit, and whether values are rounded."""
        kind = torch.uint16 if rounded else torch.float32
        # Allocated at once: single tiles between temporaries take 1.5 times the memory.
        self._slots = torch.empty(min(count, memory_bytes // (kind.itemsize * cells)), cells, dtype=kind)
        self._cached: dict[int, Tensor] = {}
        self._wide = torch.empty(cells) if rounded else None
        self._levels = torch.iinfo(torch.uint16).max
        self.scale = 1 / self._levels if rounded else 1.0
        """Factor from tile entries to kernel values; it is applied to the vectors, which are smaller than the tiles."""

    def __call__(self, number: int, rows: Tensor, centres: Tensor) -> Tensor:
        """Return tile `number`, kernel values over `scale`, (A, B) float32; valid until the next call."""
        tile = self._cached.get(number)
        if tile is None:
            tile = gaussian(rows, centres)
            if self._wide is not None:
                tile = tile.mul_(self._levels).round_().to(self._slots.dtype)
            if len(self._cached) < len(self._slots):
                slot = self._slots[len(self._cached), : tile.numel()]
                tile = self._cached[number] = slot.view_as(tile).copy_(tile)
        if self._wide is None:
            return tile
        return self._wide[: tile.numel()].view_as(tile).copy_(tile)


class Products(RequestedSums[None]):
    """Products of a matrix with vectors over all ranks."""

    def __init__(self, *, size: int, world: World, watch: Callable[[str], bool]) -> None:
        """Take the length of the vectors, and a function that is called with the progress and may stop the fit."""
        super().__init__(world=world)
        self.size = size
        self._watch, self._reached = watch, ""

    def times(self, vectors: Tensor) -> Tensor:
        """Return the product with `vectors`, (size, C), over all ranks, (..., size, C); see `request`. Collective."""
        return self.request(vectors.t().float(), None).transpose(-1, -2)

    def report(self, done: float) -> bool:
        """Report the finished share of a pass; return True if this rank stops the fit."""
        note = f"pass {self.passes}, {100 * done:.0f} %{self._reached}"
        self.stopped = self._watch(note) or self.stopped
        return self.stopped

    def report_error(self, error: float, tolerance: float) -> None:
        """Record the solver's error for the next progress reports."""
        self._reached = f"; error {100 * error:.1f} %, target {100 * tolerance:.1f} %"


class Gram(Products):
    """Products K V for V, (N, C), with the Gram matrix K[i, j] = exp(-|z_i - z_j|^2), (N, N), of all rows.

    K is symmetric, so only tiles on and above the diagonal are computed, assigned to the ranks in turn.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        world: World,
        memory_bytes: int,
        watch: Callable[[str], bool] = lambda note: False,
    ) -> None:
        """Take the projected features of all ranks, (N, K), the same on every rank; for `watch` see `Products`."""
        super().__init__(size=len(rows), world=world, watch=watch)
        self._rows = rows.split(TILE)
        self._places = list(self._own_places())
        rounded = len(rows) >= ROUNDED_FROM
        self._tiles = TileCache(len(self._places), cells=TILE * TILE, memory_bytes=memory_bytes, rounded=rounded)

    def _partial(self, vectors: Tensor, terms: None) -> Tensor:
        """Return this rank's part of the product, (C, N) float32, for (C, N)."""
        self.report(0)
        # Vectors first: this order of the product is 3x faster for few of them.
        whole = torch.zeros_like(vectors)
        given, sums = (vectors * self._tiles.scale).split(TILE, 1), whole.split(TILE, 1)
        for number, (above, right) in enumerate(self._places):
            tile = self._tiles(number, self._rows[above], self._rows[right])
            sums[above].addmm_(given[right], tile.t())
            if above != right:
                sums[right].addmm_(given[above], tile)
            if self.report((number + 1) / len(self._places)):
                break
        return whole

    def _own_places(self) -> Iterator[tuple[int, int]]:
        count = len(self._rows)
        every = ((above, right) for above in range(count) for right in range(above, count))
        yield from (place for number, place in enumerate(every) if number % self._world.size == self._world.rank)


class CentreProducts(Products):
    """Products K_C' W K_C V and K_CC V for V, (M, C): K_C has the kernel values of rows and centres, K_CC of centres.

    Each rank sums over its own rows. W has the rows' weights; in the last columns held-out rows have weight 0.
    """

    def __init__(
        self,
        rows: Tensor,
        centres: Tensor,
        *,
        places: Tensor,
        weights: Tensor,
        held_out: Tensor,
        columns: int,
        rounded: bool,
        world: World,
        memory_bytes: int,
        watch: Callable[[str], bool],
    ) -> None:
        """Take this rank's rows, and the centres of all ranks.

        Args:
            rows: this rank's projected features, (B, K).
            centres: (M, K), the same on every rank.
            places: index of each row among the centres, -1 if it is not a centre, (B,) int64.
            weights: weight of each row, (B,) float32.
            held_out: mask of the rows that only the first columns use, (B,) bool.
            columns: number of columns that use all rows.
            rounded: whether kernel values are rounded, see `ROUNDED_FROM`.
            world: the ranks.
            memory_bytes: memory for cached kernel values; others are recomputed in each pass.
            watch: see `Products`.
        """
        super().__init__(size=len(centres), world=world, watch=watch)
        self._centres, self._columns = centres, columns
        self._rows = [
            (strip, there >= 0, there[there >= 0], weight, held)
            for strip, there, weight, held in zip(*(each.split(TILE) for each in (rows, places, weights, held_out)))
            if len(strip)
        ]
        cells = TILE * len(centres)
        self._tiles = TileCache(len(self._rows), cells=cells, memory_bytes=memory_bytes, rounded=rounded)

    def normal_matrix(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return K_C' W K_C, (M, M) float32, over a subset of the rows. Collective, outside `lead`.

        `rows`, (B, K), are this rank's part of the subset, and `weights`, (B,), their weights.
        """
        sums, strips = torch.zeros(self.size, self.size), rows.split(TILE)
        for number, (strip, weight) in enumerate(zip(strips, weights.split(TILE))):
            tile = gaussian(strip, self._centres)
            sums.addmm_(tile.t(), tile * weight[:, None])
            if self.report((number + 1) / len(strips)):
                break
        self.count_bytes(sums)
        self._world.wait(self._world.start_allreduce_(sums, name="head.normal"))
        return sums

    def right_sides(self, targets: Callable[[slice], Tensor], *, copies: int) -> Tensor:
        """Return K_C' W Y, (M, copies x outputs) float64; `targets` returns Y for rows. Collective, outside `lead`.

        The first copy uses all rows, the last one excludes held-out rows.
        """
        sums, done = None, 0
        for number, (strip, _, _, weight, held) in enumerate(self._rows):
            given = (targets(slice(done, done + len(strip))).float() * weight[:, None]).t().repeat(copies, 1)
            given[self._columns :, held] = 0
            given *= self._tiles.scale
            part = given @ self._tiles(number, strip, self._centres)
            sums = part.double() if sums is None else sums.add_(part)
            done += len(strip)
            self.report((number + 1) / len(self._rows))
        whole = torch.zeros(copies * self._columns, self.size, dtype=torch.float64) if sums is None else sums
        self.count_bytes(whole)
        return self._world.allreduce_sum(whole, name="head.right").t()

    def answers(self, weights: Tensor) -> Tensor:
        """Return K_C A of this rank's rows, (B, C) float32, for A, (M, C). Not a collective."""
        across, done = (weights.t() * self._tiles.scale).float().contiguous(), 0
        # Allocated at once: parts between freed strips would fragment gigabytes of memory.
        answers = torch.empty(sum(len(strip) for strip, *_ in self._rows), len(across))
        for number, (strip, *_) in enumerate(self._rows):
            tile = self._tiles(number, strip, self._centres)
            answers[done : done + len(strip)] = (across @ tile.t()).t()
            done += len(strip)
        return answers

    def _partial(self, vectors: Tensor, terms: None) -> Tensor:
        """Return this rank's parts of both products, (2, C, M) float64, for (C, M)."""
        self.report(0)
        # float64: in float32 the largest eigenvalues would hide the smallest, which matter for a weak penalty.
        sums, vectors = torch.zeros(2, *vectors.shape, dtype=torch.float64), vectors * self._tiles.scale
        for number, (strip, is_centre, there, weight, held) in enumerate(self._rows):
            tile = self._tiles(number, strip, self._centres)
            answers = vectors @ tile.t()
            sums[1][:, there] = answers[:, is_centre].double()
            answers *= weight * self._tiles.scale
            answers[self._columns :, held] = 0
            sums[0] += answers @ tile
            if self.report((number + 1) / len(self._rows)):
                break
        return sums
