"""What the training loop works on: the parts of a run, built the same way on every rank, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvfreeze.applying.card.contents import Card
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed, grouped
from hvfreeze.heads.solution import Solution
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.record import NullRecord, Record
from hvfreeze.strategies.strategy import Strategy
from hvfreeze.training.checkpoints.file import Saving
from hvfreeze.training.evaluation import Best, Scores, Totals
from hvfreeze.training.progress import Curves, NoCurves, Speaker
from hvfreeze.training.stages.budget import Budget
from hvfreeze.training.stages.course import Course
from hvfreeze.training.stages.guard import Guard
from hvfreeze.training.stages.stage import Stage


@dataclass
class Job:
    """The parts of a run, and how far it is."""

    config: Config
    world: World
    directory: Path
    block_names: tuple[str, ...]
    course: Course
    """The stages of the run, and what is open for the one under way."""
    budget: Budget
    """Chooses how many steps the stages have, where --time-budget is given."""
    guard: Guard | None
    """Of solutions that are followed by others; None where there is none, or it was switched off."""
    card: Card
    """Of the models, as far as it is known before they are trained."""
    evaluation_batches: list[Batch]
    """This replica's share of the evaluation samples."""
    replicas: int
    clock: PhaseClock
    speaker: Speaker
    notes: list[str]
    record: Record | NullRecord = field(default_factory=NullRecord)
    curves: NoCurves | Curves = field(default_factory=NoCurves)
    data_identities: dict[str, str] = field(default_factory=dict)
    step: int = 0
    epochs_done: int = 0
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase at the end of the last epoch that was recorded."""
    best_accuracy: float = 0.0
    last_accuracy: float = 0.0
    last_scores: Scores = field(default_factory=dict)
    """What the last evaluation found, by model."""
    best: dict[str, Best] = field(default_factory=dict)
    evaluations_in_vain: int = 0
    """Since a model was last better than ever."""
    totals: dict[str, Totals] = field(default_factory=dict)
    """Sums over the epoch's training samples so far, by model."""
    asked_to_leave: bool = False
    checkpoint_seconds: float = 0.0
    """What training waited for the last checkpoint."""
    saving: Saving | None = None
    """On rank 0, the checkpoint that is being written."""
    solved: Solution | None = None
    """What the epoch under way has solved, if it is a solution."""

    @property
    def strategy(self) -> Strategy:
        """What is open for the stage under way."""
        return self.course.opened.strategy

    @property
    def feed(self) -> TrainFeed:
        """The training samples of the stage under way."""
        return self.course.opened.feed

    @property
    def stage(self) -> Stage:
        """The stage under way."""
        return self.course.stage

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch of the stage under way."""
        return self.stage.steps_per_epoch

    @property
    def stage_step(self) -> int:
        """Steps of the stage under way that are made."""
        return self.step - self.course.first_step

    @property
    def stage_epoch(self) -> int:
        """Epochs of the stage under way that are made."""
        return self.epochs_done - self.course.first_epoch

    def images(self, step: int) -> int:
        """Return how many images all replicas together train on in the first `step` steps, of this stage or before."""
        return self.course.batches(step) * self.config.optimizer.batch_size * self.replicas

    def steps_of(self, epoch: int) -> list[list[Batch]]:
        """Return the batches of each step of an epoch of the stage under way."""
        return grouped(self.feed.epoch(epoch), self.config.optimizer.accumulate)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.course.total_steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch of the stage under way."""
        return self.stage_step % self.steps_per_epoch == 0 or self.stage_step == self.stage.steps

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.course.is_last and self.stage_epoch == self.stage.epochs

    @property
    def solution_is_judged(self) -> bool:
        """Whether the guard will hold the solution of this stage against another, made alike."""
        if self.guard is None or sum(stage.solves for stage in self.course.stages) < 2:
            return False
        # The first may be of a run that was to end with it, and has grown since.
        return self.guard.best is None or self.guard.best.verdict.whole

    def stages_told(self) -> list[dict[str, Any]]:
        """Return what came of each stage, for summary.json."""
        verdicts = {v.stage: v for v in self.guard.verdicts} if self.guard else {}
        told = []
        for number, stage in enumerate(self.course.stages):
            judged = verdicts.get(number)
            found = judged.told() if judged else {}
            told.append({"stage": stage.name, "steps": stage.steps, **found})
        return told
