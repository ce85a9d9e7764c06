"""How much of some epochs' rows is there already: what a plan counts on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvfreeze.cache.file.names import Present
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.store.index import Mask
from hvfreeze.cache.store.levels import Level


@dataclass(frozen=True)
class Shares:
    """What is there of the rows of each of some epochs, as parts of their samples.

    Attributes:
        present: that can be read at a cut.
        rows_to_complete: see `Present`.
        sources: that are cached at a shallower cut, from which they would be computed; empty where there is none.
        source_cut: that cut, 0 where there is none.
    """

    present: tuple[float, ...]
    rows_to_complete: int
    sources: tuple[float, ...]
    source_cut: int


def shares_of(epochs: Sequence[Keys], present: Present, sources: Sequence[Level]) -> Shares:
    """Return the shares of `epochs`, keys (rows,) each, where `sources` are the shallower cuts, deepest last."""
    return Shares(
        present=tuple(1.0 - _mean(np.isin(keys, present.absent)) for keys in epochs),
        rows_to_complete=present.rows_to_complete,
        sources=tuple(1.0 - _mean(sources[-1].store.missing(keys)) for keys in epochs) if sources else (),
        source_cut=sources[-1].cut if sources else 0,
    )


def _mean(mask: Mask) -> float:
    return float(mask.mean()) if len(mask) else 0.0
