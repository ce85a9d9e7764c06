"""Which missing rows are computed before training asks for them, so that fewer forwards start at the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.store.index import contains
from hvfreeze.cache.store.levels import Level, Levels


@dataclass(frozen=True)
class Sweep:
    """Rows that are to be computed and stored: a forward for each of `chunks`, keys (rows,) of at most a batch."""

    level: Level
    chunks: tuple[Keys, ...]


def sweep_of(levels: Levels, batches: Sequence[Keys], *, batch_rows: int, everything: bool) -> Sweep | None:
    """Return the sweep that saves forwards of `batches`, None where none does.

    A batch of which one row is missing is computed whole. Missing rows alone fill fewer forwards, and those that lie
    at a shallower cut are computed on from there when they are put together. What a forward costs is counted in
    blocks: a choice that rests on no clock is the same in every run.

    Args:
        levels: the stores in use; the deepest that takes rows is filled.
        batches: keys (batch_rows,) of what will be asked for.
        batch_rows: rows of a forward.
        everything: all rows of the level instead, whatever it takes.
    """
    level = levels.fillable
    if level is None or level.store.complete or level.store.waiting or not (everything or batches):
        return None
    store = level.store
    wanted = store.universe if everything else np.unique(np.concatenate(batches))
    missing: Keys = wanted[store.missing(wanted) & contains(store.universe, wanted)]
    if len(missing) == 0:
        return None
    ordered = _deepest_first(levels.below(level), missing)
    chunks = tuple(ordered[first : first + batch_rows] for first in range(0, len(ordered), batch_rows))
    if not everything:
        waiting = [batch for batch in batches if store.missing(batch).any()]
        swept = sum(level.cut - start for start in _starts(levels, chunks)) + len(waiting) * (levels.cut - level.cut)
        if swept >= sum(levels.cut - start for start in _starts(levels, waiting)):
            return None
    return Sweep(level, chunks)


def _deepest_first(sources: Sequence[Level], keys: Keys) -> Keys:
    """Return `keys` in the order of the cuts at which their rows lie: rows that a forward can start from, together."""
    depths = np.zeros(len(keys), np.int64)
    for source in sources:
        depths[~source.store.missing(keys)] = source.cut
    return keys[np.argsort(-depths, kind="stable")]


def _starts(levels: Levels, batches: Sequence[Keys]) -> list[int]:
    """Return the cut that a forward of each of `batches` starts at; 0 is the images."""
    return [0 if found is None else found[0].cut for found in levels.locate_batches(batches)]
