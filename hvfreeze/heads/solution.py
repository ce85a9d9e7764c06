"""The numbers of a fitted head, whichever solver found it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol


class Stopped(Exception):
    """Some rank wants to stop before there is a solution."""


class Stop(Protocol):
    """Shows the progress of a fit, and tells whether this rank wants to stop."""

    def __call__(self, rows: int, note: str = "", /) -> bool:
        """Take how many rows have their features, 0 when all have, and how far the solver is, in words."""


@dataclass(frozen=True)
class PenaltyTrial:
    """One penalty that was tried, and the result of its head on the held-out rows; accuracy is 0 to 1."""

    penalty: float
    held_out_loss: float
    held_out_accuracy: float
    steps: int
    whole: bool = True
    """Whether it was fitted to all rows that are not held out, not to a part of them."""
    metrics: dict[str, float] | None = None
    """Of held-out rows, where more than the accuracy is asked for; of a linear head the chosen penalty's alone."""
    thresholds: tuple[float, ...] = ()
    """By which held-out rows would have the best labels, see `tasks.MultiLabel`."""


@dataclass(frozen=True)
class Solution:
    """The numbers of a fitted head, equal on all ranks."""

    penalty: float
    """The chosen one."""
    trials: tuple[PenaltyTrial, ...]
    """In the order tried; empty where the penalty was given."""
    loss: float
    """Mean over all rows, without the penalty."""
    rows: int
    """Of all ranks."""
    steps: int
    """Of the last fit, with the chosen penalty."""
    passes: int
    """Over the rows, everything counted."""
    error: float
    """Distance of the fit from the exact solution, at most about, as a share of it."""
    converged: bool
    """Whether `error` reached the tolerance."""
    exchanged_bytes: int
    """That each rank gave to allreduces; 0 alone."""
    compared_with: int | None = field(default=None, kw_only=True)
    """Centres of a kernel head; None for a linear head."""
    left_out: tuple[int, ...] = field(default=(), kw_only=True)
    """Samples, by number, whose features are so extreme that nothing was fitted to them."""

    @property
    def chosen(self) -> PenaltyTrial | None:
        """The trial of the chosen penalty; None where the penalty was given."""
        return next((trial for trial in self.trials if trial.penalty == self.penalty), None)

    def numbers(self) -> Solution:
        """Return it without the tensors, which whoever keeps it would keep."""
        return Solution(**{each.name: getattr(self, each.name) for each in fields(Solution)})

    def summary(self) -> dict[str, Any]:
        """Return the numbers, without the tensors, for a file."""
        return {
            **vars(self.numbers()),
            "trials": [asdict(trial) for trial in self.trials],
            "left_out": list(self.left_out),
        }
