"""Full fine-tuning trained for several numbers of epochs: what anybody can do instead of freezing.

Each budget is a training of its own, with the learning rate's whole schedule; none is a longer one stopped early.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Budget:
    """Full fine-tuning for some epochs: training time in seconds, test accuracy 0-1."""

    seconds: float
    accuracy: float
    epochs: int


@dataclass(frozen=True)
class Front:
    """The budgets that were measured."""

    budgets: tuple[Budget, ...] = ()

    def seconds(self, epochs: int) -> float | None:
        """Return the training time for that many epochs, None where it was not measured."""
        return next((budget.seconds for budget in self.budgets if budget.epochs == epochs), None)

    def accuracy(self, seconds: float) -> float:
        """Return the accuracy after so long a training: between budgets linear, beyond them that of the nearest.

        Below the shortest budget that is more than full fine-tuning reaches in the time.
        """
        points = sorted(self.budgets)
        if seconds <= points[0].seconds:
            return points[0].accuracy
        for before, after in itertools.pairwise(points):
            if seconds <= after.seconds:
                share = (seconds - before.seconds) / (after.seconds - before.seconds)
                return before.accuracy + share * (after.accuracy - before.accuracy)
        return points[-1].accuracy
