"""Whole runs, as the program makes them, but for evaluation and checkpoints."""

from __future__ import annotations

import shutil
from typing import Any

from analysis.benchmarks.material import Setting
from hvfreeze.strategies.base import MODEL
from hvfreeze.training.job import Job
from hvfreeze.training.loop import train_epoch


class ProgramRun:
    """A run from an empty directory to its last step, again and again; `options` are those of `Setting.job`."""

    def __init__(self, setting: Setting, name: str, **options: Any) -> None:
        self.setting, self.name, self.options = setting, name, options
        self.predicted_seconds: list[float] = []
        """The predicted saving of each run's cache."""

    def prepare(self) -> None:
        """Set up a new run. Collective: every rank must call this."""
        self.job: Job = self.setting.job(self.name, **self.options)

    def step(self) -> float:
        """Make the run; return its mean loss. Collective: every rank must call this."""
        job = self.job
        for epoch in range(self.setting.epochs):
            train_epoch(job, epoch)
        job.strategy.close()
        self.predicted_seconds.append(float(job.strategy.report()["cache"]["seconds_saved_predicted"]))
        shutil.rmtree(job.directory)
        return mean_loss(job)


def mean_loss(job: Job) -> float:
    """Return the mean of all losses so far."""
    totals = job.totals[MODEL]
    return totals.loss / totals.count


def epoch_of(job: Job) -> float:
    """Make the next epoch of a job; return the mean of all losses so far. Collective: every rank must call this.

    Raises:
        ValueError: the run has no more epochs, so that there is nothing to time.
    """
    before = job.step
    train_epoch(job, before // job.steps_per_epoch)
    if job.step == before:
        raise ValueError(f"epoch {before // job.steps_per_epoch} is behind the run's end: give the setting more epochs")
    return mean_loss(job)
