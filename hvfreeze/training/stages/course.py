"""How far a run is in its stages: what is open for the one under way, and what those before it have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from hvfreeze.data.batches import TrainFeed
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.voting.vote import Decision
from hvfreeze.runs.moves import Move
from hvfreeze.strategies.strategy import Strategy
from hvfreeze.training.stages.stage import Stage, first_epoch, first_step, with_steps

Report = dict[str, Any]


class Opened(NamedTuple):
    """What is open for a stage."""

    strategy: Strategy
    feed: TrainFeed
    model: nn.Module
    """The one that the strategy trains; what a stage keeps of it comes from here, and goes back here."""
    block_names: tuple[str, ...]
    """Of the chain that it works on."""
    length: Length
    """What the strategy knows of how long the stage lasts."""


OpenStage = Callable[[Stage], Opened]


class Course:
    """The stages of a run, of which one is open.

    Args:
        stages: in order, at least one.
        open_stage: opens a stage; a collective.
    """

    def __init__(self, stages: Sequence[Stage], open_stage: OpenStage) -> None:
        self.stages: tuple[Stage, ...] = tuple(stages)
        self.number = 0
        self._open_stage = open_stage
        self._earlier: Report = {}
        self.opened = open_stage(self.stages[0])

    @property
    def stage(self) -> Stage:
        """The stage under way."""
        return self.stages[self.number]

    @property
    def first_step(self) -> int:
        """Steps that were made when it began."""
        return first_step(self.stages, self.number)

    @property
    def first_epoch(self) -> int:
        """Epochs that were made when it began."""
        return first_epoch(self.stages, self.number)

    @property
    def total_steps(self) -> int:
        """Of all stages."""
        return first_step(self.stages, len(self.stages))

    @property
    def total_epochs(self) -> int:
        """Of all stages."""
        return first_epoch(self.stages, len(self.stages))

    def batches(self, step: int) -> int:
        """Return how many batches of every replica the run's first `step` steps are made of."""
        before = sum(stage.batches(stage.steps) for stage in self.stages[: self.number])
        return before + self.stage.batches(step - self.first_step)

    @property
    def cut(self) -> int:
        """Number of frozen blocks of the model."""
        shown = self.stage.shown_cut
        return self.opened.strategy.cut if shown is None else shown

    @property
    def is_last(self) -> bool:
        """Whether no stage that has steps comes after this one."""
        return not any(stage.steps for stage in self.stages[self.number + 1 :])

    def plan(self, steps: Sequence[int]) -> None:
        """Let the stages last so many steps each; the strategy that is open learns of it. Equal on all ranks."""
        self.stages = with_steps(self.stages, steps)
        self.opened.length.epochs = self.stage.config.optimizer.epochs

    def turn(self) -> None:
        """Go on to the next stage that has steps.

        Collective: every rank of the world must call this.
        """
        after = range(self.number + 1, len(self.stages))
        report = self.report()
        self._enter(next(number for number in after if self.stages[number].steps), earlier=report)

    def report(self) -> Report:
        """Return the report of all stages so far; see `Strategy.report`.

        Collective: every rank of the world must call this.
        """
        mine = self.opened.strategy.report()
        return joined(self._earlier, {**mine, "cut_history": [self._placed(move) for move in mine["cut_history"]]})

    def placed(self, decision: Decision) -> Decision:
        """Return a vote of this stage with its step and epoch in the run."""
        return replace(decision, step=self.first_step + decision.step, epoch=self.first_epoch + decision.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the open strategy's state."""
        earlier = {**self._earlier, "cut_history": [list(move) for move in self._earlier.get("cut_history", ())]}
        return {"number": self.number, "steps": [stage.steps for stage in self.stages], "earlier": earlier}

    def knows(self, state: Any) -> bool:
        """Tell whether `state` is what `state_dict` of a run with as many stages, or of one with fewer, returned."""
        if not isinstance(state, Mapping) or not isinstance(state.get("earlier"), Mapping):
            return False
        number, steps = state.get("number"), state.get("steps")
        if type(number) is not int or not isinstance(steps, list) or any(type(count) is not int for count in steps):
            return False
        return 0 <= number < len(steps) <= len(self.stages) and min(steps) >= 0

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_plan: bool) -> None:
        """Open the stage that a checkpoint was written in; its strategy's state is the caller's to put back.

        Collective: every rank of the world must call this.

        Args:
            state: what `state_dict` returned.
            keeps_plan: whether stages last as long as was planned there, and not as the configuration says.
        """
        if keeps_plan:
            self.stages = self.stages[: len(state["steps"])]
            self.plan(state["steps"])
        moves = [Move(*move) for move in state["earlier"].get("cut_history", ())]
        earlier = {**state["earlier"], "cut_history": moves} if moves else {}
        if state["number"] == self.number:
            self._earlier = earlier
        else:
            self._enter(state["number"], earlier=earlier)

    def _enter(self, number: int, *, earlier: Report) -> None:
        self.opened.strategy.close()
        self.number, self._earlier = number, earlier
        self.opened = self._open_stage(self.stage)

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
