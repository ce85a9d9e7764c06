"""How the runs of `analysis.peers` are named, and which learning rate was the best for each of their kinds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.sweeps.rows import Row

PROBE_EPOCHS, PROBE_VIEWS = 10, 2
"""Of linear probing; all epochs but the first two read the cache, and cost next to nothing."""
LABEL = re.compile(r"(?:lr(?P<lr>[^-]+)-)?n(?P<samples>\d+)-(?P<peer>.+)-e(?P<epochs>\d+)")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way of fine-tuning on so many samples for a budget of epochs."""

    samples: int
    peer: str
    epochs: int

    @property
    def label(self) -> str:
        """What its runs are called."""
        return f"n{self.samples}-{self.peer}-e{self.epochs}"

    def tried(self, lr: float) -> str:
        """Return what the run is called that tries a learning rate for it."""
        return f"lr{lr:g}-{self.label}"


def cell_of(label: str) -> Cell:
    """Return the cell that a label is about."""
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"label ({label}) must look like n5000-full-e4")
    return Cell(samples=int(match["samples"]), peer=match["peer"], epochs=int(match["epochs"]))


def best_rates(rows: Sequence[Row]) -> dict[Cell, float]:
    """Return the learning rate of every cell that was best on held-out samples; cells without tries are left out."""
    tried: dict[Cell, list[tuple[float, float]]] = {}
    for row in rows:
        if row["validation_fraction"]:
            tried.setdefault(cell_of(str(row["label"])), []).append((float(row["test_accuracy"]), float(row["lr"])))
    return {cell: max(found)[1] for cell, found in tried.items()}
