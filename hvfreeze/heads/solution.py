"""The numbers of a solved head, whichever solver found it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol


class Stopped(Exception):
    """Some rank wants to stop before there is a solution."""


class Stop(Protocol):
    """Shows how far a solution is, and tells whether this rank wants to stop."""

    def __call__(self, rows: int, note: str = "", /) -> bool:
        """Take how many rows have their features, 0 when all have, and how far the solution is, in words."""


@dataclass(frozen=True)
class PenaltyTrial:
    """One penalty that was tried, and the result of its head on the held-out rows; accuracy is 0 to 1."""

    penalty: float
    held_out_loss: float
    held_out_accuracy: float
    steps: int
    whole: bool = True
    """Whether it was fitted to all rows that are not held out, not to a part of them."""


def doubt(samples: int) -> float:
    """Return which part of each label is spread over the other classes where so many samples choose how sure a head is.

    Laplace's rule of succession: as if one sample more were right, and one wrong. Without it, a few samples that are
    all right would find infinite certainty the best.
    """
    return 1 / (samples + 2)


@dataclass(frozen=True)
class MirrorTrial:
    """What samples, as they are, say of heads that others were fitted to, with mirror images of these and without."""

    loss_with: float
    loss_without: float
    accuracy_with: float
    """0 to 1."""
    accuracy_without: float
    samples: int
    """By which this was judged."""

    @property
    def taken(self) -> bool:
        """Whether mirror images are fitted.

        They help with most images, so they are left out only where the loss without them is lower by more than
        chance: losses of n samples are known to about 1 / sqrt(n) of themselves.
        """
        return self.loss_without >= (1 - 1 / math.sqrt(self.samples)) * self.loss_with

    def line(self) -> str:
        """Return it in words."""
        ours, theirs = 100 * self.accuracy_with, 100 * self.accuracy_without
        chance = "; a difference within chance" if self.taken and self.loss_without < self.loss_with else ""
        return (
            f"mirror images are {'taken' if self.taken else 'left out'}: with heads that were not fitted to them, "
            f"{ours:.1f} % of {self.samples} samples are right where mirror images are fitted "
            f"(loss {self.loss_with:.3f}), {theirs:.1f} % where they are not ({self.loss_without:.3f}){chance}"
        )


@dataclass(frozen=True)
class Solution:
    """The numbers of a solved head, equal on all ranks."""

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
    """How far from the exact solution the fit may be, as a part of it."""
    converged: bool
    """Whether `error` reached the tolerance."""
    exchanged_bytes: int
    """That each rank gave to allreduces; 0 alone."""
    mirror: MirrorTrial | None = field(default=None, kw_only=True)
    """Where held-out samples have decided about mirror images."""
    compared_with: int | None = field(default=None, kw_only=True)
    """How many rows all were compared with; None for a head that compares none."""
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
            "mirror": self.mirror and asdict(self.mirror) | {"taken": self.mirror.taken},
            "left_out": list(self.left_out),
        }
