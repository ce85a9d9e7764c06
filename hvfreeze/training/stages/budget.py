"""How long a run may take: its stages get the steps that there is time for, chosen anew as clocks tell more.

Rank 0 decides, by its clock, and all ranks hear it at the same step. Two runs of one budget may therefore differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvfreeze.errors import UsageError
from hvfreeze.ranks.world import World
from hvfreeze.training.stages.course import Course
from hvfreeze.training.stages.stage import Stage, with_steps
from hvfreeze.training.stages.timing import Expected

SECONDS_BETWEEN_PLANS = 2.0
RESERVED, RESERVED_SECONDS = 0.005, 0.5
"""Part of the budget, and seconds, for what comes after the last stage: the model is digested and written."""


class NoBudget:
    """A run that takes as long as --epochs makes it."""

    def plan(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return the stages as they are. Collective in `TimeBudget`."""
        return tuple(stages)

    def told(self) -> list[str]:
        """Return no plan."""
        return []

    def after_step(self, course: Course, done: int) -> None:
        """Leave the plan as it is. Collective in `TimeBudget`."""

    def after_evaluation(self, seconds: float) -> None:
        """Take no note."""

    def after_stage(self, course: Course) -> list[str]:
        """Leave the plan as it is. Collective in `TimeBudget`."""
        return []

    def note(self) -> str:
        """Return nothing to be shown."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to be kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""

    def report(self) -> dict[str, Any]:
        """Return nothing for summary.json."""
        return {}


@dataclass(kw_only=True)
class TimeBudget:
    """A run that is to end after so many seconds; see `NoBudget` for its methods.

    Attributes:
        seconds: that the run may take, set-up and all.
        world: the ranks.
        started: `time.monotonic()` when this process began to work on the run.
        expected: what parts take; measured anew as the run goes on.
        evaluate_every: epochs between evaluations.
    """

    seconds: float
    world: World
    started: float
    expected: Expected
    evaluate_every: int
    _before: float = 0.0
    """Seconds that were spent by the job that this one goes on for."""
    _planned: list[dict[str, Any]] = field(default_factory=list)
    _spent: list[float] = field(default_factory=list)
    _mark: float = 0.0
    """Seconds at which the last stage ended, or set-up."""
    _evaluating: float = 0.0
    """Seconds of evaluations since the last measurement."""
    _measured: tuple[float, int] | None = None
    """Seconds and steps of the stage under way when its step was last measured."""
    _plan_at: int = 0

    def elapsed(self) -> float:
        """Return the seconds that the run has taken so far, on this rank's clock."""
        return self._before + time.monotonic() - self.started

    def plan(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return the stages with the steps that there is time for.

        Raises:
            UsageError: there is none for the first solution, or for one step; on all ranks.
        """
        self._mark = self.elapsed()
        needed = self._mark + self._reserve() + self.expected.evaluation
        needed += self.expected.solve if stages[0].solves else self.expected.step
        steps = self._chosen(stages, 0)
        needed, steps = self.world.broadcast_object((needed, steps), name="budget.plan")
        if needed > self.seconds:
            what = "solving the head" if stages[0].solves else "a step"
            error = UsageError(
                f"--time-budget ({self.seconds:.0f}s) must be at least about {1.1 * needed:.0f}s here, for set-up, "
                f"{what} and an evaluation, by {self.expected.source}"
            )
            error.everywhere = True
            raise error
        if not stages[0].solves:
            # There is time for one step, though not for its share of evaluations between epochs.
            steps[0] = max(1, steps[0])
        planned = with_steps(stages, steps)
        self._planned = [
            {"stage": stage.name, "steps": stage.steps, "seconds": self._takes(planned, number)}
            for number, stage in enumerate(planned)
        ]
        return planned

    def told(self) -> list[str]:
        """Return the plan in lines for the user."""
        rows = [("set-up", self._mark, "")]
        for plan in self._planned:
            steps = "" if plan["stage"] == "solve" else f"  {plan['steps']} steps"
            rows += [(plan["stage"], plan["seconds"], steps)] if plan["steps"] else [(plan["stage"], 0.0, "  no time")]
        rows.append(("finish", self._reserve(), ""))
        lines = [f"  {name:8s} {seconds:8.1f} s{what}" for name, seconds, what in rows]
        together = sum(seconds for _, seconds, _ in rows)
        return [
            f"plan for {self.seconds:.0f} s, from {self.expected.source}:",
            *lines,
            f"  together {together:8.1f} s; steps are chosen anew as they are made",
        ]

    def after_step(self, course: Course, done: int) -> None:
        """Choose the steps of the stage under way anew, when it is time to, of which `done` are made.

        Collective: every rank of the world must call this after every step.
        """
        now, stage = self.elapsed(), course.stage
        if self._measured is None or self._measured[1] >= done:
            # The first step also brings libraries and memory up to speed.
            self._measured, self._plan_at, self._evaluating = (now, done), done + 1, 0.0
        if done < min(self._plan_at, stage.steps):
            return
        then, made = self._measured
        if done > made:
            self.expected = replace(self.expected, step=(now - then - self._evaluating) / (done - made))
        steps = max(done, self._room(course.stages, course.number, done=done, elapsed=now))
        wait = max(1, min((steps - done) // 2, round(SECONDS_BETWEEN_PLANS / max(self.expected.step, 1e-6))))
        steps, self._plan_at = self.world.broadcast_object((steps, done + wait), name="budget.steps")
        self._measured, self._evaluating = (now, done), 0.0
        course.plan([steps if n == course.number else other.steps for n, other in enumerate(course.stages)])

    def after_evaluation(self, seconds: float) -> None:
        """Take note of what an evaluation took."""
        self._evaluating += seconds
        self.expected = replace(self.expected, evaluation=seconds)

    def after_stage(self, course: Course) -> list[str]:
        """Plan the stages to come by what the one that has ended took; return what the user is told.

        Collective: every rank of the world must call this.
        """
        now = self.elapsed()
        if course.stage.solves:
            self.expected = replace(self.expected, solve=now - self._mark - self._evaluating)
        self._spent.append(now - self._mark)
        self._mark, self._measured, self._evaluating = now, None, 0.0
        if course.is_last:
            return []
        steps = self.world.broadcast_object(self._chosen(course.stages, course.number + 1), name="budget.stages")
        course.plan(steps)
        if course.is_last:
            return [f"{self.seconds - now:.0f} s are left, too few to tune for an epoch and to solve again"]
        return [f"{self.seconds - now:.0f} s are left, for {sum(steps[course.number + 1 :])} steps"]

    def note(self) -> str:
        """Return a few words about the plan for the line that shows progress."""
        return f", {self.elapsed():.0f} of {self.seconds:.0f} s"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"elapsed": self.elapsed(), "planned": self._planned, "spent": list(self._spent), "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the plan of a checkpoint: what was spent until then counts."""
        self._before, self._mark = state["elapsed"], state["mark"]
        self._planned, self._spent = list(state["planned"]), list(state["spent"])

    def report(self) -> dict[str, Any]:
        """Return what was planned, and what was spent of it."""
        return {
            "time_budget": {
                "seconds": self.seconds,
                "spent": self.elapsed(),
                "planned": self._planned,
                "spent_by_stage": self._spent,
                "read_from": self.expected.source,
            }
        }

    def _chosen(self, stages: Sequence[Stage], first: int) -> list[int]:
        """Return every stage's steps, those from `first` on as there is time; a solution that nothing precedes goes."""
        steps = [stage.steps for stage in stages]
        for number in range(first, len(stages)):
            stage = stages[number]
            if not stage.solves:
                before = sum(self._takes(stages, earlier) for earlier in range(first, number))
                steps[number] = self._room(stages, number, done=0, elapsed=self.elapsed() + before)
                if stage.is_followed and steps[number] < stage.steps_per_epoch:
                    return [*steps[:number], *(0 for _ in steps[number:])]
        return steps

    def _room(self, stages: Sequence[Stage], number: int, *, done: int, elapsed: float) -> int:
        """Return how many steps stage `number`, of which `done` are made, has time for in all."""
        stage = stages[number]
        after = sum(self._takes(stages, later) for later in range(number + 1, len(stages)))
        room = (
            self.seconds - elapsed - after - self._reserve() - (0.0 if stage.is_followed else self.expected.evaluation)
        )
        return done + max(0, int(room / self._with_evaluations(stage)))

    def _takes(self, stages: Sequence[Stage], number: int) -> float:
        """Return the seconds that a stage is expected to take, with its evaluations."""
        stage, last = stages[number], self.expected.evaluation
        if stage.steps == 0:
            return 0.0
        if stage.solves:
            return self.expected.solve + last
        return stage.steps * self._with_evaluations(stage) + (0.0 if stage.is_followed else last)

    def _with_evaluations(self, stage: Stage) -> float:
        return max(1e-6, self.expected.step + self.expected.evaluation / (self.evaluate_every * stage.steps_per_epoch))

    def _reserve(self) -> float:
        return RESERVED_SECONDS + RESERVED * self.seconds


Budget = NoBudget | TimeBudget
