"""What the training loop works on: the parts of a run, built the same way on every rank, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed, grouped
from hvfreeze.data.images import listed
from hvfreeze.data.overlap import Conflict, Overlap
from hvfreeze.heads.solution import Solution
from hvfreeze.inference.card import Card
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.record import NullRecord, Record
from hvfreeze.strategies.base import Strategy
from hvfreeze.training.checkpoint_file import Saving
from hvfreeze.training.evaluation import Best, Scores, Totals
from hvfreeze.training.guard import Guard
from hvfreeze.training.mirror_trial import Finding
from hvfreeze.training.progress import Curves, Progress, RunLogger
from hvfreeze.training.stages import Stage, StageRunner
from hvfreeze.training.time_budget import TimeBudget
from hvfreeze.training.trial import Judge


@dataclass
class Job:
    """The parts of a run, and how far it is."""

    config: Config
    world: World
    directory: Path
    block_names: tuple[str, ...]
    stage_runner: StageRunner
    budget: TimeBudget | None
    """With --time-budget: chooses how many steps the stages have."""
    guard: Guard | None
    """With --freeze auto: of solutions that are followed by others."""
    card: Card
    """Of the models, as far as it is known before they are trained."""
    evaluation_batches: list[Batch]
    """This replica's share of the evaluation samples."""
    clock: PhaseClock
    logger: RunLogger
    judge: Judge | None = None
    """With --freeze auto: tells whether tuning pays."""
    mirror: Finding | None = None
    """What was found out about mirror images before the first step; None where that is not open, or a solution does."""
    notes: list[str] = field(default_factory=list)
    record: Record | NullRecord = field(default_factory=NullRecord)
    progress: Progress = field(default_factory=Progress)
    curves: Curves | None = None
    """On rank 0 with --tensorboard."""
    data_identities: dict[str, str] = field(default_factory=dict)
    majority_share: float | None = None
    """Of the most frequent class among the training samples; None where their classes are equal."""
    overlap: Overlap | None = None
    """Of evaluated images that are training images too, where there are some."""
    conflict: Conflict | None = None
    """Of training images that are the same picture in different classes, where there are some."""
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
    called: Callable[[int], str] = "sample {}".format
    """What a message calls a training sample, by its number."""
    unread: Callable[[Sequence[Stage], str], list[str]] = lambda stages, why: []
    """Returns a line for each reason for which settings of the user have no effect on such stages; see `readers`."""
    solved: Solution | None = None
    """What the epoch under way has solved, if it is a solution."""

    @property
    def strategy(self) -> Strategy:
        """What is open for the stage under way."""
        return self.stage_runner.opened.strategy

    @property
    def feed(self) -> TrainFeed:
        """The training samples of the stage under way."""
        return self.stage_runner.opened.feed

    @property
    def stage(self) -> Stage:
        """The stage under way."""
        return self.stage_runner.stage

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch of the stage under way."""
        return self.stage.steps_per_epoch

    @property
    def stage_step(self) -> int:
        """Steps of the stage under way that are made."""
        return self.step - self.stage_runner.first_step

    @property
    def stage_epoch(self) -> int:
        """Epochs of the stage under way that are made."""
        return self.epochs_done - self.stage_runner.first_epoch

    def images(self, step: int) -> int:
        """Return how many images all replicas together train on in the first `step` steps, of this stage or before."""
        return self.stage_runner.images(step) * self.feed.plan.replicas

    def names(self, samples: Sequence[int]) -> str:
        """Return what a message calls some training samples, the first few where there are many."""
        return listed([self.called(sample) for sample in samples])

    def steps_of(self, epoch: int) -> list[list[Batch]]:
        """Return the batches of each step of an epoch of the stage under way."""
        return grouped(self.feed.epoch(epoch), self.stage.config.optimizer.accumulate)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.stage_runner.total_steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch of the stage under way."""
        return self.stage_step % self.steps_per_epoch == 0 or self.stage_step == self.stage.steps

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage_runner.is_last and self.stage_epoch == self.stage.epochs
