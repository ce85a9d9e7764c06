"""The training loop. One page: what every rank does in an epoch, and which of it is a collective.

What a step is, the strategy knows: which blocks run on which rank, and what crosses between ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from hvfreeze.data.batches import Batch
from hvfreeze.errors import Preempted
from hvfreeze.runs.clock import train_seconds
from hvfreeze.strategies.strategy import MODEL, Answers, SolvesHeads
from hvfreeze.training.checkpoints.best import follow_best, out_of_patience
from hvfreeze.training.checkpoints.saving import finish_saving, save
from hvfreeze.training.evaluation import Scores, by_model, count, evaluate, mean, reduce
from hvfreeze.training.job import Job
from hvfreeze.training.learning_rate import learning_rate
from hvfreeze.training.progress import Progress

HELD_OUT = 0.1
"""Part of the training samples that choose the penalty of a solved head, before they are fitted too."""
CHECKPOINT_SHARE = 0.03
"""The part of the training time that checkpoints may take with --checkpoint-every auto."""


MakeEpoch = Callable[[Job, int, Progress], None]


def train(job: Job, progress: Progress, *, make_epoch: MakeEpoch, asked: Sequence[int] = ()) -> None:
    """Train from the job's step to the end, evaluating after the epochs that --evaluate-every names.

    Collective: every rank of the job's world must call this.

    Args:
        job: the run.
        progress: where it is shown.
        make_epoch: what an epoch is, for all ranks together; `train_epoch`, or a solution of the head.
        asked: signals to leave that came before this, and may come until this takes over.

    Raises:
        NumericsError: a loss or gradient is not finite on some rank; raised on all ranks in the same step.
        DivergedError: replicas are not equal.
        Preempted: the job was asked to leave and has written a checkpoint.
    """
    with leaving_on_signal(job):
        job.asked_to_leave = job.asked_to_leave or bool(asked)
        job.clock.restart()
        for epoch in range(job.epochs_done, 0 if out_of_patience(job) else job.config.optimizer.epochs):
            make_epoch(job, epoch, progress)
            end_epoch(job, epoch, progress)
            checkpoint_when_due(job)
            if out_of_patience(job):
                progress.line(f"stopped early: {job.evaluations_in_vain} evaluations in a row found nothing better")
                break
        with job.clock.within("checkpoint"):
            finish_saving(job)


def train_epoch(job: Job, epoch: int, progress: Progress) -> None:
    """Make the epoch's steps that are not made yet. Collective."""
    steps = job.steps_of(epoch)[job.step - epoch * job.steps_per_epoch :]
    if steps:
        job.strategy.begin_epoch([batch for batches in steps for batch in batches])
    for batches in steps:
        loss = train_step(job, batches)
        progress.step(job.step, f"epoch {epoch} loss {loss:.3f} cut {job.strategy.cut}")
        if job.step % job.steps_per_epoch != 0:
            checkpoint_when_due(job)


def train_step(job: Job, batches: Sequence[Batch]) -> float:
    """Make one optimizer step, count it, and leave after it if that was asked; return this rank's loss. Collective."""
    result = job.strategy.step(batches, rate=rate(job), leave=job.asked_to_leave)
    job.step += 1
    count(job.totals, result.answers, result.losses)
    if result.decision is not None:
        job.record.decision(result.decision)
    if result.leave:
        leave(job)
    return result.loss


