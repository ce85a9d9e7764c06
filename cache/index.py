"""Finds the part and row of each key: sorted keys, looked up for a whole batch at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvfreeze.cache.file.format import Keys

MISSING = -1
Mask = npt.NDArray[np.bool_]


def find(ascending: Keys, keys: Keys) -> tuple[Keys, Mask]:
    """Return each key's position in `ascending`, which is sorted, and whether it is there at all."""
    at: Keys = np.searchsorted(ascending, keys)
    if len(ascending) == 0:
        return at, np.zeros(len(keys), np.bool_)
    at[at == len(ascending)] = 0
    there: Mask = ascending[at] == keys
    return at, there


def contains(ascending: Keys, keys: Keys) -> Mask:
    """Return for each of `keys` (rows,) whether it is in `ascending`, which is sorted."""
    return find(ascending, keys)[1]


class RowIndex:
    """The (part, row) of each key, if it has one. One thread writes, any thread may read."""

    def __init__(self, keys: Keys) -> None:
        """Create an index of `keys` (keys,), unique or not, whose rows are missing at first."""
        self.keys = np.unique(keys)
        self._part = np.zeros(len(self.keys), np.int64)
        self._row = np.full(len(self.keys), MISSING, np.int64)
        self._lock = threading.Lock()

    def locate(self, keys: Keys) -> tuple[Keys, Keys]:
        """Return part and row number of each of `keys` (rows,); the row is -1 where it is missing."""
        with self._lock:
            at, there = find(self.keys, keys)
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
