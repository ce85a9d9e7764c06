"""A run from its configuration to its summary."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvfreeze.applying.card.file import sha256_of, write_card
from hvfreeze.config.tree import Config
from hvfreeze.errors import HvfreezeError
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.machine.signals import noticing
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import train_seconds
from hvfreeze.runs.publishing import publish, publishing
from hvfreeze.runs.reading import SUMMARY, read_object
from hvfreeze.runs.record import finite
from hvfreeze.strategies.strategy import WholeModel
from hvfreeze.torch_compiler import leave_compiler_out
from hvfreeze.training.checkpoints.best import best_path, out_of_patience
from hvfreeze.training.checkpoints.file import newest
from hvfreeze.training.checkpoints.restoring import restore
from hvfreeze.training.checkpoints.saving import directory_of, save
from hvfreeze.training.evaluation import by_model
from hvfreeze.training.job import Job
from hvfreeze.training.loop import own_part, train
from hvfreeze.training.making.preparing import prepare
from hvfreeze.training.progress import Curves, NoCurves, Progress, open_progress


def run(config: Config, world: World, *, asked: Sequence[int] = (), started: float | None = None) -> dict[str, Any]:
    """Train as `config` says and return summary.json's object, on every rank.

    Collective: every rank of `world` must call this.

    Args:
        config: the run.
        world: all ranks of the job.
        asked: signals that asked this rank to leave before this call.
        started: `time.monotonic()` from which --time-budget counts; None is now.

    Raises:
        HvfreezeError: see its subclasses; raised on all ranks.
    """
    with noticing(signal.SIGUSR1) as came:
        came.extend(asked)
        leave_compiler_out()
        job = prepare(config, world) if started is None else prepare(config, world, started=started)
        with told_at_its_end(job):
            return train_and_conclude(job, came)


def train_and_conclude(job: Job, asked: Sequence[int]) -> dict[str, Any]:
    """Go on from the newest checkpoint or start, train to the end, and return the summary; see `run`. Collective."""
    wrote = restore(job) if job.config.run.resume else None
    done = finished(job) if wrote else None
    progress = open_progress(job.speaker, job.total_steps, done=job.step)
    try:
        if done is not None:
            progress.line(f"{job.directory} is complete; nothing to do")
            return done
        together(job.world, job.record.begin, name="record.begin")
        job.curves = together(job.world, lambda: open_curves(job), name="curves")
        introduce(job, progress, resumed=wrote is not None)
        if wrote not in (None, job.world.size):
            # At once, in place of those that count other steps: the newest is found by its number of steps.
            save(job, settled=True, alone=True)
        train(job, progress, asked=asked)
    finally:
        progress.close()
        job.curves.close()
        job.strategy.close()
        if job.saving is not None:
            job.saving.let_go()
    return conclude(job)


def open_curves(job: Job) -> NoCurves | Curves:
    """Return what draws the run's curves: rank 0 with --tensorboard."""
    if not job.config.run.tensorboard or job.world.rank > 0:
        return NoCurves()
    return Curves(job.directory / "tensorboard", step=job.step)


@contextmanager
def told_at_its_end(job: Job) -> Iterator[None]:
    """Log why the run ended early, and tell who interrupts it how it goes on; let others use its directory."""
    try:
        yield
    except HvfreezeError as error:
        job.record.log(f"error: {error}")
        raise
    except KeyboardInterrupt:
        message = f"after step {job.step} of {job.total_steps}; {way_on(job)}"
        job.record.log(f"interrupted {message}")
        raise KeyboardInterrupt(message) from None
    finally:
        job.record.close()


def way_on(job: Job) -> str:
    """Return how to continue a run that was interrupted."""
    again = ["hvfreeze", "train", "--config", str(job.directory / "config.yaml"), "--run-dir", str(job.directory)]
    where = "from the last checkpoint" if newest(directory_of(job)) else "anew, there is no checkpoint yet,"
    return f"go on {where} with: {shlex.join([*again, '--resume'])}"


