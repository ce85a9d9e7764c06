"""What a run may spend: work, as --epochs counts it, or seconds, of --time-budget. One table, one measured rate.

Work is counted in forward passes of one sample through the whole network, of one replica. Seconds become work by the
rate that the run has measured so far. Every number is equal on all ranks: rank 0's clock counts, when a verb ends.
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
"""Work of a backward pass: gradients of inputs and of parameters, and the update's share, as measured on CPUs."""
UPDATE = 1e3
"""Floating-point operations of a forward pass in whose time a parameter is exchanged and updated, as measured."""
LINEAR = 0.15
"""Work of fitting a linear head, for each row beside its features."""
POINT, PAIR = 1.24e4, 1.6e3
"""Operations of a forward pass in whose time a feature is projected, and a pair of rows compared; 2,500-50,000 rows."""
PROBED, PROBE_FIT = 1.2, 1e8
"""Work of a probe for each of its rows: the forward pass; and operations in whose time the row's head is fitted."""
LEAST_FORWARD = 5e7
"""Operations of a forward pass; one of fewer takes no less time, because it calls as many operators."""
RESERVED, RESERVED_SECONDS = 0.005, 0.5
"""Part of a time budget, and seconds, for what follows the recipe: the model is checked and written."""
SECONDS_BETWEEN_PLANS = 2.0
TIMED = 0.01
"""Part of a time budget in which a forward pass is timed."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The table of work per verb, of one replica."""

    forward: float = LEAST_FORWARD
    """Floating-point operations of a forward pass of one sample."""
    parameters: int = 0
    frozen: float = 0.0
    """Share of the forward pass in front of the cut, which has no backward pass."""
    samples: float = 0.0
    """Training samples."""
    evaluated: float = 0.0
    """Evaluation samples."""
    held_out: float = 0.0
    """Held-out training samples, with their flips."""
    rows: float = 0.0
    """Rows that a head is fitted to: samples times views."""
    looks: int = 1
    """Forward passes for a row: 2 for a head that averages an image with its flip."""
    kernel: tuple[int, int] | None = None
    """Features and centres of a kernel head."""
    probed: float = 0.0
    """Rows of a probe."""

    def step(self, batch: int) -> float:
        """Return the work of an optimizer step on `batch` samples."""
        return batch * (1 + BACKWARD * (1 - self.frozen)) + self.update

    @property
    def update(self) -> float:
        """The work of exchanging gradients and updating parameters."""
        return UPDATE * self.parameters / max(self.forward, LEAST_FORWARD)

    @property
    def solve(self) -> float:
        """The work of fitting the head to all rows."""
        fit = LINEAR
        if self.kernel is not None:
            width, centres = self.kernel
            fit = (POINT * width + PAIR * centres) / max(self.forward, LEAST_FORWARD)
        return self.rows * (self.looks + fit)

    @property
    def probe(self) -> float:
        """The work of probing how good the features are."""
        return self.probed * (PROBED + PROBE_FIT / max(self.forward, LEAST_FORWARD))


