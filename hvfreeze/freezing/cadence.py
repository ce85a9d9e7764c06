"""When votes are held."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.criteria import CRITERIA, NEEDS_GRADIENTS, Evidence
from hvfreeze.freezing.proposer import Proposer


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When votes are held, in optimizer steps, and how long training lasts."""

    interval: int
    warmup: int
    steps_per_epoch: int
    num_epochs: int

    @classmethod
    def of(cls, settings: FreezeConfig, *, steps_per_epoch: int, num_epochs: int) -> Cadence:
        """Return the settings' cadence: by default votes twice an epoch, from the end of the first epoch on."""
        return cls(
            interval=settings.interval or max(1, steps_per_epoch // 2),
            warmup=steps_per_epoch if settings.freeze_warmup is None else settings.freeze_warmup,
            steps_per_epoch=steps_per_epoch,
            num_epochs=num_epochs,
        )

    def ends_interval(self, step: int) -> bool:
        """Tell whether an interval ends after `step` steps; the first vote's interval ends at the warm-up's end."""
        return step > 0 and (step - self.warmup) % self.interval == 0

    def votes(self, step: int) -> bool:
        """Tell whether there is a vote after `step` steps; a vote after the last step could save nothing."""
        return self.ends_interval(step) and step >= self.warmup and step < self.steps_per_epoch * self.num_epochs


def epochs_until_move(cadence: Cadence, proposer: Proposer, evidence: Evidence, step: int) -> float:
    """Return the epochs from `step` until `proposer` can move the cut at the earliest; infinity where it cannot."""
    if evidence.cut == evidence.num_blocks - 1:
        return math.inf
    needs_gradients = proposer.name in NEEDS_GRADIENTS
    # A rate of change takes two whole intervals at this cut.
    waiting = max(0, 2 - proposer.intervals) if needs_gradients else 0
    for later in range(step + 1, cadence.steps_per_epoch * cadence.num_epochs):
        if not cadence.ends_interval(later):
            continue
        waiting -= 1
        then = replace(evidence, epoch=later / cadence.steps_per_epoch)
        wants = needs_gradients or CRITERIA[proposer.name](then).cut > evidence.cut
        if waiting <= 0 and cadence.votes(later) and wants:
            return (later - step) / cadence.steps_per_epoch
    return math.inf
