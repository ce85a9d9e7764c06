"""Where rows can be read from, once they have been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.manifest import Manifest
from hvfreeze.cache.file.rows import Keys

WHOLE = slice(None)


class Part(Protocol):
    """A file, published or not, whose rows can be read."""

    @property
    def path(self) -> Path:
        """Its final name."""

    @property
    def manifest(self) -> Manifest:
        """What its rows are."""

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of these rows, given as int64 row numbers."""

    def is_at(self, path: Path) -> bool:
        """Tell whether `path` is this very file."""

    def delete(self, budget: Budget) -> None:
        """Remove the file; its rows stay readable from here."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a batch lie: (part, positions in the batch, row numbers) for each part that has some."""

    num_rows: int
    pieces: Sequence[tuple[Part, Tensor | slice, Tensor]]

    @classmethod
    def of(cls, numbers: Keys, rows: Keys, *, among: Sequence[Part]) -> Place:
        """Return the place with row `rows[i]` of part `among[numbers[i]]` at each position i."""
        if len(among) == 1 or (numbers == numbers[0]).all():
            return cls(len(rows), ((among[numbers[0]], WHOLE, torch.from_numpy(rows)),))
        pieces = []
        for number in np.unique(numbers):
            where = np.flatnonzero(numbers == number)
            pieces.append((among[number], torch.from_numpy(where), torch.from_numpy(rows[where])))
        return cls(len(rows), pieces)

    def read(self) -> Tensor:
        """Return the rows (num_rows, elements) as they are stored.

        Raises:
            CacheFault: a file is damaged, truncated or changed, or an earlier write has failed.
        """
        (part, where, rows), *others = self.pieces
        raw = part.read(rows)
        if others:
            first, raw = raw, torch.empty(self.num_rows, raw.shape[1], dtype=raw.dtype)
            raw[where] = first
            for part, where, rows in others:
                raw[where] = part.read(rows)
        return raw
