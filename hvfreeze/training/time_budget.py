"""How long a run may take: its stages get the steps that there is time for, chosen anew as clocks tell more.

Rank 0 decides, by its clock, and all ranks hear it at the same step. Two runs of one budget may therefore differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch, TrainFeed
from hvfreeze.errors import UsageError
from hvfreeze.heads.expected import time_answering, time_comparing, time_solving
from hvfreeze.heads.kernel import KernelHead, centres_for
from hvfreeze.heads.multilevel import head_of
from hvfreeze.heads.solve import solver_memory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import state_kept
from hvfreeze.model.segments import work_of
from hvfreeze.prefix.features import Halves
from hvfreeze.timing import SECONDS, settled_seconds
from hvfreeze.training.auto_plan import affordable, costs_of, first_cut, tuning
from hvfreeze.training.stage_build import StageFactory
from hvfreeze.training.stages import Stage, StageRunner, single_stage, with_steps
from hvfreeze.training.trial import judging
from hvfreeze.wording import plural


@dataclass(frozen=True)
class Timing:
    """Seconds of a batch on the slowest rank; images are loaded in all of them."""

    evaluation: float
    """Through all blocks, without gradient, of a batch that trains nothing."""
    step: float
    """Of a training step behind a cut, but for the exchange of gradients and the update."""
    images: int
    """Of a training batch."""
    evaluated: int
    """Of one that trains nothing."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Seconds that the parts of a run are expected to take."""

    solve: float
    step: float
    images: int
    """Of a replica, in such a step: ways to tune may differ in that."""
    evaluation: float
    judging: float = 0.0
    """Of a tuned model with its own last layer."""
    trial: float = 0.0
    """Of judging a tuning that is tried."""
    source: str
    """What the numbers were read from."""


def time_batch(chain: Chain, feed: TrainFeed, *, cut: int, precision: str, world: World, within: float) -> Timing:
    """Return what a batch costs; the model and torch's generator are left as they were. Collective.

    Each of the two works is tried again until it has taken `within` seconds, and a few times at most.
    """
    batch, halves = feed.epoch(0)[0], Halves(chain, precision)
    ids, views = (np.resize(part, feed.rows) for part in (batch.ids, batch.views))
    repeated = replace(batch, ids=ids, views=views)

    def forward() -> None:
        chain.model.eval()
        halves.prefix(images_of(feed, repeated), 0, len(chain.blocks))

    def step() -> None:
        # BatchNorm cannot train on one value: where there is but one, the strategy will say so.
        chain.model.train(len(batch.labels) > 1)
        logits = halves.suffix(halves.prefix(images_of(feed, batch), 0, cut), cut)
        functional.cross_entropy(logits.float(), batch.labels).backward()

    with state_kept(chain.model):
        works = (forward, step)
        mine = [settled_seconds(work, within=within) for work in works]
    everyone = zip(*world.allgather_object(mine, name="budget.timing"), strict=True)
    evaluation, steps = (max(each) for each in everyone)
    return Timing(evaluation, steps, images=feed.plan.batch_size, evaluated=feed.rows)


def images_of(feed: TrainFeed, batch: Batch) -> Tensor:
    """Return a batch's images, (B, C, H, W)."""
    return feed.images.load(batch.ids, batch.views)


SECONDS_BETWEEN_PLANS = 2.0
TIMED = 0.01
"""Part of the budget in which each of a batch's works is timed, where that is little."""
UNMEASURED, UNMEASURED_SECONDS = 1.25, 2.0
"""Times what a solution is expected to take, and seconds, where it comes last and none was measured before."""
RESERVED, RESERVED_SECONDS = 0.005, 0.5
"""Part of the budget, and seconds, for what comes after the last stage: the model is digested and written."""


