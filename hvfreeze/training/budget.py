"""The budget of a run: work for --epochs, seconds for --time-budget, and the measured rate between them.

The unit of work is a forward pass of one sample through the whole network, per replica. The rate measured so far
converts seconds to work. All numbers are equal on all ranks: they come from rank 0's clock at the end of a verb.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvfreeze.comm.world import World
from hvfreeze.data.batches import TrainFeed
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import state_kept
from hvfreeze.prefix.features import Halves
from hvfreeze.timing import SECONDS, min_seconds

BACKWARD = 3.0
"""Work of a backward pass with its share of the update, in forward passes, as measured on CPUs."""
UPDATE = 1e3
"""Time to exchange and update a parameter, in floating-point operations of a forward pass, as measured."""
LINEAR = 0.15
"""Work of fitting a linear head per row, without the forward pass for its features."""
POINT, PAIR = 1.24e4, 1.6e3
"""Time to project a feature and to compute a kernel value, in operations of a forward pass; for 2,500-50,000 rows."""
PROBED, PROBE_FIT = 1.2, 1e8
"""Work of a probe per row: the forward pass, and the fit in operations of a forward pass."""
LEAST_FORWARD = 5e7
"""Minimum operations of a forward pass: smaller networks take no less time, because operator calls dominate."""
RESERVED, RESERVED_SECONDS = 0.005, 0.5
"""Reserve for the end of a run, which checks and writes the model: share of the time budget, and seconds."""
SECONDS_BETWEEN_PLANS = 2.0
TIMED = 0.01
"""Share of a time budget for timing a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work per verb, for one replica."""

    forward: float = LEAST_FORWARD
    """Floating-point operations of a forward pass of one sample."""
    parameters: int = 0
    frozen: float = 0.0
    """Share of the forward pass before the cut, which has no backward pass."""
    evaluated: float = 0.0
    """Number of evaluation samples."""
    held_out: float = 0.0
    """Number of held-out training samples, with their flips."""
    rows: float = 0.0
    """Number of rows that a head is fitted to: samples times views."""
    looks: int = 1
    """Forward passes per row: 2 for a head that averages over flips."""
    kernel: tuple[int, int] | None = None
    """Number of features and of centres of a kernel head."""
    probed: float = 0.0
    """Number of rows of a probe."""

    def step(self, batch: int) -> float:
        """Return the work of an optimizer step on `batch` samples."""
        return batch * (1 + BACKWARD * (1 - self.frozen)) + self.update

    @property
    def update(self) -> float:
        """Work of exchanging gradients and updating parameters."""
        return UPDATE * self.parameters / max(self.forward, LEAST_FORWARD)

    @property
    def head_fit(self) -> float:
        """Work of fitting the head to all rows."""
        fit = LINEAR
        if self.kernel is not None:
            width, centres = self.kernel
            fit = (POINT * width + PAIR * centres) / max(self.forward, LEAST_FORWARD)
        return self.rows * (self.looks + fit)

    @property
    def probe(self) -> float:
        """Work of a probe of the features."""
        return self.probed * (PROBED + PROBE_FIT / max(self.forward, LEAST_FORWARD))


@dataclass(kw_only=True)
class Budget:
    """The remaining work and time of a run.

    Attributes:
        work: the work per verb.
        world: the ranks.
        limit: total work of the run.
        seconds: total seconds of the run, with set-up; None without a time budget.
        rate: measured work per second.
        started: `time.monotonic()` at the start of this process's work on the run.
    """

    work: Work
    world: World
    limit: float = math.inf
    seconds: float | None = None
    rate: float = 1.0
    started: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    """Work spent by the end of the last verb; with a time budget, seconds."""
    begun: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """State of the budget at the start of the recipe; see `mark`."""
    _before: float = 0.0
    """Seconds spent by earlier jobs of the run."""
    _done: tuple[float, float] | None = None
    """Work and seconds of all verbs so far."""

    def elapsed(self) -> float:
        """Return the seconds since the run began, on this rank's clock."""
        return self._before + time.monotonic() - self.started

    def left(self) -> float:
        """Return the remaining work at the end of the last verb."""
        if self.seconds is None:
            return self.limit - self.spent
        return (self.seconds - reserve_of(self.seconds) - self.spent) * self.rate - self.work.evaluated

    def deadline(self, work: float) -> float | None:
        """Return the seconds since the run began at which `work` should be done; None without a time budget."""
        return None if self.seconds is None else self.spent + work / self.rate

    def begin(self) -> None:
        """Count set-up as spent. Collective."""
        if self.seconds is not None:
            self.spent = self.world.broadcast_object(self.elapsed(), name="budget.begin")
        self.begun = self.mark()

    def end(self, work: float) -> None:
        """Count the verb that has ended and update the rate. Collective."""
        if self.seconds is None:
            self.spent += work
            return
        now = self.world.broadcast_object(self.elapsed(), name="budget.end")
        # The timing before the first verb counts as one second.
        done, took = self._done or (self.rate, 1.0)
        if work > 0:
            self._done = done + work, took + now - self.spent
            self.rate = self._done[0] / self._done[1]
        self.spent = now

    def mark(self) -> list[float]:
        """Return the state of the budget for the journal."""
        return [self.spent, self.rate, *(self._done or ())]

    def recall(self, mark: Sequence[float]) -> None:
        """Restore the state of the budget at the end of a recorded verb."""
        self.spent, self.rate = mark[:2]
        self._done = (mark[2], mark[3]) if len(mark) == 4 else None

    def check(self, needed: float, *, what: str) -> None:
        """Raise UsageError, on all ranks, if a time budget is too short for the minimum work of a run."""
        if self.seconds is not None and needed > self.left():
            least = self.spent + reserve_of(self.seconds) + (needed + self.work.evaluated) / self.rate
            raise UsageError(
                f"--time-budget ({self.seconds:.0f}s) must be at least about {1.1 * least:.0f}s here, for set-up, "
                f"{what} and an evaluation: a timed forward pass takes {1e3 / self.rate:.2g} ms per sample"
            ).on_all_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"elapsed": self.elapsed(), "begun": self.begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint, which counts as spent, as does the set-up of this process."""
        self._before, self.begun = float(state["elapsed"]), list(state["begun"])
        self.recall(self.begun)


def reserve_of(seconds: float) -> float:
    """Return the seconds of a time budget that are reserved for the end of the run."""
    return RESERVED_SECONDS + RESERVED * seconds


@dataclass
class Pace:
    """The number of training steps before a deadline, updated as steps are timed by rank 0's clock."""

    budget: Budget
    deadline: float
    """Deadline in seconds of the run."""
    steps_per_evaluation: float
    evaluation_seconds: float
    """Seconds of the last evaluation during training, before the first one as estimated."""
    _evaluating: float = 0.0
    """Seconds spent in evaluations since the last measurement."""
    _measured: tuple[float, int] | None = None
    """Seconds and steps at the last measurement."""
    _plan_at: int = 0

    def after_step(self, done: int, planned: int) -> int:
        """Return the total number of steps after `done` steps. Collective, after every step."""
        now = self.budget.elapsed()
        if self._measured is None:
            # The first step is slower: it also initializes libraries and memory.
            self._measured, self._plan_at, self._evaluating = (now, done), done + 1, 0.0
        if done < min(self._plan_at, planned):
            return planned
        then, made = self._measured
        steps, wait = done, 1
        if done > made:
            seconds = max(1e-6, (now - then - self._evaluating) / (done - made))
            each = seconds + self.evaluation_seconds / self.steps_per_evaluation
            steps = done + max(0, int((self.deadline - now) / each))
            wait = max(1, min((steps - done) // 2, round(SECONDS_BETWEEN_PLANS / seconds)))
        else:
            steps = planned
        steps, self._plan_at = self.budget.world.broadcast_object((steps, done + wait), name="budget.steps")
        self._measured, self._evaluating = (now, done), 0.0
        return steps

    def allows_evaluation(self) -> bool:
        """Return True if an evaluation would end before the deadline, at which the last one begins. Collective."""
        ends = self.budget.elapsed() + self.evaluation_seconds
        return self.budget.world.broadcast_object(ends <= self.deadline, name="budget.evaluation")

    def after_evaluation(self, seconds: float) -> None:
        """Record the seconds of an evaluation during training."""
        self._evaluating += seconds
        self.evaluation_seconds = seconds


def time_forward(chain: Chain, feed: TrainFeed, *, precision: str, world: World, seconds: float) -> float:
    """Time a forward pass on the slowest rank and return the work per second; the model is unchanged. Collective."""
    batch, halves = feed.epoch(0)[0], Halves(chain, precision)
    ids, views = (np.resize(part, feed.rows) for part in (batch.ids, batch.views))

    def forward() -> None:
        chain.model.eval()
        halves.prefix(feed.images.load(ids, views), 0, len(chain.blocks))

    with state_kept(chain.model), torch.no_grad():
        mine = min_seconds(forward, within=min(SECONDS, TIMED * seconds))
    return feed.rows / max(world.allgather_object(mine, name="budget.timing"))
