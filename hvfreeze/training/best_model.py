"""The best model so far by held-out samples: its file, and early stopping.

RUN/best/NAME.pt                              each model at its best
RUN/checkpoints/best-step-00000120.NAME.pt    hard link to that file at the time of a checkpoint

A run that resumes from a checkpoint gets the best model of that time. Links are removed with their checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.errors import RefusedError
from hvfreeze.runs.checkpoint_file import path_of
from hvfreeze.runs.files import publish, publishing, reason_of
from hvfreeze.strategies.base import WholeModel
from hvfreeze.training.evaluation import Best
from hvfreeze.training.job import Job


def best_path(job: Job, name: str) -> Path:
    """Return the path of a model's best state."""
    return job.directory / "best" / f"{name}.pt"


def follow_best(job: Job, epoch: int) -> None:
    """Record the models that improved in the evaluation after `epoch`, and save them if --keep asks for it.

    Collective: every rank of the world must call this, after synchronizing and evaluating.
    """
    improved = [name for name, score in job.last_scores.items() if name not in job.best or job.best[name].below(score)]
    # While class weights are deferred, evaluations without a gain do not count: the weights may still help.
    waits = bool(improved) or job.task.defers_weights
    job.evaluations_without_gain = 0 if waits else job.evaluations_without_gain + 1
    keeps = job.config.run.keep == "best" and bool(improved)
    digest = job.strategy.check(step=job.step) if keeps else ""
    for name in improved:
        score = job.last_scores[name]
        job.best[name] = Best(epoch, job.step, score.accuracy, score.loss, digest, *score[2:])
    if keeps:
        for model in job.strategy.whole_models():
            raise_on_all_ranks(job.world, partial(write, job, model, improved), name="best.write")


def write(job: Job, model: WholeModel, improved: Sequence[str]) -> None:
    """Write an improved model's state on rank 0."""
    if job.world.rank == 0 and model.name in improved:
        with publishing(best_path(job, model.name)) as file:
            torch.save(model.state, file)


def out_of_patience(job: Job) -> bool:
    """Return True if --early-stop ends the run now; equal on all ranks."""
    most = job.config.run.early_stop
    return most is not None and job.evaluations_without_gain >= most


def linked_path(checkpoint: Path, name: str) -> Path:
    """Return the path of the link to a model's best state for a checkpoint."""
    return checkpoint.with_name(f"best-{checkpoint.stem}.{name}.pt")


def link_best(job: Job, folder: Path) -> None:
    """Link the best models to the checkpoint of this step, on rank 0; remove the links of removed checkpoints."""
    if job.config.run.keep != "best" or not job.best:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for link in folder.glob("best-step-*.pt"):
            if not (folder / f"{link.name.split('.')[0].removeprefix('best-')}.pt").exists():
                link.unlink()
        for name in job.best:
            replace_by(linked_path(path_of(folder, job.step), name), best_path(job, name))
    except OSError as error:
        raise RefusedError(f"{folder}: cannot link the best model: {reason_of(error)}") from error


def bring_back_best(job: Job, checkpoint: Path) -> None:
    """Restore the best models as they were at a checkpoint, on rank 0."""
    if job.config.run.keep != "best" or job.world.rank > 0:
        return
    for name in job.best:
        link = linked_path(checkpoint, name)
        if not link.exists():
            raise RefusedError(f"{link}, the best model so far, is missing; restore it or remove {checkpoint.name}")
        try:
            best_path(job, name).parent.mkdir(parents=True, exist_ok=True)
            replace_by(best_path(job, name), link)
        except OSError as error:
            raise RefusedError(f"{best_path(job, name)} cannot be written: {reason_of(error)}") from error


def replace_by(target: Path, source: Path) -> None:
    """Hard-link `target` to the file `source`, or copy it if the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        publish(target, [source.read_bytes()])
