"""How long a head takes to be solved, expected from pieces of the work that are timed: no row is read."""

from __future__ import annotations

from functools import partial

import torch

from hvfreeze.heads.centres import MOST_FACTORED, SAMPLED
from hvfreeze.heads.gram import ROUNDED_FROM, TILE, Tiles, gaussian
from hvfreeze.heads.kernel import MOST_COMPARED, centres_for
from hvfreeze.heads.landmarks import SEEN, landmarks_of
from hvfreeze.heads.points import MOST_DIRECTIONS
from hvfreeze.heads.rows import CHUNK_ROWS
from hvfreeze.heads.solve import LINEAR_PASSES
from hvfreeze.timing import settled_seconds

APPROXIMATION = 12
"""What the approximation of the second derivative takes, in passes."""
PROJECTIONS = 3
"""Products of the features with as many vectors as there are directions: two find the directions, one projects."""
PRODUCTS, PRODUCTS_OF_MANY = 20, 15
"""Of the matrix of likenesses with vectors, until a head that compares rows is solved; and where likenesses are
rounded, whose solver ends earlier."""
PIECE = 256
"""Rows of a square matrix whose factor is timed: a whole one's takes as the third power of its rows."""


def time_solving(*, rows: int, width: int, classes: int) -> float:
    """Return the seconds that solving a linear head takes on `rows` rows of this rank, but for the exchange."""
    count = max(1, min(rows, CHUNK_ROWS))
    features, weight = torch.ones(count, width), torch.ones(classes, width)

    def products() -> None:
        logits = weight @ features.t()
        _ = logits.exp_() @ features

    return (LINEAR_PASSES + APPROXIMATION) * settled_seconds(products) * rows / count


def time_comparing(
    *, rows: int, width: int, classes: int, size: int, memory_bytes: int, asked: int | None = None
) -> float:
    """Return the seconds that a `KernelHead` takes on `rows` rows of each of `size` ranks, but for the exchange.

    `memory_bytes` are a rank's, for the likenesses that it keeps; `asked` is how many centres the user wants.
    """
    count, directions, together = max(1, min(rows, CHUNK_ROWS)), min(width, MOST_DIRECTIONS), rows * size
    centres, rounded = centres_for(together, asked), together >= ROUNDED_FROM
    points, vectors = torch.ones(TILE, directions), torch.ones(2 * classes, TILE)
    tiles = Tiles(memory_bytes=4 * TILE**2, rounded=rounded)

    def multiply() -> None:
        tile = tiles((0, 0), points, points)
        _ = vectors @ tile, vectors @ tile.t()

    compared, multiplied = time_tile(directions), settled_seconds(multiply)
    products = PRODUCTS_OF_MANY if rounded else PRODUCTS
    # Of all pairs of rows only half are computed.
    pairs = rows * centres / (2 if centres == together else 1)
    kept = min(1.0, memory_bytes / max(1.0, pairs * (2 if rounded else 4)))
    # All penalties at once.
    choice = min(together, MOST_COMPARED) ** 2 / 2 / size * (compared + 2 * PRODUCTS * multiplied)
    solution = pairs * (compared * (1 + products * (1 - kept)) + products * multiplied)
    prepared = (
        time_landmarks(rows=together, columns=2 * classes, products=products, compared=compared)
        if centres == together or centres > MOST_FACTORED
        else time_factor(centres, rows=together, size=size, compared=compared)
    )
    projected = time_product(count, width, directions) * rows / count
    return PROJECTIONS * projected + (choice + solution) / TILE**2 + prepared


def time_answering(*, rows: int, width: int, centres: int) -> float:
    """Return the seconds in which a `KernelHead` takes so many rows' features, and compares them with its centres."""
    directions = min(width, MOST_DIRECTIONS)
    return rows / TILE * (time_product(TILE, width, directions) + centres / TILE * time_tile(directions))


def time_landmarks(*, rows: int, columns: int, products: int, compared: float) -> float:
    """Return the seconds of rank 0 for a `Factor` of so many rows, and for as many times its inverse.

    `compared` is those of a tile of likenesses.
    """
    count = max(2, min(rows, landmarks_of(rows)))
    turned, applied = time_product(TILE, count, count // 2), time_product(columns, count // 2, TILE)
    # Eigenvectors of the landmarks' sums, and twice of half as many columns'.
    factored = 1.25 * settled_seconds(partial(torch.linalg.eigh, piece())) * (count / PIECE) ** 3
    parts = (1 + 1 / SEEN) * compared * count / TILE + (1.5 + 4 / SEEN) * turned + 2 * products * applied
    return rows / TILE * parts + factored


def time_factor(centres: int, *, rows: int, size: int, compared: float) -> float:
    """Return the seconds in which so many centres are factored, with `compared` for a tile of likenesses."""
    sampled, across = min(rows, SAMPLED * centres) / size / TILE, centres / TILE
    sums = sampled * across * (compared + across * time_product(TILE, TILE, TILE))
    return sums + settled_seconds(partial(torch.linalg.cholesky, piece())) * (centres / PIECE) ** 3


def time_tile(directions: int) -> float:
    """Return the seconds in which points of so many numbers are compared, `TILE` with as many."""
    points = torch.ones(TILE, directions)
    return settled_seconds(partial(gaussian, points, points))


def time_product(rows: int, inner: int, columns: int) -> float:
    """Return the seconds of a product of (rows, inner) and (inner, columns)."""
    return settled_seconds(partial(torch.matmul, torch.ones(rows, inner), torch.ones(inner, columns)))


def piece() -> torch.Tensor:
    """Return a positive matrix, (`PIECE`, `PIECE`) float64."""
    places = torch.arange(PIECE, dtype=torch.float64)
    return (-(places[:, None] - places).abs() / 8).exp()
