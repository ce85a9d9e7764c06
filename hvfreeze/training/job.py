"""What a run works on: its parts, built the same way on every rank, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Batch, TrainFeed, grouped
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
from hvfreeze.training.stage_build import Factory, Opened, Part

Report = dict[str, Any]


@dataclass
class Job:
    """The parts of a run, and how far it is."""

    config: Config
    world: World
    directory: Path
    block_names: tuple[str, ...]
    factory: Factory
    opened: Opened
    """What the verb under way works on."""
    journal: Journal
    budget: Budget
    card: Card
    """Of the models, as far as it is known before they are trained."""
    evaluation_batches: list[Batch]
    """This replica's share of the evaluation samples."""
    evaluated: int
    """Number of evaluation samples of all replicas."""
    clock: PhaseClock
    logger: RunLogger
    flips: str | None = None
    """Whether horizontal flips are shown, on or off, where that was found out."""
    flip_trial: Finding | None = None
    """What was found out about them before the recipe."""
    notes: list[str] = field(default_factory=list)
    record: Record | NullRecord = field(default_factory=NullRecord)
    progress: Progress = field(default_factory=Progress)
    data_identities: dict[str, str] = field(default_factory=dict)
    majority_share: float | None = None
    """Of the most frequent class among the training samples; None where their classes are equal."""
    overlap: Overlap | None = None
    """Of evaluated images that are training images too, where there are some."""
    conflict: Conflict | None = None
    """Of training images that are the same picture in different classes, where there are some."""
    step: int = 0
    """Optimizer steps made."""
    epochs_done: int = 0
    images: int = 0
    """That all replicas together have trained on, or fitted a head to, before the part that is open."""
    epoch_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase at the end of the last epoch, or verb, that was recorded."""
    best_accuracy: float = 0.0
    last_accuracy: float = 0.0
    last_scores: Scores = field(default_factory=dict)
    """What the last evaluation found, by model."""
    best: dict[str, Best] = field(default_factory=dict)
    evaluations_in_vain: int = 0
    """Since a model was last better than ever."""
    totals: dict[str, Totals] = field(default_factory=dict)
    """Sums over the epoch's training samples so far, by model."""
    thresholds: tuple[float, ...] = ()
    """Of labels, that a recipe has chosen for the model."""
    snapshots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """States of the model that the recipe may go back to, by name."""
    earlier: Report = field(default_factory=dict)
    """The joined reports of the parts before the one that is open."""
    asked_to_leave: bool = False
    checkpoint_seconds: float = 0.0
    """What training waited for the last checkpoint."""
    saving: Saving | None = None
    """On rank 0, the checkpoint that is being written."""
    called: Callable[[int], str] = "sample {}".format
    """What a message calls a training sample, by its number."""
    waiting: Callable[[], None] | None = None
    """Loads a checkpoint's model into the part that is open; None once that is done, or where there is none."""

    @property
    def settings(self) -> Config:
        """The run's settings, with what was found out about horizontal flips."""
        if self.flips is None or self.config.data.flips != "auto":
            return self.config
        return replace(self.config, data=replace(self.config.data, flips=self.flips))

    @property
    def task(self) -> Task:
        """What the models answer."""
        task = self.factory.context.corpus.task
        return replace(task, thresholds=self.thresholds) if self.thresholds else task

    @property
    def chooses(self) -> bool:
        """Whether samples that are evaluated are held out, so that thresholds may be chosen by them."""
        return self.config.data.validation_fraction > 0 and not self.thresholds

    @property
    def beside_majority(self) -> str:
        """What stands beside an accuracy on training samples where their classes are unequal."""
        share = self.majority_share
        return "" if share is None else f"; the majority class is {100 * share:.2f} % of these"

    @property
    def strategy(self) -> Strategy:
        """What trains, or answers, in the part that is open."""
        return self.opened.strategy

    @property
    def feed(self) -> TrainFeed:
        """The training samples of the part that is open."""
        return self.opened.feed

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch of the part that is open."""
        return self.opened.steps_per_epoch

    @property
    def part_step(self) -> int:
        """Steps that are made of the part that is open."""
        return self.step - self.opened.first_step

    @property
    def part_epoch(self) -> int:
        """Epochs that are made of the part that is open."""
        return self.epochs_done - self.opened.first_epoch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run at the end of the part that is open."""
        return self.opened.first_step + self.opened.steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch."""
        return self.part_step % self.steps_per_epoch == 0 or self.part_step == self.opened.steps

    @property
    def cut(self) -> int:
        """Number of frozen blocks of the model."""
        return self._shown(self.opened.model.cut)

    def images_of(self, steps: int) -> int:
        """Return how many images all replicas train on in the first `steps` steps of the part that is open."""
        opened, settings = self.opened, self.opened.part.settings.optimizer
        epochs, rest = divmod(steps, opened.steps_per_epoch)
        whole = opened.feed.plan.batches_per_epoch
        batches = epochs * whole + min(whole, rest * settings.accumulate)
        return batches * settings.batch_size * opened.feed.plan.replicas

    def names(self, samples: Sequence[int]) -> str:
        """Return what a message calls some training samples, the first few where there are many."""
        return listed([self.called(sample) for sample in samples])

    def steps_of(self, epoch: int) -> list[list[Batch]]:
        """Return the batches of each step of an epoch of the part that is open."""
        return grouped(self.feed.epoch(epoch), self.opened.part.settings.optimizer.accumulate)

    def enter(self, part: Part) -> None:
        """Open a part, and close the one before it; one that is open and was not used stays. Collective."""
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
        """Return a vote of this part with its step and epoch in the run."""
        step, epoch = self.opened.first_step, self.opened.first_epoch
        return replace(decision, step=step + decision.step, epoch=epoch + decision.epoch)

    def _placed(self, move: Move) -> Move:
        first_epoch, first_step = self.opened.first_epoch, self.opened.first_step
        return Move(first_epoch + move.epoch, first_step + move.step, self._shown(move.cut))

    def _shown(self, cut: int) -> int:
        """Return a cut in blocks of the model, all but one of which are features of a fitted head."""
        return len(self.block_names) - 1 if self.opened.part.solves else cut


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