def introduce(job: Job, progress: Progress, *, resumed: bool) -> None:
    """Say what is about to happen."""
    config = job.config
    progress.line(
        f"{config.model.model} ({' | '.join(job.block_names)}) on {config.data.data}, {job.world.size} "
        f"{'rank' if job.world.size == 1 else 'ranks'}, {job.steps_per_epoch} steps an epoch, "
        f"freeze {config.freeze.freeze}, cache {config.cache.cache}; files in {job.directory}"
    )
    for note in job.notes:
        progress.line(f"note: {note}")
    for line in [] if resumed else job.budget.told():
        progress.line(line)
    if resumed:
        progress.line(f"resumed after step {job.step} of {job.total_steps}, cut {job.course.cut}")


def finished(job: Job) -> dict[str, Any] | None:
    """Return the summary of a run that has ended already, on every rank; None for one that has not.

    Collective: every rank of the world must call this.

    Raises:
        RefusedError: there is a summary, but a damaged one.
    """
    path = job.directory / "summary.json"

    def read() -> dict[str, Any] | None:
        ended = job.ended or out_of_patience(job)
        return read_object(path, SUMMARY) if job.world.rank == 0 and ended and path.exists() else None

    return job.world.broadcast_object(together(job.world, read, name="summary.read"), name="finished")


def conclude(job: Job) -> dict[str, Any]:
    """Check that ranks agree, keep the models and write the summary.

    Collective: every rank of the world must call this.
    """
    job.strategy.settle()
    # Not training, in which the clock would have it.
    with job.clock.within("checkpoint"):
        digest = job.strategy.check(step=job.step)
        export(job, digest=digest)
    seconds = job.clock.read()
    spent = train_seconds(seconds)
    report = job.course.report()
    if job.guard is not None and job.guard.best is not None:
        report |= {"head": job.guard.best.head}
    summary: dict[str, Any] = {
        "test_accuracy": job.last_accuracy,
        "best_test_accuracy": job.best_accuracy,
        "epochs": job.epochs_done,
        "steps": job.step,
        "world_size": job.world.size,
        "train_seconds": spent,
        "seconds": seconds,
        "images_per_second": job.images(job.step) / max(spent, 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "other_collective_bytes": report["other_collective_bytes"],
        "final_cut": job.course.cut,
        "cut_history": [list(move) for move in report["cut_history"]],
        "cache": report["cache"],
        "parameter_digest": digest,
        "resumed": list(job.record.resumed),
    }
    if job.config.freeze.auto:
        summary["stages"] = job.stages_told()
    summary |= job.budget.report()
    if job.config.run.keep == "best":
        summary["kept"] = {name: best._asdict() for name, best in job.best.items()}
    summary |= own_part(report, summary) | by_model(job.strategy.models, test=job.last_scores)
    summary = job.world.broadcast_object(finite(summary), name="summary")
    together(job.world, lambda: job.record.summary(summary), name="summary.write")
    return summary


def export(job: Job, *, digest: str) -> None:
    """Write each trained model, as it is or was best, as a state_dict, model.pt where there is one, and its card.

    Args:
        job: a run that has settled.
        digest: summary.json's `parameter_digest`.

    Collective: every rank of the world must call this.
    """
    kept = job.best if job.config.run.keep == "best" else {}
    done = replace(job.card, epochs=job.epochs_done, steps=job.step, parameter_digest=digest)

    def write(model: WholeModel) -> None:
        if job.world.rank == 0:
            path = job.directory / f"{model.name}.pt"
            score, best = job.last_scores.get(model.name), kept.get(model.name)
            card = replace(done, accuracy=score.accuracy if score else job.last_accuracy)
            if best is not None:
                publish(path, [best_path(job, model.name).read_bytes()])
                card = replace(
                    done,
                    accuracy=best.accuracy,
                    epochs=best.epoch + 1,
                    steps=best.step,
                    parameter_digest=best.parameter_digest,
                )
            else:
                with publishing(path) as file:
                    torch.save(model.state, file)
            classes = model.classes or done.classes
            write_card(path.with_name(f"{model.name}.yaml"), replace(card, sha256=sha256_of(path), classes=classes))

    for model in job.strategy.whole_models():
        together(job.world, partial(write, model), name="export")