@dataclass(kw_only=True)
class Budget:
    """What is left to spend.

    Attributes:
        work: the table.
        world: the ranks.
        limit: work that the run may do.
        seconds: that the run may take, set-up included; None without a time budget.
        rate: measured work per second.
        started: `time.monotonic()` when this process began to work on the run.
    """

    work: Work
    world: World
    limit: float = math.inf
    seconds: float | None = None
    rate: float = 1.0
    started: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    """Work, or seconds, when the last verb ended."""
    begun: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Where it stood when the recipe began; see `mark`."""
    _before: float = 0.0
    """Seconds that the jobs before this one spent."""
    _done: tuple[float, float] | None = None
    """Work, and the seconds that it took, of all verbs so far."""

    def elapsed(self) -> float:
        """Return the seconds since the run began, on this rank's clock."""
        return self._before + time.monotonic() - self.started

    def left(self) -> float:
        """Return the work that there is room for, by what was spent when the last verb ended."""
        if self.seconds is None:
            return self.limit - self.spent
        return (self.seconds - reserve_of(self.seconds) - self.spent) * self.rate - self.work.evaluated

    def deadline(self, work: float) -> float | None:
        """Return the second of the run at which so much work should be done; None without a time budget."""
        return None if self.seconds is None else self.spent + work / self.rate

    def begin(self) -> None:
        """Count set-up as spent. Collective."""
        if self.seconds is not None:
            self.spent = self.world.broadcast_object(self.elapsed(), name="budget.begin")
        self.begun = self.mark()

    def end(self, work: float) -> None:
        """Count the verb that has ended, and correct the rate. Collective."""
        if self.seconds is None:
            self.spent += work
            return
        now = self.world.broadcast_object(self.elapsed(), name="budget.end")
        # What was timed before the first verb counts as one second.
        done, took = self._done or (self.rate, 1.0)
        if work > 0:
            self._done = done + work, took + now - self.spent
            self.rate = self._done[0] / self._done[1]
        self.spent = now

    def mark(self) -> list[float]:
        """Return where the budget stands, for the journal."""
        return [self.spent, self.rate, *(self._done or ())]

    def recall(self, mark: Sequence[float]) -> None:
        """Stand where the budget stood when a recorded verb ended."""
        self.spent, self.rate = mark[:2]
        self._done = (mark[2], mark[3]) if len(mark) == 4 else None

    def check(self, needed: float, *, what: str) -> None:
        """Raise UsageError, on all ranks, where a time budget is too short for the least that a run does."""
        if self.seconds is not None and needed > self.left():
            least = self.spent + reserve_of(self.seconds) + (needed + self.work.evaluated) / self.rate
            raise UsageError(
                f"--time-budget ({self.seconds:.0f}s) must be at least about {1.1 * least:.0f}s here, for set-up, "
                f"{what} and an evaluation: a timed forward pass takes {1e3 / self.rate:.2g} ms per sample"
            ).on_all_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"elapsed": self.elapsed(), "begun": self.begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the budget of a checkpoint: what was spent until then counts."""
        self._before, self.begun = float(state["elapsed"]), list(state["begun"])
        self.started = time.monotonic()
        self.recall(self.begun)


def reserve_of(seconds: float) -> float:
    """Return the seconds of a time budget for what follows the recipe."""
    return RESERVED_SECONDS + RESERVED * seconds


@dataclass
class Pace:
    """How many steps a tuning makes before a deadline, chosen again as steps are timed. Rank 0's clock decides."""

    budget: Budget
    deadline: float
    """In seconds of the run."""
    steps_per_evaluation: float
    evaluation_seconds: float = 0.0
    """Of the last evaluation inside the tuning."""
    _evaluating: float = 0.0
    """Seconds of evaluations since the last measurement."""
    _measured: tuple[float, int] | None = None
    """Seconds and steps at the last measurement."""
    _plan_at: int = 0

    def after_step(self, done: int, planned: int) -> int:
        """Return how many steps there are in all, of which `done` are made. Collective, after every step."""
        now = self.budget.elapsed()
        if self._measured is None:
            # The first step also brings libraries and memory up to speed.
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

    def after_evaluation(self, seconds: float) -> None:
        """Note what an evaluation inside the tuning took."""
        self._evaluating += seconds
        self.evaluation_seconds = seconds


def time_forward(chain: Chain, feed: TrainFeed, *, precision: str, world: World, seconds: float) -> float:
    """Return the work per second, by a timed forward pass on the slowest rank. The model stays as it is. Collective."""
    batch, halves = feed.epoch(0)[0], Halves(chain, precision)
    ids, views = (np.resize(part, feed.rows) for part in (batch.ids, batch.views))

    def forward() -> None:
        chain.model.eval()
        halves.prefix(feed.images.load(ids, views), 0, len(chain.blocks))

    with state_kept(chain.model), torch.no_grad():
        mine = min_seconds(forward, within=min(SECONDS, TIMED * seconds))
    return feed.rows / max(world.allgather_object(mine, name="budget.timing"))
