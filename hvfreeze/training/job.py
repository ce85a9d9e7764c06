"""The state of a run: its parts, which are equal on every rank, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed, group_batches
from hvfreeze.data.images import listed
from hvfreeze.data.overlap import Conflict, Overlap
from hvfreeze.freezing.vote import Decision
from hvfreeze.heads.flips import Finding
from hvfreeze.inference.card import Card
from hvfreeze.runs.checkpoint_file import Saving
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.progress import Progress, RunLogger
from hvfreeze.runs.reading import Move
from hvfreeze.runs.record import NullRecord, Record
from hvfreeze.strategies.base import Strategy
from hvfreeze.tasks import Task
from hvfreeze.training.budget import Budget
from hvfreeze.training.evaluation import Best, Scores, Totals
from hvfreeze.training.journal import Journal
from hvfreeze.training.parts import Factory, Opened, Part
from hvfreeze.wording import plural

Report = dict[str, Any]


@dataclass
class Job:
    """The parts of a run and its progress."""

    config: Config
    world: World
    directory: Path
    block_names: tuple[str, ...]
    factory: Factory
    opened: Opened
    """The open part, on which the current verb works."""
    journal: Journal
    budget: Budget
    card: Card
    """Card of the models, as known before training."""
    evaluation_batches: list[Batch]
    """This replica's share of the evaluation samples."""
    clock: PhaseClock
    logger: RunLogger
    requested: Config | None = None
    """The settings before the data and the ranks determined some of them; None if all are the same."""
    flips: str | None = None
    """Horizontal flips, on or off, if the trial decided them."""
    flip_trial: Finding | None = None
    """Result of the trial with and without flips."""
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """Notes for log.txt only."""
    record: Record | NullRecord = field(default_factory=NullRecord)
    progress: Progress = field(default_factory=Progress)
    data_identities: dict[str, str] = field(default_factory=dict)
    majority_share: float | None = None
    """Share of the most frequent training class, 0-1; None if classes are balanced."""
    overlap: Overlap | None = None
    """Train/test duplicates, if there are any."""
    conflict: Conflict | None = None
    """Equal training images with different classes, if there are any."""
    step: int = 0
    """Optimizer steps so far."""
    epochs_done: int = 0
    images: int = 0
    """Images over all replicas for training and fitting, before the open part."""
    set_up_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per phase before training, see `SET_UP_PHASES`."""
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per phase at the end of the last recorded epoch or verb."""
    best_accuracy: float = 0.0
    last_accuracy: float = 0.0
    last_scores: Scores = field(default_factory=dict)
    """Scores of the last evaluation, by model."""
    best: dict[str, Best] = field(default_factory=dict)
    evaluations_without_gain: int = 0
    """Evaluations since a model last improved."""
    totals: dict[str, Totals] = field(default_factory=dict)
    """Sums over the epoch's training samples so far, by model."""
    thresholds: tuple[float, ...] = ()
    """Thresholds of the model's labels that the recipe chose."""
    snapshots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Snapshots of the model that the recipe may restore, by name."""
    earlier: Report = field(default_factory=dict)
    """Joined reports of the parts before the open one."""
    asked_to_leave: bool = False
    asked_by: str = ""
    """Name of the signal that asked this rank to leave."""
    checkpoint_seconds: float = 0.0
    """Seconds that training waited for the last checkpoint."""
    saving: Saving | None = None
    """The checkpoint that is being written, on rank 0."""
    waiting: Callable[[], None] | None = None
    """Loads a checkpoint's model into the open part; None once that is done, or without a checkpoint."""

    @property
    def settings(self) -> Config:
        """The run's settings with the result of the flip trial."""
        if self.flips is None or self.config.data.flips != "auto":
            return self.config
        return replace(self.config, data=replace(self.config.data, flips=self.flips))

    @property
    def task(self) -> Task:
        """Task of the models."""
        task = self.factory.context.corpus.task
        return replace(task, thresholds=self.thresholds) if self.thresholds else task

    @property
    def chooses(self) -> bool:
        """Whether the evaluated samples are held out, so that they may choose thresholds."""
        return self.config.data.validation_fraction > 0 and not self.thresholds

    @property
    def beside_majority(self) -> str:
        """Text after an accuracy on training samples with imbalanced classes."""
        share = self.majority_share
        return "" if share is None else f"; majority class {100 * share:.2f} %"

    @property
    def strategy(self) -> Strategy:
        """Strategy of the open part."""
        return self.opened.strategy

    @property
    def feed(self) -> TrainFeed:
        """Training samples of the open part."""
        return self.opened.feed

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch of the open part."""
        return self.opened.steps_per_epoch

    @property
    def part_step(self) -> int:
        """Steps so far in the open part."""
        return self.step - self.opened.first_step

    @property
    def part_epoch(self) -> int:
        """Epochs so far in the open part."""
        return self.epochs_done - self.opened.first_epoch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run at the end of the open part."""
        return self.opened.first_step + self.opened.steps

    @property
    def place(self) -> str:
        """Where the run is, as messages put it."""
        return f"after step {self.step} of {self.total_steps}" if self.step else "before the first step"

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch."""
        return self.part_step % self.steps_per_epoch == 0 or self.part_step == self.opened.steps

    @property
    def cut(self) -> int:
        """Number of frozen blocks of the model."""
        return self._shown(self.opened.model.cut)

    def images_of(self, steps: int) -> int:
        """Return the number of images of all replicas in the first `steps` steps of the open part."""
        opened, settings = self.opened, self.opened.part.settings.optimizer
        epochs, rest = divmod(steps, opened.steps_per_epoch)
        whole = opened.feed.plan.batches_per_epoch
        batches = epochs * whole + min(whole, rest * settings.accumulate)
        return batches * settings.batch_size * opened.feed.plan.replicas

    def names(self, samples: Sequence[int]) -> str:
        """Return the names of training samples for messages, at most a few."""
        return listed([self.factory.context.corpus.train.called(sample) for sample in samples])

    def steps_of(self, epoch: int) -> list[list[Batch]]:
        """Return the batches of each step in an epoch of the open part."""
        return group_batches(self.feed.epoch(epoch), self.opened.part.settings.optimizer.accumulate)

    def enter(self, part: Part) -> None:
        """Open a part and close the one before it; an open, unused part stays open. Collective."""
        if self.opened.is_used or self.opened.part != part:
            if self.opened.is_used:
                self.images += self.images_of(self.part_step)
                self.earlier = self.report()
            self.opened.model.close()
            self.opened = self.factory.open(part)
        self.opened.first_step, self.opened.first_epoch, self.opened.is_used = self.step, self.epochs_done, True

    def report(self) -> Report:
        """Return the report of all parts so far; see `OpenModel.report`. Collective."""
        mine = self.opened.model.report()
        return joined(self.earlier, {**mine, "cut_history": [self._placed(move) for move in mine["cut_history"]]})

    def placed(self, decision: Decision) -> Decision:
        """Return a vote of the open part with its step and epoch in the run."""
        step, epoch = self.opened.first_step, self.opened.first_epoch
        return replace(decision, step=step + decision.step, epoch=epoch + decision.epoch)

    def _placed(self, move: Move) -> Move:
        first_epoch, first_step = self.opened.first_epoch, self.opened.first_step
        return Move(first_epoch + move.epoch, first_step + move.step, self._shown(move.cut))

    @property
    def frozen_in_words(self) -> str:
        """The number of frozen blocks for log lines."""
        return f"{self.cut} of {plural(len(self.block_names), 'block')} frozen"

    def epoch_in_words(self, epoch: int) -> str:
        """Return epoch `epoch`, from 0, of the open part for log lines: counted from 1, with the total if known."""
        total = f" of {self.opened.epochs}" if self.budget.seconds is None else ""
        return f"epoch {epoch + 1}{total}"

    def _shown(self, cut: int) -> int:
        """Return a cut in blocks of the model; a fitted head counts all blocks but one as features."""
        return len(self.block_names) - 1 if self.opened.part.fits_head else cut


def joined(earlier: Report, later: Report) -> Report:
    """Join the reports of two parts of a run: add bytes, rows and seconds, and append the history of the cut."""
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
