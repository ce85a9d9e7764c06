"""When votes are held, and when the cut may be expected to move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.voting.criteria import Evidence
from hvfreeze.freezing.voting.proposer import USABLE_INTERVALS, Proposer
from hvfreeze.runs.moves import Move


@dataclass
class Length:
    """How long training lasts, where that may be planned anew: who does changes it here, on all ranks alike."""

    epochs: int


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When votes are held, in optimizer steps, and how long training lasts."""

    interval: int
    warmup: int
    steps_per_epoch: int
    num_epochs: int
    plan: Length | None = None
    """Tells the epochs instead of `num_epochs`, for training whose length changes while it lasts."""

    @classmethod
    def of(
        cls, settings: FreezeConfig, *, steps_per_epoch: int, num_epochs: int, plan: Length | None = None
    ) -> Cadence:
        """Return the settings' cadence: by default votes twice an epoch, from the end of the first epoch on."""
        return cls(
            interval=settings.interval or max(1, steps_per_epoch // 2),
            warmup=steps_per_epoch if settings.freeze_warmup is None else settings.freeze_warmup,
            steps_per_epoch=steps_per_epoch,
            num_epochs=num_epochs,
            plan=plan,
        )

    @property
    def epochs(self) -> int:
        """Epochs that training lasts, as is planned now."""
        return self.num_epochs if self.plan is None else self.plan.epochs

    @property
    def first_vote(self) -> int:
        """The step after which the first vote is due, should the run last that long."""
        return self.warmup or self.interval

    def ends_interval(self, step: int) -> bool:
        """Tell whether an interval ends after `step` steps; the first vote's interval ends at the warm-up's end."""
        return step > 0 and (step - self.warmup) % self.interval == 0

    def interval_ends(self, after: int, last: int) -> range:
        """Return the steps after `after`, up to `last`, at which an interval ends."""
        first = after + 1 + (self.warmup - after - 1) % self.interval
        return range(first, last + 1, self.interval)

    def votes(self, step: int) -> bool:
        """Tell whether there is a vote after `step` steps; a vote after the last step could save nothing."""
        return self.ends_interval(step) and step >= self.warmup and step < self.steps_per_epoch * self.epochs


def epochs_until_move(
    cadence: Cadence, proposer: Proposer, evidence: Evidence, *, step: int, history: Sequence[Move]
) -> float:
    """Return the epochs from `step` until `proposer` may be expected to move the cut; infinity where it cannot.

    What a schedule will do is certain. A criterion that looks at gradients moves at the earliest after two whole
    intervals, and from then on as often as it has done so far: the expected number of votes is one over the share of
    votes that have moved the cut, by Laplace's rule, so that a cut that stays is expected to stay longer and longer.
    """
    if evidence.cut == evidence.num_blocks - 1:
        return math.inf
    criterion = proposer.criterion
    waiting = max(0, USABLE_INTERVALS - proposer.intervals) if criterion.watches_gradients else 0
    for later in cadence.interval_ends(step, cadence.steps_per_epoch * cadence.epochs - 1):
        waiting -= 1
        then = replace(evidence, epoch=later / cadence.steps_per_epoch)
        wants = criterion.watches_gradients or criterion.propose(then).cut > evidence.cut
        if waiting <= 0 and cadence.votes(later) and wants:
            more = votes_until_move(cadence, history, step=step) - 1 if criterion.watches_gradients else 0.0
            return (later - step + more * cadence.interval) / cadence.steps_per_epoch
    return math.inf


def votes_until_move(cadence: Cadence, history: Sequence[Move], *, step: int) -> float:
    """Return how many votes with two whole intervals before them it takes to move the cut, by the past up to `step`."""
    held = moved = 0
    for stay, later in zip(history, [*history[1:], None], strict=True):
        # The interval in which the cut moves is dropped; before the first step there is none.
        intervals = -1 if stay.step > 0 or stay.cut > 0 else 0
        for end in cadence.interval_ends(stay.step, later.step if later else step):
            intervals += 1
            held += intervals >= USABLE_INTERVALS and cadence.votes(end)
        moved += later is not None
    return (held + 2) / (moved + 1)
