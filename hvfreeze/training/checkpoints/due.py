"""When a checkpoint is due: every so many steps, or as often as costs a small part of the training time."""

from __future__ import annotations

from hvfreeze.runs.clock import train_seconds
from hvfreeze.training.checkpoints.best import out_of_patience
from hvfreeze.training.checkpoints.saving import save
from hvfreeze.training.job import Job

LARGEST_SHARE = 0.03
"""The part of the training time that checkpoints may take with --checkpoint-every auto."""


def save_when_due(job: Job) -> None:
    """Write a checkpoint when the step calls for one. Collective."""
    if is_due(job):
        before = job.clock.read()["checkpoint"]
        with job.clock.within("checkpoint"):
            save(job, settled=True)
        job.checkpoint_seconds = job.clock.read()["checkpoint"] - before


def is_due(job: Job) -> bool:
    """Tell whether the step calls for a checkpoint; the last one does unless there are none at all. Collective."""
    every = job.config.run.checkpoint_steps(job.steps_per_epoch)
    last = job.step == job.total_steps or out_of_patience(job)
    if every is None:
        return last or (job.at_epoch_end and is_cheap(job))
    return bool(every) and (job.step % every == 0 or last)


def is_cheap(job: Job) -> bool:
    """Tell whether checkpoints, one more with them, take at most `LARGEST_SHARE` of training. Collective.

    Only at the end of an epoch, where the strategy settles anyhow: a clock must not change one bit of the training.
    """
    seconds = job.clock.read()
    spent, trained = seconds["checkpoint"], train_seconds(seconds)
    cheap = spent + job.checkpoint_seconds <= LARGEST_SHARE * trained
    return job.world.broadcast_object(cheap, name="checkpoint.cheap")
