"""Which part holds the row of a key: sorted keys, looked up for a whole batch at once."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from hvfreeze.cache.rows import Keys

MISSING = -1
Mask = npt.NDArray[np.bool_]


def contains(ascending: Keys, keys: Keys) -> Mask:
    """For each of `keys` (rows,) whether it is in `ascending`, which is sorted and not empty."""
    at = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    found: Mask = ascending[at] == keys
    return found


class RowIndex:
    """A (part, row) for each key that has one; one thread changes it, any may look."""

    def __init__(self, keys: Keys) -> None:
        """`keys` (keys,), unique or not; their rows are missing at first."""
        self.keys = np.unique(keys)
        self._part = np.zeros(len(self.keys), np.int64)
        self._row = np.full(len(self.keys), MISSING, np.int64)
        self._lock = threading.Lock()

    def locate(self, keys: Keys) -> tuple[Keys, Keys]:
        """Part and row number of each of `keys` (rows,); the row is -1 where it is missing."""
        with self._lock:
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            return self._part[at], np.where(self.keys[at] == keys, self._row[at], MISSING)

    def missing(self, keys: Keys) -> Mask:
        """For each of `keys` (rows,) whether its row is not there."""
        _, rows = self.locate(keys)
        absent: Mask = rows == MISSING
        return absent

    def place(self, keys: Keys, *, part: int, rows: Keys) -> None:
        """The rows of `keys`, which must be known, are now `rows` of `part`."""
        with self._lock:
            at = np.searchsorted(self.keys, keys)
            self._part[at], self._row[at] = part, rows

    def extend(self, keys: Keys) -> None:
        """Makes `keys` known; rows that are there stay."""
        known = np.union1d(self.keys, keys)
        at = np.searchsorted(known, self.keys)
        part, row = np.zeros(len(known), np.int64), np.full(len(known), MISSING, np.int64)
        part[at], row[at] = self._part, self._row
        with self._lock:
            self.keys, self._part, self._row = known, part, row
