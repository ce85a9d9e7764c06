"""How the runs of `analysis.peers` are named, and which learning rate was the best for each of their kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from analysis.sweeps.rows import Row

PROBE_EPOCHS, PROBE_VIEWS = 10, 2
"""Of linear probing; all epochs but the first two read the cache, and cost next to nothing."""
NEAR = 0.01
"""Less than the standard error of an accuracy on a thousand held-out samples."""
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


def best_rates(rows: Sequence[Row], known: Mapping[Cell, float] = MappingProxyType({})) -> dict[Cell, float]:
    """Return the learning rate of every cell that was best on held-out samples; cells without tries are left out.

    Args:
        rows: of an experiment.
        known: rates of elsewhere, which are kept where no other is better by more than NEAR.
    """
    tried: dict[Cell, dict[float, float]] = {}
    for row in rows:
        if row["validation_fraction"]:
            tried.setdefault(cell_of(str(row["label"])), {})[float(row["lr"])] = float(row["test_accuracy"])
    return {cell: _best(found, known.get(cell)) for cell, found in tried.items()}


def _best(tried: Mapping[float, float], known: float | None) -> float:
    """Return the rate with the highest accuracy, of equals the largest, or the known one where that is near."""
    best = max(tried, key=lambda lr: (tried[lr], lr))
    return known if known is not None and tried.get(known, 0.0) >= tried[best] - NEAR else best