@dataclass(kw_only=True)
class TimeBudget:
    """Chooses the steps of a run that is to end after so many seconds.

    Attributes:
        seconds: that the run may take, set-up and all.
        world: the ranks.
        started: `time.monotonic()` when this process began to work on the run.
        expected: what parts take; measured anew as the run goes on.
        evaluate_every: epochs between evaluations.
        passes: for which the stages of --freeze auto were made, see `passes_left`; None of another run.
    """

    seconds: float
    world: World
    started: float
    expected: Expected
    evaluate_every: int
    passes: float | None = None
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
    _worth: float = 0.0
    """Of a solution that takes `expected.solve`; solutions may differ in their views of samples."""
    _guessed: bool = True
    """Whether no solution was measured yet."""

    def elapsed(self) -> float:
        """Return the seconds that the run has taken so far, on this rank's clock."""
        return self._before + time.monotonic() - self.started

    def plan(self, stages: Sequence[Stage], *, begins: bool = True) -> tuple[Stage, ...]:
        """Return the stages with the steps that there is time for.

        Raises:
            UsageError: the run `begins`, and there is not even time for its first part.
        """
        self._mark = self.elapsed()
        solves = next((stage for stage in stages if stage.solves), None)
        self._worth = solves.worth if solves else 0.0
        needed = self._mark + reserve_of(self.seconds) + self.expected.evaluation
        needed += self.expected.solve if solves else self.expected.step
        steps = self._chosen(stages, 0)
        needed, steps = self.world.broadcast_object((needed, steps), name="budget.plan")
        if begins and needed > self.seconds:
            what = "solving the head" if solves else "a step"
            raise UsageError(
                f"--time-budget ({self.seconds:.0f}s) must be at least about {1.1 * needed:.0f}s here, for set-up, "
                f"{what} and an evaluation, by {self.expected.source}"
            ).on_all_ranks()
        if not solves:
            # There is time for one step, though not for its share of evaluations between epochs.
            steps[0] = max(1, steps[0])
        planned = with_steps(stages, steps)
        self._planned = [
            {"stage": stage.name, "steps": stage.steps, "seconds": self._takes(planned, number)}
            for number, stage in enumerate(planned)
            # Nothing is ever done in one that had no steps before.
            if stages[number].steps and not is_left_out(planned, stage)
        ]
        return planned

    def describe(self) -> list[str]:
        """Return the plan in lines for the user."""
        rows = [("set-up", self._mark, "")]
        for plan in self._planned:
            steps = "" if plan["stage"] == "solve" else f"  {plan['steps']} steps"
            rows += [(plan["stage"], plan["seconds"], steps)] if plan["steps"] else [(plan["stage"], 0.0, "  no time")]
        rows.append(("finish", reserve_of(self.seconds), ""))
        lines = [f"  {name:8s} {seconds:8.1f} s{what}" for name, seconds, what in rows]
        together = sum(seconds for _, seconds, _ in rows)
        return [
            f"plan for {self.seconds:.0f} s, from {self.expected.source}:",
            *lines,
            f"  together {together:8.1f} s; steps are chosen anew as they are made",
        ]

    def after_step(self, stage_runner: StageRunner, done: int) -> None:
        """Choose the steps of the stage under way anew, when it is time to, of which `done` are made.

        Collective: every rank of the world must call this after every step.
        """
        now, stage = self.elapsed(), stage_runner.stage
        if stage.is_trial:
            return
        if self._measured is None or self._measured[1] >= done:
            # The first step also brings libraries and memory up to speed.
            self._measured, self._plan_at, self._evaluating = (now, done), done + 1, 0.0
        if done < min(self._plan_at, stage.steps):
            return
        then, made = self._measured
        if done > made:
            seconds = (now - then - self._evaluating) / (done - made)
            self.expected = replace(self.expected, step=seconds, images=images_of_step(stage))
        steps = max(done, self._room(stage_runner.stages, stage_runner.number, done=done, elapsed=now))
        wait = max(1, min((steps - done) // 2, round(SECONDS_BETWEEN_PLANS / max(self.expected.step, 1e-6))))
        steps, self._plan_at = self.world.broadcast_object((steps, done + wait), name="budget.steps")
        self._measured, self._evaluating = (now, done), 0.0
        stage_runner.plan(
            [steps if n == stage_runner.number else other.steps for n, other in enumerate(stage_runner.stages)]
        )

    def after_evaluation(self, seconds: float) -> None:
        """Take note of what an evaluation took."""
        self._evaluating += seconds
        self.expected = replace(self.expected, evaluation=seconds)

    def after_stage(self, stage_runner: StageRunner) -> list[str]:
        """Plan the stages to come by what the one that has ended took; return what the user is told. Collective."""
        now = self.elapsed()
        if stage_runner.stage.solves:
            self.expected = replace(self.expected, solve=now - self._mark - self._evaluating)
            self._worth, self._guessed = stage_runner.stage.worth, False
        self._spent.append(now - self._mark)
        self._mark, self._measured, self._evaluating = now, None, 0.0
        if stage_runner.is_last:
            return []
        steps = self.world.broadcast_object(
            self._chosen(stage_runner.stages, stage_runner.number + 1), name="budget.stages"
        )
        stage_runner.plan(steps)
        left = max(0.0, self.seconds - now)
        if stage_runner.is_last:
            return [f"{left:.0f} s are left, too few to tune for an epoch and to solve again"]
        return [f"{left:.0f} s are left, for {sum(steps[stage_runner.number + 1 :])} steps"]

    def note(self) -> str:
        """Return a few words about the plan for the line that shows progress."""
        return f", {self.elapsed():.0f} of {self.seconds:.0f} s"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        solution = None if self._guessed else {"seconds": self.expected.solve, "worth": self._worth}
        spent = {"planned": self._planned, "spent": list(self._spent), "mark": self._mark}
        return {"elapsed": self.elapsed(), "solution": solution, "passes": self.passes, **spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the plan of a checkpoint: what was spent until then counts."""
        self._before, self._mark = state["elapsed"], state["mark"]
        self._planned, self._spent = list(state["planned"]), list(state["spent"])
        if (solution := state.get("solution")) is not None:
            self.expected = replace(self.expected, solve=solution["seconds"])
            self._worth, self._guessed = solution["worth"], False

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
        """Return every stage's steps, those from `first` on as there is time; a solution that nothing precedes goes.

        Where there is no time for an epoch of tuning and the solution behind it, that solution goes where a trial has
        led to the tuning, or is to lead to it and leaves time for a spare solution, or where a solution comes before
        it. Else only one solution is made, the first of all in any case.
        """
        coming = [number for number in range(first, len(stages)) if stages[number].steps]
        made = any(stage.solves and stage.steps for stage in stages[:first])
        solutions = [number for number in coming if stages[number].solves]
        tuning = [number for number in coming if not (stages[number].solves or stages[number].is_trial)]
        steps = [stage.steps for stage in stages]
        if not tuning:
            return steps
        lasting = [number for number in solutions if not stages[number].is_spare]
        options = [set[int]()]
        if any(stage.is_trial and stage.steps for stage in stages):
            options = [set(), set(lasting if made else lasting[1:]), set(lasting)]
            if not (made or self._may_end_tuned(stages, coming)):
                options = [left_out for left_out in options if len(left_out) < len(lasting)]
        for left_out in options:
            wanted = [0 if number in left_out else count for number, count in enumerate(steps)]
            found = self._filled(with_steps(stages, wanted), first)
            if any(found[number] for number in tuning):
                return found
        always = None if made else next(iter(solutions), 0)
        return [count if number < first or number == always else 0 for number, count in enumerate(steps)]

    def _may_end_tuned(self, stages: Sequence[Stage], coming: Sequence[int]) -> bool:
        """Tell whether the coming stages may have no solution: a trial has told, or can, that blocks still gain."""
        numbered = [stages[number] for number in coming]
        if not numbered[0].is_trial:
            return not numbered[0].solves
        if len(numbered) < 2 or not numbered[1].is_spare:
            return False
        # Where it tells that they do not.
        spare = self._tried(numbered[0]) + self._solved(stages, numbered[1])
        return self.elapsed() + spare + reserve_of(self.seconds) <= self.seconds

    def _filled(self, stages: Sequence[Stage], first: int) -> list[int]:
        """Return the same with all the stages that have steps."""
        steps = [stage.steps for stage in stages]
        for number in range(first, len(stages)):
            stage = stages[number]
            if stage.steps and not (stage.solves or stage.is_trial):
                before = sum(self._takes(stages, earlier) for earlier in range(first, number))
                steps[number] = self._room(stages, number, done=0, elapsed=self.elapsed() + before)
                led = self._led_by(stages, number)
                # What a trial has begun may be ended at any step.
                needs_epoch = stage.is_followed and (led == 0 or self._is_followed(stages, number))
                if needs_epoch and steps[number] + led < stage.steps_per_epoch:
                    return [*steps[:number], *(0 for _ in steps[number:])]
        return steps

    def _led_by(self, stages: Sequence[Stage], number: int) -> int:
        """Return the steps, of the stage's size, of a trial that the stage goes on from."""
        before = [stage for stage in stages[:number] if stage.steps and not is_left_out(stages, stage)]
        if not before or not before[-1].is_trial:
            return 0
        return before[-1].steps * images_of_step(before[-1]) // images_of_step(stages[number])

    def _room(self, stages: Sequence[Stage], number: int, *, done: int, elapsed: float) -> int:
        """Return how many steps stage `number`, of which `done` are made, has time for in all."""
        stage = stages[number]
        after = sum(self._takes(stages, later) for later in range(number + 1, len(stages)))
        room = self.seconds - elapsed - after - reserve_of(self.seconds) - self._ends(stages, number)
        return done + max(0, int(room / self._with_evaluations(stage)))

    def _takes(self, stages: Sequence[Stage], number: int) -> float:
        """Return the seconds that a stage is expected to take, with its evaluations."""
        stage = stages[number]
        if stage.steps == 0 or is_left_out(stages, stage):
            return 0.0
        if stage.solves:
            return self._solved(stages, stage)
        if stage.is_trial:
            return self._tried(stage)
        return stage.steps * self._with_evaluations(stage) + self._ends(stages, number)

    def _solved(self, stages: Sequence[Stage], stage: Stage) -> float:
        """Return the seconds that a solution is expected to take, with its evaluation."""
        ratio = stage.worth / self._worth if stage.worth and self._worth else 1.0
        seconds = self.expected.solve * ratio
        if self._guessed and not stages[0].solves:
            seconds = UNMEASURED * seconds + UNMEASURED_SECONDS
        return seconds + self.expected.evaluation

    def _tried(self, stage: Stage) -> float:
        """Return the seconds that a trial is expected to take."""
        return stage.steps * self._step(stage) + 2 * self.expected.trial

    def _ends(self, stages: Sequence[Stage], number: int) -> float:
        """Return the seconds that a stage of training ends with: it is not evaluated where a solution follows."""
        # It is on trial itself where nothing comes before it.
        tried = 2 * self.expected.trial if number == 0 else 0.0
        followed = self._is_followed(stages, number)
        return tried + self.expected.judging + (0.0 if followed else self.expected.evaluation)

    def _is_followed(self, stages: Sequence[Stage], number: int) -> bool:
        """Tell whether a solution comes behind a stage."""
        return any(stage.solves and stage.steps for stage in stages[number + 1 :])

    def _with_evaluations(self, stage: Stage) -> float:
        evaluation = self.expected.evaluation / (self.evaluate_every * stage.steps_per_epoch)
        return max(1e-6, self._step(stage) + evaluation)

    def _step(self, stage: Stage) -> float:
        return self.expected.step * images_of_step(stage) / self.expected.images


def time_run(factory: StageFactory) -> Timing | None:
    """Return what a batch of the run costs, None without --time-budget. Collective."""
    config, context = factory.config, factory.context
    budget = config.run.budget_seconds()
    if budget is None:
        return None
    trained = config
    if config.freeze.auto:
        # Before anything is timed behind it.
        first = raise_on_all_ranks(context.world, lambda: first_cut(factory), name="cut")
        trained = tuning(config, first, epochs=1)
    cut = 0 if trained.head.solved else trained.freeze.cut or 0
    feed = factory.feed(single_stage(trained, batches_per_epoch=1, epochs=1))
    precision, within = config.optimizer.precision, min(SECONDS, TIMED * budget)
    return time_batch(context.chain, feed, cut=cut, precision=precision, world=context.world, within=within)


def passes_left(factory: StageFactory, timing: Timing | None, *, evaluated: int, started: float) -> float | None:
    """Return what --time-budget has time for, in forward passes for each sample of an epoch. Collective.

    None without --time-budget. For the arguments see `open_budget`.
    """
    seconds, context = factory.config.run.budget_seconds(), factory.context
    if seconds is None or timing is None:
        return None
    left = seconds - (time.monotonic() - started) - reserve_of(seconds) - timing.evaluation * evaluated
    left = context.world.broadcast_object(left, name="budget.passes")
    plan = context.feed.plan
    return left / timing.evaluation * timing.evaluated / (plan.batches_per_epoch * plan.batch_size)


def open_budget(
    factory: StageFactory,
    stages: Sequence[Stage],
    timing: Timing | None,
    *,
    evaluated: int,
    judged: int,
    passes: float | None,
    started: float,
) -> TimeBudget | None:
    """Return what chooses the steps of the stages, None without --time-budget. Collective.

    Args:
        factory: opens the stages.
        stages: those that there is time for, about.
        timing: what `time_run` returned.
        evaluated: batches of this replica in an evaluation.
        judged: and of those by which a tuned model is judged.
        passes: that the stages were made for.
        started: see `TimeBudget`.
    """
    config, world = factory.config, factory.context.world
    seconds = config.run.budget_seconds()
    if seconds is None or timing is None:
        return None
    solves = next((stage for stage in stages if stage.solves), None)
    solve = expected_solution(factory, solves, timing, evaluated=evaluated) if solves else 0.0
    passes_of_update = costs_of(factory, affordable(factory), first_cut(factory)).update if config.freeze.auto else 0.0
    updating = passes_of_update * timing.evaluation / timing.evaluated
    expected = Expected(
        solve=max(world.allgather_object(solve, name="budget.solve")),
        step=timing.step * config.optimizer.accumulate + updating,
        images=timing.images * config.optimizer.accumulate,
        evaluation=timing.evaluation * evaluated,
        judging=timing.evaluation * judged,
        trial=expected_judging(factory, stages[0], timing) if config.freeze.auto and not stages[0].solves else 0.0,
        source=(
            f"a timed forward pass of {plural(timing.evaluated, 'sample')} ({1e3 * timing.evaluation:.0f} ms) "
            f"and step of {timing.images} ({1e3 * timing.step:.0f} ms)"
        ),
    )
    return TimeBudget(
        seconds=seconds,
        world=world,
        started=started,
        expected=expected,
        evaluate_every=config.run.evaluate_every,
        passes=passes,
    )


def is_left_out(stages: Sequence[Stage], stage: Stage) -> bool:
    """Tell whether a stage is a solution that is made only where the trial before it finds nothing to tune."""
    return stage.is_spare and any(other.is_trial and other.steps for other in stages)


def reserve_of(seconds: float) -> float:
    """Return which seconds of a budget are for what comes after the last stage."""
    return RESERVED_SECONDS + RESERVED * seconds


def images_of_step(stage: Stage) -> int:
    """Return how many images a replica's step has."""
    return stage.config.optimizer.batch_size * stage.config.optimizer.accumulate


def expected_judging(factory: StageFactory, trial: Stage, timing: Timing) -> float:
    """Return the seconds of judging a trial."""
    plan = factory.context.feed.plan
    forward = sum(work_of(factory.context.chain, torch.zeros(1, *factory.blueprint.image_shape)))
    passes = judging(forward, samples=plan.samples, in_haste=trial.is_in_haste)
    return passes * timing.evaluation / (timing.evaluated * len(plan.shards))


def expected_solution(factory: StageFactory, stage: Stage, timing: Timing, *, evaluated: int) -> float:
    """Return the seconds that a solution takes on this rank, and its answers to as many batches beyond all blocks."""
    batches, head = factory.feed(stage).every_view(), head_of(factory.chain(stage))
    rows, classes, size = sum(batch.counted for batch in batches), factory.blueprint.classes, factory.context.world.size
    again = 1 if factory.reads_mirrored(stage.config) else 0
    features = timing.evaluation * ((1 + again) * len(batches) + again * evaluated)
    if not isinstance(head, KernelHead):
        return features + time_solving(rows=rows, width=head.in_features, classes=classes)
    asked = stage.config.head.centres
    solved = time_comparing(
        rows=rows,
        width=head.in_features,
        classes=classes,
        size=size,
        memory_bytes=solver_memory(factory.context.world.local_size),
        asked=asked,
    )
    centres = centres_for(rows * size, asked)
    return (
        features + solved + time_answering(rows=evaluated * timing.evaluated, width=head.in_features, centres=centres)
    )
