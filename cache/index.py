"""Finds the part and row of each key: sorted keys, looked up for a whole batch at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvfreeze.cache.file.format import VIEW_BITS, Keys, unpack_keys

MISSING = -1
MOST_IDS_PER_KEY = 64
"""A lookup table by sample id may be up to this many times longer than the keys."""
Mask = npt.NDArray[np.bool_]


def contains(ascending: Keys, keys: Keys) -> Mask:
    """Return for each of `keys` (rows,) whether it is in `ascending`, which is sorted."""
    if len(ascending) == 0:
        return np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    found: Mask = ascending[at] == keys
    return found


class Positions:
    """Positions of keys in a sorted vector; dense ids and views are computed, 10 times faster than a search."""

    def __init__(self, ascending: Keys) -> None:
        self._keys = ascending
        last = int(ascending[-1]) >> VIEW_BITS if len(ascending) else 0
        starts = np.arange(last + 1) << VIEW_BITS if last < MOST_IDS_PER_KEY * len(ascending) else None
        self._first = np.searchsorted(ascending, starts) if starts is not None else None

    def find(self, keys: Keys) -> tuple[Keys, Mask]:
        """Return each key's position, and whether it exists; the position is arbitrary if it does not."""
        if len(self._keys) == 0:
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        if self._first is None:
            at: Keys = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            return at, self._keys[at] == keys
        ids, views = unpack_keys(keys)
        at = self._first.take(ids, mode="clip") + views
        there: Mask = self._keys.take(at, mode="clip") == keys
        if not there.all():
            # A sample whose views are not 0, 1, 2, ... without a gap, or a key that is not there at all.
            at[~there] = np.searchsorted(self._keys, keys[~there])
            there = self._keys.take(at, mode="clip") == keys
        return at.clip(max=len(self._keys) - 1), there


class RowIndex:
    """The (part, row) of each key, if it has one. One thread writes, any thread may read."""

    def __init__(self, keys: Keys) -> None:
        """Create an index of `keys` (keys,), unique or not, whose rows are missing at first."""
        self.keys = np.unique(keys)
        self._positions = Positions(self.keys)
        self._part = np.zeros(len(self.keys), np.int64)
        self._row = np.full(len(self.keys), MISSING, np.int64)
        self._lock = threading.Lock()

    def locate(self, keys: Keys) -> tuple[Keys, Keys]:
        """Return part and row number of each of `keys` (rows,); the row is -1 where it is missing."""
        with self._lock:
            at, there = self._positions.find(keys)
            if not there.any():
                return np.zeros(len(keys), np.int64), np.full(len(keys), MISSING, np.int64)
            return self._part[at], np.where(there, self._row[at], MISSING)

    def missing(self, keys: Keys) -> Mask:
        """Return for each of `keys` (rows,) whether its row is missing."""
        _, rows = self.locate(keys)
        absent: Mask = rows == MISSING
        return absent

    def place(self, keys: Keys, *, part: int, rows: Keys) -> None:
        """Set the rows of `keys`, which must be known, to `rows` of `part`."""
        with self._lock:
            at = np.searchsorted(self.keys, keys)
            self._part[at], self._row[at] = part, rows

    def extend(self, more: Sequence[Keys]) -> None:
        """Add the keys of `more`; existing rows are kept."""
        if not more:
            return
        known = np.unique(np.concatenate([self.keys, *more]))
        at = np.searchsorted(known, self.keys)
        part, row = np.zeros(len(known), np.int64), np.full(len(known), MISSING, np.int64)
        part[at], row[at] = self._part, self._row
        with self._lock:
            self.keys, self._part, self._row = known, part, row
            self._positions = Positions(known)
