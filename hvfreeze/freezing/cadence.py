"""The schedule of votes, and the predicted time until the cut changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.criteria import CRITERIA, USABLE_INTERVALS, Evidence, Proposer
from hvfreeze.runs.reading import Move
from hvfreeze.wording import plural


@dataclass
class Length:
    """The length of training. Its owner may change it in place while the run trains, equally on all ranks."""

    epochs: int


INTERVAL_STEPS = 100
"""Steps between votes if the length of an epoch is unknown."""
WARMUP_INTERVALS = 5
"""Intervals before the first vote if the length of an epoch is unknown."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The schedule of votes, in optimizer steps, and the length of training.

    Without `steps_per_epoch` the length of an epoch is unknown; without `num_epochs` the end of training is. Criteria
    that follow a schedule need both; see `check_schedules`.
    """

    interval: int
    """Steps between votes."""
    warmup: int
    """Steps before the first vote."""
    steps_per_epoch: int | None = None
    num_epochs: int | None = None
    plan: Length | None = None
    """Replaces `num_epochs` if the length may change during training."""

    @classmethod
    def of(
        cls,
        settings: FreezeConfig,
        *,
        steps_per_epoch: int | None = None,
        num_epochs: int | None = None,
        plan: Length | None = None,
    ) -> Cadence:
        """Return the cadence of the settings.

        By default, votes are held twice an epoch from the end of the first epoch on; if the length of an epoch is
        unknown, every `INTERVAL_STEPS` steps.
        """
        interval = settings.interval or (INTERVAL_STEPS if steps_per_epoch is None else max(1, steps_per_epoch // 2))
        first = WARMUP_INTERVALS * interval if steps_per_epoch is None else steps_per_epoch
        return cls(
            interval=interval,
            warmup=first if settings.freeze_warmup is None else settings.freeze_warmup,
            steps_per_epoch=steps_per_epoch,
            num_epochs=num_epochs,
            plan=plan,
        )

    @property
    def epochs(self) -> float:
        """Planned epochs of training; infinity if unknown."""
        if self.plan is not None:
            return self.plan.epochs
        return math.inf if self.num_epochs is None else self.num_epochs

    @property
    def last_step(self) -> float:
        """The last step of training; infinity if unknown."""
        return math.inf if self.steps_per_epoch is None else self.steps_per_epoch * self.epochs

    def described(self) -> str:
        """Return the schedule of votes in words."""
        return f"a vote every {plural(self.interval, 'step')}, the first after step {self.first_vote}"

    def epochs_in(self, steps: float) -> float:
        """Return `steps` in epochs; 0 if the length of an epoch is unknown."""
        return 0.0 if self.steps_per_epoch is None else steps / self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """Return the number of the epoch of a step; 0 if the length of an epoch is unknown."""
        return 0 if self.steps_per_epoch is None else step // self.steps_per_epoch

    @property
    def first_vote(self) -> int:
        """The step after which the first vote is due, if the run lasts that long."""
        return self.warmup or self.interval

    def ends_interval(self, step: int) -> bool:
        """Return True if an interval ends after `step` steps; the first vote's interval ends with the warm-up."""
        return step > 0 and (step - self.warmup) % self.interval == 0

    def next_end(self, after: int) -> int:
        """Return the first step after `after` at which an interval ends."""
        return after + 1 + (self.warmup - after - 1) % self.interval

    def interval_ends(self, after: int, last: int) -> range:
        """Return the steps after `after`, up to `last`, at which intervals end."""
        return range(self.next_end(after), last + 1, self.interval)

    def votes(self, step: int) -> bool:
        """Return True if a vote is held after `step` steps; a vote after the last step would save nothing."""
        return self.ends_interval(step) and step >= self.warmup and step < self.last_step


def check_schedules(settings: FreezeConfig, *, steps_per_epoch: int | None, num_epochs: int | None) -> None:
    """Raise UsageError if a criterion follows a schedule and the length of training is unknown."""
    given = {"steps_per_epoch": steps_per_epoch, "num_epochs": num_epochs}
    lacking = [f"{name}=" for name, value in given.items() if value is None]
    for name in [settings.freeze, *settings.shadow_names()] if lacking else []:
        if name in CRITERIA and not CRITERIA[name].watches_gradients:
            raise UsageError(
                f"freeze ({name}) follows a schedule and needs {' and '.join(lacking)}; give the optimizer steps "
                "per epoch and the number of epochs, or choose a criterion that uses gradients"
            )


def epochs_until_move(
    cadence: Cadence, proposer: Proposer, evidence: Evidence, *, step: int, history: Sequence[Move]
) -> float:
    """Return the expected epochs from `step` until `proposer` changes the cut; infinity if it cannot.

    A criterion that follows a schedule is predicted exactly. A criterion that uses gradients can change the cut after
    two whole intervals at the earliest. From then on, the expected number of votes is one over the share of votes that
    changed the cut so far, by Laplace's rule. So the longer a cut has stayed, the longer it is expected to stay.
    """
    if evidence.cut == evidence.num_blocks - 1:
        return math.inf
    if cadence.steps_per_epoch is None:
        return 0.0  # the cut may change at any time
    criterion = proposer.criterion
    waiting = max(0, USABLE_INTERVALS - proposer.intervals) if criterion.watches_gradients else 0
    # Without an end of training, search up to the first vote after the warm-up and the usable intervals.
    within = max(step, cadence.warmup) + (USABLE_INTERVALS + 2) * cadence.interval
    last = within if math.isinf(cadence.last_step) else int(cadence.last_step) - 1
    for later in cadence.interval_ends(step, last):
        waiting -= 1
        then = replace(evidence, epoch=cadence.epochs_in(later))
        wants = criterion.watches_gradients or criterion.propose(then) > evidence.cut
        if waiting <= 0 and cadence.votes(later) and wants:
            more = votes_until_move(cadence, history, step=step) - 1 if criterion.watches_gradients else 0.0
            return cadence.epochs_in(later - step + more * cadence.interval)
    return math.inf


def votes_until_move(cadence: Cadence, history: Sequence[Move], *, step: int) -> float:
    """Return the expected number of votes (after two whole intervals) per change of the cut, up to `step`."""
    held = moved = 0
    for stay, later in zip(history, [*history[1:], None], strict=True):
        # The interval after a change of the cut is dropped; a run that starts at cut 0 has none to drop.
        intervals = -1 if stay.step > 0 or stay.cut > 0 else 0
        for end in cadence.interval_ends(stay.step, later.step if later else step):
            intervals += 1
            held += intervals >= USABLE_INTERVALS and cadence.votes(end)
        moved += later is not None
    return (held + 2) / (moved + 1)
