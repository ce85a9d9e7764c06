"""What is told of a solved head, however it was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


class Stopped(Exception):
    """Some rank wants to stop before there is a solution."""


@dataclass(frozen=True)
class Trial:
    """One penalty that was tried, and what the head fitted with it makes of the held-out rows; accuracy is 0 to 1."""

    penalty: float
    held_out_loss: float
    held_out_accuracy: float
    steps: int
    whole: bool = True
    """Whether it was fitted to all rows that are not held out, not to a part of them."""


@dataclass(frozen=True)
class Solution:
    """The numbers of a solved head, equal on all ranks.

    Attributes:
        penalty: the chosen one.
        trials: the penalties in the order tried; empty where the penalty was given.
        loss: mean loss over all rows, without the penalty.
        rows: number of rows of all ranks.
        steps: of the last fit, with the chosen penalty.
        passes: over the rows, everything counted.
        error: how far from the exact solution the fit may be, as a part of it.
        converged: whether `error` reached the tolerance.
        exchanged_bytes: that each rank gave to allreduces; 0 alone.
    """

    penalty: float
    trials: tuple[Trial, ...]
    loss: float
    rows: int
    steps: int
    passes: int
    error: float
    converged: bool
    exchanged_bytes: int

    @property
    def chosen(self) -> Trial | None:
        """The trial of the chosen penalty, what it makes of held-out rows; None where the penalty was given."""
        return next((trial for trial in self.trials if trial.penalty == self.penalty), None)

    def summary(self) -> dict[str, Any]:
        """Return the numbers, without the tensors, for a file."""
        plain = {field.name: getattr(self, field.name) for field in fields(Solution)}
        return {**plain, "trials": [asdict(trial) for trial in self.trials]}
