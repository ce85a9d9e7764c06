"""The results of a fit that all solvers share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol


class Stopped(Exception):
    """A rank stopped the fit."""


class Stop(Protocol):
    """A callback for the progress of a fit, which may stop it."""

    def __call__(self, rows: int, note: str = "", /) -> bool:
        """Take the number of rows with features, 0 when all have them, and the solver's progress as text."""


@dataclass(frozen=True)
class PenaltyTrial:
    """A penalty and the held-out result of its head; accuracy is 0-1."""

    penalty: float
    held_out_loss: float
    held_out_accuracy: float
    steps: int
    whole: bool = True
    """Whether it was fitted to all rows that are not held out, not to a subset."""
    metrics: dict[str, float] | None = None
    """Held-out metrics beyond accuracy, if requested; for a linear head of the chosen penalty alone."""
    thresholds: tuple[float, ...] = ()
    """Best thresholds for the held-out rows, see `tasks.MultiLabel`."""


@dataclass(frozen=True)
class Solution:
    """The results of a fit, equal on all ranks."""

    penalty: float
    """Chosen ridge penalty."""
    trials: tuple[PenaltyTrial, ...]
    """Results of all penalties, in order; empty for a given penalty."""
    loss: float
    """Mean loss over all rows, without the penalty."""
    rows: int
    """Number of rows of all ranks."""
    steps: int
    """Steps of the final fit, with the chosen penalty."""
    passes: int
    """Total number of passes over the rows."""
    error: float
    """Estimated bound of the relative error."""
    converged: bool
    """Whether `error` reached the tolerance."""
    exchanged_bytes: int
    """Bytes that each rank sent to allreduces; 0 for a single rank."""
    compared_with: int | None = field(default=None, kw_only=True)
    """Number of centres of a kernel head; None for a linear head."""
    left_out: tuple[int, ...] = field(default=(), kw_only=True)
    """Outlier samples, by number, which the fit ignores."""

    @property
    def chosen(self) -> PenaltyTrial | None:
        """Result of the chosen penalty; None for a given penalty."""
        return next((trial for trial in self.trials if trial.penalty == self.penalty), None)

    def numbers(self) -> Solution:
        """Return the results without tensors, which would keep their memory."""
        return Solution(**{each.name: getattr(self, each.name) for each in fields(Solution)})

    def summary(self) -> dict[str, Any]:
        """Return the numbers for a file, without tensors."""
        return {
            **vars(self.numbers()),
            "trials": [asdict(trial) for trial in self.trials],
            "left_out": list(self.left_out),
        }
