"""The training loop: the steps and evaluations of an epoch, with its collectives marked.

The strategy defines a step: the blocks that run on each rank, and the messages between ranks.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from hvfreeze.comm.mpi_environment import handling
from hvfreeze.config.data import TEXT
from hvfreeze.config.optimizer import UNWEIGHTED
from hvfreeze.data.batches import Batch
from hvfreeze.data.class_shares import accuracy_in_words
from hvfreeze.data.text import per_character
from hvfreeze.errors import Preempted
from hvfreeze.metrics import in_words, named_in
from hvfreeze.runs.clock import train_seconds
from hvfreeze.training.best_model import follow_best, out_of_patience
from hvfreeze.training.budget import Pace
from hvfreeze.training.checkpoint import finish_saving, is_due, save, save_if_due
from hvfreeze.training.evaluation import Scores, by_model, count, evaluate, mean, other_numbers, reduce
from hvfreeze.training.job import Job
from hvfreeze.wording import plural


def learning_rate(step: int, *, base: float, schedule: str, warmup: int, total: int) -> float:
    """Return the learning rate of the update that follows `step` updates.

    Args:
        step: updates made so far.
        base: the rate of `constant`.
        schedule: `constant`; `step`, a tenth after 50 % and a hundredth after 75 % of training; or `cosine`, to 0.
        warmup: updates over which the rate rises linearly.
        total: updates in all.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    if schedule == "step":
        return base * (0.01 if step >= 0.75 * total else 0.1 if step >= 0.5 * total else 1.0)
    return base


def train_part(job: Job, *, pace: Pace | None = None, is_last: bool) -> None:
    """Make the remaining steps of the open part, with evaluations by --evaluate-every. Collective.

    Args:
        job: the run.
        pace: chooses the number of steps, with a time budget.
        is_last: whether the run ends afterwards; then the last epoch is evaluated.

    Raises:
        NumericsError: a loss or gradient is NaN or Inf on some rank; see `Strategy.step`.
        DivergedError: replicas are not equal.
        Preempted: the job was asked to leave and has written a checkpoint.
    """
    while job.part_epoch < job.opened.epochs and not out_of_patience(job):
        train_epoch(job, job.part_epoch, pace)
        end_epoch(job, job.epochs_done, pace, is_last=is_last)
        if job.part_epoch < job.opened.epochs and not out_of_patience(job):
            save_if_due(job)
    if out_of_patience(job):
        failed = plural(job.evaluations_without_gain, "evaluation")
        job.logger.info(f"stopped early: no improvement in {failed}")


def train_epoch(job: Job, epoch: int, pace: Pace | None = None) -> None:
    """Make the remaining steps of the open part's epoch `epoch`. Collective."""
    steps = job.steps_of(epoch)[job.part_step - epoch * job.steps_per_epoch :]
    if steps:
        job.strategy.begin_epoch([batch for batches in steps for batch in batches])
    for batches in steps:
        if job.part_step >= job.opened.steps:
            break
        loss = train_step(job, batches)
        note = f"{job.epoch_in_words(epoch)}: loss {loss:.3f}, {job.frozen_in_words}"
        if pace is not None:
            job.opened.plan(pace.after_step(job.part_step, job.opened.steps))
        job.progress.step(job.step, job.total_steps, note, estimated=pace is not None)
        if not job.at_epoch_end:
            save_if_due(job)


def train_step(job: Job, batches: Sequence[Batch]) -> float:
    """Make one optimizer step and return this rank's loss; leave the run if a signal asked for it. Collective."""
    defer_class_weights(job, step=job.part_step + 1)
    result = job.strategy.step(batches, rate=rate(job), leave=job.asked_to_leave)
    job.step += 1
    count(job.totals, result.answers, result.losses, job.task)
    if result.decision is not None:
        job.record.decision(job.placed(result.decision))
    if result.leave:
        leave(job)
    return result.loss


def defer_class_weights(job: Job, *, step: int) -> None:
    """Give all classes the weight 1 in the training loss at this step of the part, if it is an early one."""
    job.task.defer_weights(step <= UNWEIGHTED * job.opened.steps)


def rate(job: Job) -> float:
    """Return the learning rate of the next step."""
    settings = job.opened.part.settings.optimizer
    return learning_rate(
        job.part_step, base=settings.lr, schedule=settings.schedule, warmup=settings.lr_warmup, total=job.opened.steps
    )


def end_epoch(job: Job, epoch: int, pace: Pace | None, *, is_last: bool) -> None:
    """Evaluate on all ranks if that is due, and write the epoch's line. Collective."""
    with job.clock.within("evaluate"):
        # Also without an evaluation: the evaluation schedule must not change any bit of the training.
        job.strategy.settle()
        ends = is_last and job.part_epoch + 1 == job.opened.epochs
        tested: Scores = {}
        # A resumed job may evaluate before its first step.
        defer_class_weights(job, step=job.part_step)
        if ends or (job.config.run.evaluates(epoch) and (pace is None or pace.allows_evaluation())):
            began = time.monotonic()
            tested = evaluate_now(job)
            follow_best(job, epoch)
            if pace is not None:
                pace.after_evaluation(time.monotonic() - began)
        trained = reduce(job.totals, job.strategy.models, job.world, name="train")
        report = job.report()
    shown = job.epoch_in_words(job.part_epoch).ljust(len(job.epoch_in_words(job.opened.epochs - 1)))
    images = job.images_of(job.part_step) - job.images_of(job.part_epoch * job.steps_per_epoch)
    loss, accuracy = mean(trained)
    line = {"epoch": epoch, **numbers(job, {"train_loss": loss, "train_accuracy": accuracy}, tested, report, images)}
    line |= own_numbers(report, line) | by_model(job.strategy.models, train=trained, test=tested)
    job.record.metrics(line)
    job.record.trackers.rate(rate(job), step=line["step"])
    job.totals, job.epochs_done = {}, epoch + 1
    log_epoch(job, line, epoch=shown)


