"""A file's rows beside some that this run computes, before any of them is used.

A fingerprint says what rows ought to depend on; this is the look at what they are. It catches what no fingerprint
names: another machine's arithmetic under the same processor name, a function that reads what it was not given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys, RowFormat
from hvfreeze.cache.fingerprint import bytes_of

MOST_DIFFERENT = 1 / 32
"""Relative difference that other threads or batch shapes may make; another prefix makes one of about 1."""


@dataclass(frozen=True)
class Sample:
    """Some of a file's rows: their keys, (rows,), and places; and whether they must have the bits of this run's."""

    file: ActivationFile
    keys: Keys
    rows: Keys
    exact: bool


class Unproven:
    """Files of which no row has been compared with a computed one yet."""

    def __init__(self, *, batch_rows: int) -> None:
        """Compare at most `batch_rows` rows at a time."""
        self._batch_rows = batch_rows
        self._waiting: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Let a file wait, with those of its rows that this process can compute.

        A file with none of them is not looked at here: its rows are compared by the ranks that can compute them.
        """
        if len(sample.keys):
            self._waiting.append(sample)

    def keys(self) -> Keys:
        """Return the keys of the rows that `compare` needs next, at most a batch; none where nothing waits."""
        return np.concatenate([np.empty(0, np.int64), *(sample.keys for sample in self._next())])

    def compare(self, batch: Tensor, *, steady: bool) -> None:
        """Compare the rows of `keys` with `batch`, (batch_rows, ...), as computed for them, the rest padding.

        Args:
            batch: what a run without the cache would get.
            steady: a row's bits do not depend on its place in a batch, so that they can be asked for.

        Raises:
            CacheFault: a file holds something else.
        """
        first = 0
        for sample in self._next():
            computed = batch[first : first + len(sample.keys)]
            _compare(sample.file, sample.rows, computed, like=batch, exact=steady and sample.exact)
            first += len(sample.keys)
        del self._waiting[: self._batch_rows]

    def _next(self) -> list[Sample]:
        """Return files with a few rows of each, spread over what they hold."""
        samples = self._waiting[: self._batch_rows]
        chosen = []
        for sample in samples:
            count = min(len(sample.keys), self._batch_rows // len(samples))
            at = np.linspace(0, len(sample.keys) - 1, count).astype(np.int64)
            chosen.append(replace(sample, keys=sample.keys[at], rows=sample.rows[at]))
        return chosen


def _compare(file: ActivationFile, rows: Keys, computed: Tensor, *, like: Tensor, exact: bool) -> None:
    """Refuse `file` where its `rows` are not `computed`, a part of the whole forward `like`."""
    row_format = file.manifest.row
    ours = RowFormat.of(like, stored=row_format.stored)
    if not row_format.same_rows(ours):
        raise CacheFault(
            f"cache file {file.path} refused: it holds rows of {row_format}, this run computes {ours}; remove it or "
            "give another --cache-dir"
        )
    theirs, mine = file.read(torch.from_numpy(rows)), row_format.pack(computed)
    if torch.equal(bytes_of(mine), bytes_of(theirs)):
        return
    difference = _relative_difference(mine, theirs)
    if exact or not difference <= MOST_DIFFERENT:
        raise CacheFault(
            f"cache file {file.path} refused: its rows are not what this run computes (relative difference "
            f"{difference:.2g} in {len(rows)} rows compared), though its fingerprint says so; remove it or give "
            "another --cache-dir"
        )


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of a row, as a part of its norm; NaN where either holds one."""
    ours, theirs = ours.double(), theirs.double()
    norms = ours.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return float(((ours - theirs).norm(dim=1) / norms).max())
