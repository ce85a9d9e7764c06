"""The stages of a run: which there are, their learning rates, and what runs them one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvfreeze.config.tree import Config
from hvfreeze.data.batches import TrainFeed
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.vote import Decision
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import Strategy


def learning_rate(step: int, *, base: float, schedule: str, warmup: int, total: int) -> float:
    """Return the learning rate of the update that follows `step` updates.

    Args:
        step: updates made so far.
        base: the rate that `constant` keeps.
        schedule: `constant`; `step`, a tenth from 50 % and a hundredth from 75 % of training on; or `cosine`, to 0.
        warmup: updates over which the rate rises linearly.
        total: updates of the whole run.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    if schedule == "step":
        return base * (0.01 if step >= 0.75 * total else 0.1 if step >= 0.5 * total else 1.0)
    return base


SOLVE, TUNE, TRY = "solve", "tune", "try"
"""Names of stages: that solve the head, that tune, and that tells whether tuning pays."""
MUCH_TUNED = 4.0
"""Epochs of full fine-tuning beside which a head is solved with mirror images, and for the blocks as they are before
tuning that gains a little, and behind a tuning that has much left to learn."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run, for which one chain of the model is opened, and whose epochs are all made alike."""

    name: str
    config: Config
    """What its strategy is opened with."""
    steps: int
    """Optimizer steps, or those that a solution stands for; the last epoch may be cut short."""
    batches_per_epoch: int
    """Of every replica."""
    guarded: bool = False
    """Whether samples are held out of it, by which the guard judges; a solution holds them out by itself."""
    is_followed: bool = False
    """Whether another stage judges what comes of it, so that it ends without an evaluation of its own."""
    shown_cut: int | None = None
    """How the run calls the cut of a stage that freezes all blocks but the head; None where it is the stage's own."""
    worth: float = 0.0
    """Of a solution: epochs of tuning that take as long."""
    is_spare: bool = False
    """Of a solution before a tuning: whether it is made only where that is left out, so that no time is kept for it."""
    is_in_haste: bool = False
    """Of a trial: whether it is judged by half as many samples, because there is little time."""
    mirror_is_open: bool = False
    """Of a solution: whether the mean over mirror images was planned, and is not taken where these do harm."""

    @property
    def title(self) -> str:
        """What the user is told when it begins."""
        work = "the head is solved" if self.solves else f"{self.steps} steps, freeze {self.config.freeze.freeze}"
        return f"stage {self.name}: {work}"

    @property
    def is_trial(self) -> bool:
        """Whether it tells whether tuning pays."""
        return self.name == TRY

    @property
    def solves(self) -> bool:
        """Whether an epoch is a solution of the head."""
        return self.config.head.solved

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.config.optimizer.steps_per_epoch(self.batches_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs, the last perhaps cut short."""
        return -(-self.steps // self.steps_per_epoch)

    def batches(self, steps: int) -> int:
        """Return how many batches of every replica the first `steps` steps are made of."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + min(self.batches_per_epoch, rest * self.config.optimizer.accumulate)

    def images(self, steps: int) -> int:
        """Return how many images every replica sees in the first `steps` steps."""
        return self.batches(steps) * self.config.optimizer.batch_size


def single_stage(config: Config, *, batches_per_epoch: int, epochs: int) -> Stage:
    """Return the one stage of a run that is not --freeze auto."""
    steps = config.optimizer.steps_per_epoch(batches_per_epoch) * epochs
    return Stage(name="train", config=config, steps=steps, batches_per_epoch=batches_per_epoch)


def with_steps(stages: Sequence[Stage], steps: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with other numbers of steps, one for each; 0 leaves a stage out."""
    return tuple(lasting(stage, count) for stage, count in zip(stages, steps, strict=True))


def lasting(stage: Stage, steps: int) -> Stage:
    """Return the stage with another number of steps; its settings tell the epochs that these take."""
    changed = replace(stage, steps=steps)
    if stage.solves:
        return changed
    optimizer = replace(stage.config.optimizer, epochs=max(1, changed.epochs))
    return replace(changed, config=replace(stage.config, optimizer=optimizer))


def with_mirror(stage: Stage, found: str | None) -> Stage:
    """Return the stage with what was found out about mirror images, where its settings leave that open."""
    data = stage.config.data
    if found is None or (found != "off" if stage.mirror_is_open else data.mirror != "auto"):
        return stage
    return replace(stage, config=replace(stage.config, data=replace(data, mirror=found)))


Report = dict[str, Any]


class Opened(NamedTuple):
    """What is open for a stage."""

    strategy: Strategy
    feed: TrainFeed
    chain: Chain
    """What the strategy trains; what a stage keeps of its model comes from here, and goes back here."""
    length: Length
    """What the strategy knows of how long the stage lasts."""


class StageRunner:
    """The stages of a run, of which one is open.

    Args:
        stages: in order, at least one.
        open_stage: opens a stage; a collective.
        mirror: what has been found out about mirror images before the first stage.
    """

    def __init__(
        self, stages: Sequence[Stage], open_stage: Callable[[Stage], Opened], mirror: str | None = None
    ) -> None:
        self.stages: tuple[Stage, ...] = tuple(stages)
        self.asked = tuple(stage.steps for stage in stages)
        """Steps of each stage before any was found to gain nothing."""
        self.number = 0
        self.mirror = mirror
        """What has been found out about mirror images, on or off, for the stages to come."""
        self.ends_tuned = False
        """Whether the run ends with a tuned model under its own last layer, whatever solution came after it."""
        self._open_stage = open_stage
        self._earlier: Report = {}
        self.opened = open_stage(with_mirror(self.stages[0], mirror))

    @property
    def stage(self) -> Stage:
        """The stage under way."""
        return self.stages[self.number]

    @property
    def first_step(self) -> int:
        """Steps that were made when it began."""
        return sum(stage.steps for stage in self.stages[: self.number])

    @property
    def first_epoch(self) -> int:
        """Epochs that were made when it began."""
        return sum(stage.epochs for stage in self.stages[: self.number])

    @property
    def total_steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    def images(self, step: int) -> int:
        """Return how many images every replica sees in the run's first `step` steps."""
        before = sum(stage.images(stage.steps) for stage in self.stages[: self.number])
        return before + self.stage.images(step - self.first_step)

    @property
    def cut(self) -> int:
        """Number of frozen blocks of the model."""
        shown = self.stage.shown_cut
        return self.opened.strategy.cut if shown is None else shown

    @property
    def is_tuned(self) -> bool:
        """Whether a stage before this one has tuned the blocks; what a trial does is taken back, or followed by one."""
        return any(stage.name == TUNE and stage.steps for stage in self.stages[: self.number])

    @property
    def is_last(self) -> bool:
        """Whether no stage that has steps comes after this one."""
        return not any(stage.steps for stage in self.stages[self.number + 1 :])

    @property
    def next_stage(self) -> Stage | None:
        """The next one that has steps; None behind the last."""
        return next((stage for stage in self.stages[self.number + 1 :] if stage.steps), None)

    def plan(self, steps: Sequence[int]) -> None:
        """Let the stages last so many steps each; the strategy that is open learns of it. Equal on all ranks."""
        self.stages = with_steps(self.stages, steps)
        self.opened.length.epochs = self.stage.config.optimizer.epochs

    def turn(self) -> None:
        """Go on to the next stage that has steps. Collective."""
        after = range(self.number + 1, len(self.stages))
        report = self.report()
        self._enter(next(number for number in after if self.stages[number].steps), earlier=report)

    def drop_rest(self) -> None:
        """Take their steps from the stages to come: the run ends with the one under way. Equal on all ranks."""
        self._keep(lambda number: False)

    def solve_alone(self) -> None:
        """Take their steps from the stages to come, but for one solution. Equal on all ranks."""
        [solves, *_] = self._coming(solves=True)
        self._keep(lambda number: number == solves)

    def tune_at_once(self) -> None:
        """Let the tuning that comes follow without the solution before it. Equal on all ranks.

        The last tuning has its time; of one that is spare none was kept.
        """
        [left_out, *_], [*_, last] = self._coming(solves=True), self._coming(solves=False)
        solves, tune = self.stages[left_out], self.stages[last]
        spared = 0 if solves.is_spare else int(solves.worth * tune.steps_per_epoch)
        changed = {left_out: 0, last: tune.steps + spared}
        self.plan([changed.get(number, stage.steps) for number, stage in enumerate(self.stages)])

    def tune_on(self) -> bool:
        """Leave out the solution that comes where a tuning follows it; return whether one does. Equal on all ranks."""
        solves, tunes = self._coming(solves=True), self._coming(solves=False)
        if not tunes or tunes[0] < solves[0]:
            return False
        self._keep(lambda number: number != solves[0])
        return True

    def tune_instead(self) -> bool:
        """Let the one short tuning that comes have the time of the solution behind it; return whether there is such.

        Equal on all ranks. The trial that has led to it counts.
        """
        solves, tunes = self._coming(solves=True), self._coming(solves=False)
        if len(solves) != 1 or len(tunes) != 1 or tunes[0] > solves[0]:
            return False
        tune, solution = self.stages[tunes[0]], self.stages[solves[0]]
        samples = sum(stage.images(stage.steps) for stage in (self.stage, tune))
        if samples >= MUCH_TUNED * tune.images(tune.steps_per_epoch):
            return False
        changed = {tunes[0]: tune.steps + int(solution.worth * tune.steps_per_epoch), solves[0]: 0}
        self.plan([changed.get(number, stage.steps) for number, stage in enumerate(self.stages)])
        return True

    def _coming(self, *, solves: bool) -> list[int]:
        """Return the numbers of the stages to come that solve, or of those that do not."""
        numbered = list(enumerate(self.stages))[self.number + 1 :]
        return [number for number, stage in numbered if stage.steps and stage.solves == solves]

    def _keep(self, is_kept: Callable[[int], bool]) -> None:
        self.plan(
            [stage.steps if number <= self.number or is_kept(number) else 0 for number, stage in enumerate(self.stages)]
        )

    def turn_back(self, *, tuned: bool = False) -> None:
        """Open the last stage, which has no steps: with it the run ends, its model is the caller's to fill. Collective.

        All steps are made, and stay those of the stages before it. The model has a solved head, or its own last layer
        if `tuned`.
        """
        assert self.stages[-1].steps == 0, "a stage whose steps are not made"
        if tuned:
            self._end_tuned()
        self._enter(len(self.stages) - 1, earlier=self.report())

    def report(self) -> Report:
        """Return the report of all stages so far; see `Strategy.report`. Collective."""
        mine = self.opened.strategy.report()
        return joined(self._earlier, {**mine, "cut_history": [self._placed(move) for move in mine["cut_history"]]})

    def placed(self, decision: Decision) -> Decision:
        """Return a vote of this stage with its step and epoch in the run."""
        return replace(decision, step=self.first_step + decision.step, epoch=self.first_epoch + decision.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the open strategy's state."""
        earlier = {**self._earlier, "cut_history": [list(move) for move in self._earlier.get("cut_history", ())]}
        steps = [stage.steps for stage in self.stages]
        asked, names = list(self.asked), [stage.name for stage in self.stages]
        found = {"mirror": self.mirror, "ends_tuned": self.ends_tuned}
        return {"number": self.number, "names": names, "steps": steps, "asked": asked, "earlier": earlier, **found}

    def knows(self, state: Any) -> bool:
        """Tell whether `state` is what `state_dict` of some run of stages returned."""
        if not isinstance(state, Mapping) or not isinstance(state.get("earlier"), Mapping):
            return False
        number, steps = state.get("number"), state.get("steps")
        if type(number) is not int or not isinstance(steps, list) or any(type(count) is not int for count in steps):
            return False
        return state.get("mirror") in (None, "on", "off") and 0 <= number < len(steps) and min(steps) >= 0

    def fits(self, state: Mapping[str, Any], *, keeps_plan: bool) -> bool:
        """Tell whether the stages are those of `state`, which it `knows`, as far as they go on with."""
        names, count = state.get("names"), len(state["steps"])
        known = count if keeps_plan else state["number"] + 1
        own = self.stages[:known]
        if len(own) < known:
            return False
        if isinstance(names, list):
            return names[:known] == [stage.name for stage in own]
        # Of a source whose stages all began with a solution, or were one; the first such sources tried nothing.
        return not own[0].is_trial and (count == len(self.stages) or not any(stage.is_trial for stage in own))

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_plan: bool) -> None:
        """Open the stage of a checkpoint; its strategy's state is the caller's to put back. Collective.

        Args:
            state: what `state_dict` returned.
            keeps_plan: whether stages last as long as was planned there, and not as the configuration says.
        """
        if keeps_plan:
            self.stages = self.stages[: len(state["steps"])]
        if keeps_plan or list(self.asked) == state.get("asked"):
            self.plan(state["steps"])
        if state.get("ends_tuned"):
            self._end_tuned()
        moves = [Move(*move) for move in state["earlier"].get("cut_history", ())]
        earlier = {**state["earlier"], "cut_history": moves} if moves else {}
        before, self.mirror = self.mirror, state.get("mirror")
        # A solution with mirror images beside the samples finds out itself, and is not opened anew for it.
        as_opened = before == self.mirror or (self.stage.solves and not self.stage.mirror_is_open)
        if state["number"] == self.number and as_opened:
            self._earlier = earlier
        else:
            self._enter(state["number"], earlier=earlier)

    def _end_tuned(self) -> None:
        self.ends_tuned = True
        *before, last = self.stages
        tuned = [stage for stage in before if stage.name == TUNE][-1]
        self.stages = (*before, lasting(replace(tuned, name=last.name), 0))

    def _enter(self, number: int, *, earlier: Report) -> None:
        self.opened.strategy.close()
        self.number, self._earlier = number, earlier
        self.opened = self._open_stage(with_mirror(self.stage, self.mirror))

    def _placed(self, move: Move) -> Move:
        shown = self.stage.shown_cut
        cut = move.cut if shown is None else shown
        return Move(self.first_epoch + move.epoch, self.first_step + move.step, cut)


def joined(earlier: Report, later: Report) -> Report:
    """Return one report of two parts of a run: bytes, rows and seconds add up, and so does the cut's history."""
    if not earlier:
        return later
    before, after = earlier["cache"], later["cache"]
    summed = {key: value + after[key] for key, value in before.items() if key not in ("mode", "exact")}
    return {
        **earlier,
        **later,
        "allreduce_bytes": earlier["allreduce_bytes"] + later["allreduce_bytes"],
        "other_collective_bytes": earlier["other_collective_bytes"] + later["other_collective_bytes"],
        "cut_history": [*earlier["cut_history"], *later["cut_history"]],
        "cache": {"mode": before["mode"], "exact": before["exact"] and after["exact"], **summed},
    }
