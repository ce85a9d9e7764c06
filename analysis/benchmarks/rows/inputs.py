"""Benchmarks of data, augmentation and logging in a step without freezing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from analysis.benchmarks.contest import Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import NUM_CLASSES, HeldSteps, Setting
from analysis.benchmarks.ranks import Ranks
from hvfreeze.config.tree import to_dict
from hvfreeze.data.batches import Batch
from hvfreeze.runs.clock import train_seconds
from hvfreeze.runs.directory import open_record
from hvfreeze.runs.progress import Progress
from hvfreeze.runs.record import NullRecord
from hvfreeze.training.evaluation import Totals
from hvfreeze.training.job import Job

STEPS_OF_CIFAR = 195

DUEL = Duel(
    name="data_and_logging",
    ours="extra",
    reference="step",
    bound=1.03,
    ratio=lambda extra, step: 1 + extra / step,
    alike=False,
    what="1 + (load and augment a batch of 25000 images a rank, count, show progress, write a line of metrics) / "
    "(training step of a ResNet-18, 32 px, nothing frozen)",
)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace)
    steps = HeldSteps(setting.job("step"))
    job = replace(setting, steps=STEPS_OF_CIFAR).job("x", augment="fresh")
    job.record = NullRecord() if ranks.rank else open_record(scratch / "run", to_dict(job.config), environment={})
    sides = [Side("extra", Extra(job, Progress(job.logger, 1000)).step), Side("step", steps.step)]
    yield from hold(ranks, sides, [DUEL], pace=pace)


class Extra:
    """Everything in a step but the training, and a line of metrics, which a run writes once an epoch."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.totals = Totals()
        self.logits = torch.zeros(job.config.optimizer.batch_size, NUM_CLASSES)
        self.steps = 0
        self.left: list[Batch] = []

    def step(self) -> float:
        """Do it for one step; return a pixel."""
        job = self.job
        if not self.left:
            self.left = job.feed.epoch(self.steps // job.steps_per_epoch)
        batch = self.left.pop(0)
        with job.clock.within("data"):
            images = job.feed.images.load(batch.ids, batch.views)
        self.totals.add(self.logits, batch.labels, 2.3)
        self.progress.step(self.steps, 1000, f"{job.epoch_in_words(0)}: loss {2.3:.3f}, {job.frozen_in_words}")
        seconds, report = job.clock.read(), job.strategy.report()
        job.record.metrics(
            {
                "epoch": 0,
                "step": self.steps,
                "train_loss": 2.3,
                "train_accuracy": 0.1,
                "test_loss": 2.3,
                "test_accuracy": 0.1,
                "train_seconds": train_seconds(seconds),
                "seconds": seconds,
                "allreduce_bytes": report["allreduce_bytes"],
                "cache": report["cache"],
            }
        )
        self.steps += 1
        return float(images[0, 0, 0, 0])
