"""Where rows can be read from, once they have been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hvfreeze.cache.budget import Budget
from hvfreeze.cache.manifest import Manifest


class Part(Protocol):
    """A file, published or not, whose rows can be read."""

    @property
    def path(self) -> Path:
        """Its final name."""

    @property
    def manifest(self) -> Manifest:
        """What its rows are."""

    def read(self, rows: Tensor) -> Tensor:
        """A copy (len(rows), elements) of these rows, given as int64 row numbers."""

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this very file."""

    def delete(self, budget: Budget) -> None:
        """Removes the file; its rows stay readable from here."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a batch lie: (part, positions in the batch, row numbers) for each part that has some."""

    num_rows: int
    pieces: Sequence[tuple[Part, Tensor | slice, Tensor]]