def solve_epoch(job: Job, epoch: int, progress: Progress) -> None:
    """Solve the head on all of the training samples; it stands for all steps of the epoch. Collective.

    Raises:
        Preempted: the job was asked to leave before the features were complete; what is cached of them stays.
    """
    batches = job.feed.every_view()
    total = sum(batch.counted for batch in batches)

    def stop(rows: int) -> bool:
        progress.step(job.step + rows * job.steps_per_epoch // total, f"features of {rows} of {total} views")
        return job.asked_to_leave

    def add(answers: Answers, loss: float) -> None:
        count(job.totals, {MODEL: answers}, {MODEL: loss})

    solver = cast(SolvesHeads, job.strategy)
    fit = solver.solve_head(batches, held_out=job.feed.held_out(HELD_OUT), stop=stop, add=add)
    if fit is None:
        leave(job)
        return
    job.step = (epoch + 1) * job.steps_per_epoch
    reached = "" if fit.converged else f", which is not converged: off by {100 * fit.error:.0f} % at most"
    progress.line(
        f"head solved: penalty {fit.penalty:.2g} of {len(fit.trials)} tried, {fit.passes} passes over {fit.rows} rows, "
        f"{fit.steps} steps{reached}"
    )


def rate(job: Job) -> float:
    """Return the learning rate of the step to come."""
    settings = job.config.optimizer
    return learning_rate(
        job.step, base=settings.lr, schedule=settings.schedule, warmup=settings.lr_warmup, total=job.total_steps
    )


def end_epoch(job: Job, epoch: int, progress: Progress) -> None:
    """Evaluate on all ranks when that is due and write the epoch's line. Collective."""
    run, epochs = job.config.run, job.config.optimizer.epochs
    tested: Scores = {}
    with job.clock.within("evaluate"):
        # Also where nothing is evaluated: how often that is done must not change one bit of the training.
        job.strategy.settle()
        if run.evaluates(epoch, epochs=epochs):
            tested = evaluate(job.strategy, job.evaluation_batches, job.world)
            job.last_scores, job.last_accuracy = tested, mean(tested).accuracy
            job.best_accuracy = max(job.best_accuracy, job.last_accuracy)
            follow_best(job, epoch)
        trained = reduce(job.totals, job.strategy.models, job.world, name="train")
        report = job.strategy.report()
    seconds = job.clock.read()
    spent = {phase: round(value - job.epoch_seconds.get(phase, 0.0), 6) for phase, value in seconds.items()}
    job.epoch_seconds = seconds
    train_loss, train_accuracy = mean(trained)
    loss, accuracy = mean(tested) if tested else (None, None)
    line = {
        "epoch": epoch,
        "step": job.step,
        "cut": job.strategy.cut,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "train_seconds": train_seconds(spent),
        "seconds": spent,
        "images_per_second": job.images_per_epoch / max(train_seconds(spent), 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "cache": report["cache"],
    }
    job.record.metrics(line | own_part(report, line) | by_model(job.strategy.models, train=trained, test=tested))
    job.totals = {}
    job.epochs_done = epoch + 1
    shown = "not evaluated" if accuracy is None else f"test {100 * accuracy:.2f} %"
    progress.line(
        f"epoch {epoch:3d} | cut {job.strategy.cut} | loss {train_loss:.4f} | train {100 * train_accuracy:.2f} % | "
        f"{shown} | {train_seconds(spent):.1f} s | {line['images_per_second']:.0f} images/s"
    )


def own_part(report: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return what is in a strategy's report, and neither in a line of the record nor a part of every report."""
    common = {*line, "cut_history", "allreduce_bytes", "other_collective_bytes", "cache"}
    return {key: value for key, value in report.items() if key not in common}


def checkpoint_when_due(job: Job) -> None:
    """Write a checkpoint when the step calls for one. Collective."""
    if checkpoint_is_due(job):
        before = job.clock.read()["checkpoint"]
        with job.clock.within("checkpoint"):
            save(job, settled=True)
        job.checkpoint_seconds = job.clock.read()["checkpoint"] - before


def checkpoint_is_due(job: Job) -> bool:
    """Tell whether the step calls for a checkpoint; the last one does unless there are none at all. Collective."""
    every = job.config.run.checkpoint_steps(job.steps_per_epoch)
    last = job.step == job.total_steps or out_of_patience(job)
    if every is None:
        return last or (job.step % job.steps_per_epoch == 0 and checkpoint_is_cheap(job))
    return bool(every) and (job.step % every == 0 or last)


def checkpoint_is_cheap(job: Job) -> bool:
    """Tell whether checkpoints, one more with them, take at most `CHECKPOINT_SHARE` of training. Collective.

    Only at the end of an epoch, where the strategy settles anyhow: a clock must not change one bit of the training.
    """
    seconds = job.clock.read()
    spent, trained = seconds["checkpoint"], train_seconds(seconds)
    cheap = spent + job.checkpoint_seconds <= CHECKPOINT_SHARE * trained
    return job.world.broadcast_object(cheap, name="checkpoint.cheap")


def leave(job: Job) -> None:
    """Write a checkpoint and leave with the code that says so. Collective."""
    # The uninterrupted run settles here only for a checkpoint that is due; at an epoch's end, evaluation comes first.
    settled = job.step % job.steps_per_epoch != 0 and checkpoint_is_due(job)
    with job.clock.within("checkpoint"):
        save(job, settled=settled)
        finish_saving(job)
    raise Preempted(f"asked to leave: stopped after step {job.step} of {job.total_steps}; go on with --resume")


@contextmanager
def leaving_on_signal(job: Job) -> Iterator[None]:
    """Ask all ranks to leave after the step in which SIGUSR1, or for a lone process SIGTERM, arrives on one of them."""

    def ask(number: int, frame: FrameType | None) -> None:
        job.asked_to_leave = True

    numbers = [signal.SIGUSR1] + ([signal.SIGTERM] if job.world.size == 1 else [])
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