def evaluate_now(job: Job) -> Scores:
    """Evaluate each model, and record and return the scores. Collective."""
    tested = evaluate(job.opened.model, job.evaluation_batches, job.world, job.task, chooses=job.chooses)
    job.last_scores, job.last_accuracy = tested, mean(tested).accuracy
    job.best_accuracy = max(job.best_accuracy, job.last_accuracy)
    return tested


def numbers(job: Job, found: dict[str, Any], tested: Scores, report: dict[str, Any], images: int) -> dict[str, Any]:
    """Return the numbers of a line of metrics.jsonl, with the seconds since the previous line."""
    seconds = job.clock.read()
    spent = {phase: round(value - job.epoch_seconds.get(phase, 0.0), 6) for phase, value in seconds.items()}
    job.epoch_seconds = seconds
    loss, accuracy = mean(tested) if tested else (None, None)
    line = {
        "step": job.step,
        "cut": job.cut,
        **found,
        **train_balance(job),
        "test_loss": loss,
        "test_accuracy": accuracy,
        **other_numbers(tested),
        "train_seconds": train_seconds(spent),
        "seconds": spent,
        "images_per_second": images / max(train_seconds(spent), 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "cache": report["cache"],
    }
    if job.config.data.data == TEXT and "train_loss" in found:
        line |= {f"train_{name}": value for name, value in per_character(found["train_loss"]).items()}
        line |= {f"test_{name}": value for name, value in ({} if loss is None else per_character(loss)).items()}
    return line


def train_balance(job: Job) -> dict[str, float]:
    """Return the record's majority share of the training samples; empty if classes are balanced."""
    return {} if job.majority_share is None else {"train_majority_share": job.majority_share}


def log_epoch(job: Job, line: dict[str, Any], *, epoch: str) -> None:
    """Log an epoch, `epoch` in words, from its line of metrics.jsonl; hvfreeze auto logs whole verbs instead.

    Not a collective.
    """
    if job.config.freeze.auto:
        return
    has_classes = job.task.kind == "classes"
    fitted = f" | train {accuracy_in_words(line['train_accuracy'], majority=job.majority_share)}" if has_classes else ""
    loss = line["test_loss"]
    shown = "not evaluated" if loss is None else f"test {tested_in_words(job, line)}"
    if "test_bits_per_character" in line:
        shown += f", {line['test_bits_per_character']:.3f} bits per character"
    samples = "windows" if job.config.data.data == TEXT else "images"
    job.logger.info(
        f"{epoch} | {job.frozen_in_words} | loss {line['train_loss']:.4f}{fitted} | {shown} | "
        f"{line['train_seconds']:.1f} s | {line['images_per_second']:.0f} {samples}/s"
    )
    log_overflow(job, loss)


def tested_in_words(job: Job, found: dict[str, Any]) -> str:
    """Return the test accuracy, or the test metrics of the task, in a line of metrics.jsonl or a summary as text."""
    if job.task.is_examined:
        return in_words(named_in(found, part="test"))
    balanced, majority = (found.get(f"test_{key}") for key in ("balanced_accuracy", "majority_share"))
    return accuracy_in_words(found["test_accuracy"] or 0.0, majority=majority, balanced=balanced)


def log_overflow(job: Job, loss: float | None) -> None:
    """Log an evaluation loss of NaN or Inf."""
    if loss is not None and not math.isfinite(loss):
        is_fitted = job.opened.part.settings.head.solved
        way_out = "use --precision float32, or check the weights" if is_fitted else "use a lower --lr"
        job.logger.info(f"warning: the evaluation loss is NaN or Inf: the model's outputs overflow; {way_out}")


def own_numbers(report: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that only this strategy reports."""
    common = {*line, "cut_history", "allreduce_bytes", "other_collective_bytes", "cache", "head"}
    return {key: value for key, value in report.items() if key not in common}


def leave(job: Job) -> None:
    """Write a checkpoint, then raise Preempted, which ends the job with the exit code for preemption. Collective."""
    # An uninterrupted run synchronizes here only for a due checkpoint; at an epoch's end, evaluation comes first.
    settled = not job.at_epoch_end and is_due(job)
    with job.clock.within("checkpoint"):
        save(job, settled=settled)
        finish_saving(job)
    raise Preempted(f"stopped {job.place}{job.asked_by and f' by {job.asked_by}'}")


@contextmanager
def leaving_on_signal(job: Job) -> Iterator[None]:
    """Leave on all ranks after the step in which one of them receives SIGUSR1, or a single process SIGTERM."""

    def ask(number: int, frame: FrameType | None) -> None:
        job.asked_to_leave, job.asked_by = True, signal.Signals(number).name

    with ExitStack() as handled:
        for number in [signal.SIGUSR1] + ([signal.SIGTERM] if job.world.size == 1 else []):
            handled.enter_context(handling(number, ask))
        yield
