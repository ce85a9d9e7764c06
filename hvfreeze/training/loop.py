"""The training loop. One page: what every rank does in an epoch, and which of it is a collective.

What a step is, the strategy knows: which blocks run on which rank, and what crosses between ranks.
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, cast

from hvfreeze.comm.mpi_environment import handling
from hvfreeze.config.sections import TEXT
from hvfreeze.data.batches import Batch
from hvfreeze.data.class_shares import accuracy_in_words
from hvfreeze.data.text import per_character
from hvfreeze.errors import NumericsError, Preempted
from hvfreeze.heads.moments import FeaturesError
from hvfreeze.heads.solution import Solution
from hvfreeze.heads.solve import FitTerms
from hvfreeze.runs.clock import train_seconds
from hvfreeze.strategies.base import MODEL, SolvesHeads
from hvfreeze.training.auto import begin_stage, beside_majority, end_trial, give_up_tuning, is_tuned, judge, judge_tuned
from hvfreeze.training.best_model import follow_best, out_of_patience
from hvfreeze.training.checkpoint import finish_saving, is_due, save, save_when_due
from hvfreeze.training.evaluation import Scores, Totals, balance_of, by_model, count, evaluate, mean, reduce
from hvfreeze.training.job import Job
from hvfreeze.training.stage_build import HELD_OUT
from hvfreeze.training.stages import learning_rate
from hvfreeze.wording import plural


def train_stages(job: Job, *, asked: Sequence[int] = ()) -> None:
    """Train from the job's step to the end, stage by stage, and evaluate as --evaluate-every says. Collective.

    Args:
        job: the run.
        asked: signals to leave that came before this, and may come until this takes over.

    Raises:
        NumericsError: a loss or gradient is not finite on some rank; raised on all ranks in the same step.
        DivergedError: replicas are not equal.
        Preempted: the job was asked to leave and has written a checkpoint.
    """
    with leaving_on_signal(job):
        job.asked_to_leave = job.asked_to_leave or bool(asked)
        job.clock.restart()
        if job.step == 0:
            begin_stage(job)
        while not (job.ended or out_of_patience(job)):
            if job.stage_epoch == job.stage.epochs:
                job.stage_runner.turn()
                job.logger.info(job.stage.title)
                begin_stage(job)
            make_epoch, failed = EPOCHS[job.stage.config.head.head_fit], False
            try:
                make_epoch(job, job.stage_epoch)
            except NumericsError:
                failed = give_up_tuning(job)
                if not failed:
                    raise
            end_epoch(job, job.epochs_done)
            if job.stage_epoch == job.stage.epochs:
                end_stage(job, failed=failed)
            save_when_due(job)
            if out_of_patience(job):
                in_vain = plural(job.evaluations_in_vain, "evaluation")
                job.logger.info(f"stopped early: {in_vain} in a row found nothing better")
        with job.clock.within("checkpoint"):
            finish_saving(job)


def train_epoch(job: Job, epoch: int) -> None:
    """Make the steps of the stage's epoch `epoch` that are not made yet. Collective."""
    steps = job.steps_of(epoch)[job.stage_step - epoch * job.steps_per_epoch :]
    if steps:
        job.strategy.begin_epoch([batch for batches in steps for batch in batches])
    for batches in steps:
        if job.stage_step >= job.stage.steps:
            break
        loss = train_step(job, batches)
        note = f"epoch {job.epochs_done} loss {loss:.3f} cut {job.stage_runner.cut}"
        if job.budget is not None:
            job.budget.after_step(job.stage_runner, job.stage_step)
            note += job.budget.note()
        job.progress.step(job.step, job.total_steps, note)
        if not job.at_epoch_end:
            save_when_due(job)


def train_step(job: Job, batches: Sequence[Batch]) -> float:
    """Make one optimizer step, count it, and leave after it if that was asked; return this rank's loss. Collective."""
    result = job.strategy.step(batches, rate=rate(job), leave=job.asked_to_leave)
    job.step += 1
    count(job.totals, result.answers, result.losses)
    if result.decision is not None:
        job.record.decision(job.stage_runner.placed(result.decision))
    if result.leave:
        leave(job)
    return result.loss


def solve_epoch(job: Job, epoch: int) -> None:
    """Solve the head on all of the training samples; it stands for all steps of the epoch. Collective."""
    sampled, others = job.feed.sampled_views()
    batches, passes = [*(sampled or ()), *others], itertools.count(1)
    total = sum(batch.counted for batch in batches)

    def stop(rows: int, reached: str = "") -> bool:
        if rows > 0:
            done, note = rows * job.steps_per_epoch // total, f"features of {rows} of {total} views, then a solution"
        else:
            done, note = job.steps_per_epoch, f"the head is being solved: {reached or f'pass {next(passes)}'}"
        job.progress.step(job.step + done, job.total_steps, note, even=False)
        return job.asked_to_leave

    terms = FitTerms(
        held_out=job.feed.held_out(HELD_OUT),
        trained=is_tuned(job),
        compare_mirrored=job.stage_runner.mirror is None and job.stage.config.data.mirror == "auto",
        sampled=None if sampled is None else len(sampled),
    )
    solver, totals = cast(SolvesHeads, job.strategy), Totals()
    try:
        fit = solver.solve_head(batches, terms, stop=stop, count=totals.add)
    except FeaturesError as error:
        raise NumericsError(f"{error}; these are {job.names(error.samples)}") from error
    if fit is None:
        leave(job)
        return
    job.totals[MODEL] = totals
    job.step, job.solved = job.stage_runner.first_step + job.stage.steps, fit
    tell_solution(job, fit)
    if fit.mirror is not None:
        job.stage_runner.mirror = "on" if fit.mirror.taken else "off"


def tell_solution(job: Job, fit: Solution) -> None:
    """Tell the user how a head was solved. Not a collective."""
    reached = "" if fit.converged else f", which is not converged: off by {100 * fit.error:.0f} % at most"
    compared = "" if fit.compared_with in (None, fit.rows) else f", each compared with {fit.compared_with} of them"
    job.logger.info(
        f"head solved: penalty {fit.penalty:.2g} of {len(fit.trials)} tried, {plural(fit.passes, 'pass', 'passes')} "
        f"over {plural(fit.rows, 'row')}{compared}, {plural(fit.steps, 'step')}{reached}"
    )
    if fit.left_out:
        job.logger.info(
            f"note: nothing was fitted to {len(fit.left_out)} of the samples, whose features lie far from all others': "
            f"{job.names(fit.left_out)}"
        )
    if fit.mirror is not None:
        job.logger.info(fit.mirror.line() + beside_majority(job))


EPOCHS = {"sgd": train_epoch, "exact": solve_epoch, "kernel": solve_epoch}
"""--head-fit of a stage -> what an epoch is, for all ranks together."""


def rate(job: Job) -> float:
    """Return the learning rate of the step to come."""
    settings = job.stage.config.optimizer
    return learning_rate(
        job.stage_step, base=settings.lr, schedule=settings.schedule, warmup=settings.lr_warmup, total=job.stage.steps
    )


def end_epoch(job: Job, epoch: int) -> None:
    """Evaluate on all ranks when that is due and write the epoch's line. Collective."""
    with job.clock.within("evaluate"):
        # Also where nothing is evaluated: how often that is done must not change one bit of the training.
        job.strategy.settle()
        tested = evaluate_if_due(job, epoch)
        trained = reduce(job.totals, job.strategy.models, job.world, name="train")
        report = job.stage_runner.report()
    line = epoch_line(job, epoch, trained=trained, tested=tested, report=report)
    job.record.metrics(line)
    if job.curves is not None:
        job.curves.epoch(line, rate=rate(job))
    job.totals = {}
    job.epochs_done = epoch + 1
    tell_epoch(job, line)


def evaluate_if_due(job: Job, epoch: int) -> Scores:
    """Return the scores of each model on what is evaluated; none where that is not due. Collective."""
    last_of_stage = job.stage_epoch + 1 == job.stage.epochs
    is_last = last_of_stage and (job.solved is not None or job.stage_runner.is_last)
    if not is_last and not job.config.run.evaluates(epoch):
        return {}
    began = time.monotonic()
    tested = evaluate(job.strategy, job.evaluation_batches, job.world)
    if job.budget is not None:
        job.budget.after_evaluation(time.monotonic() - began)
    job.last_scores, job.last_accuracy = tested, mean(tested).accuracy
    job.best_accuracy = max(job.best_accuracy, job.last_accuracy)
    follow_best(job, epoch)
    return tested


def epoch_line(job: Job, epoch: int, *, trained: Scores, tested: Scores, report: dict[str, Any]) -> dict[str, Any]:
    """Return the epoch's line of metrics.jsonl; its seconds are those since the line before."""
    seconds = job.clock.read()
    spent = {phase: round(value - job.epoch_seconds.get(phase, 0.0), 6) for phase, value in seconds.items()}
    job.epoch_seconds = seconds
    images = job.images(job.step) - job.images(job.stage_runner.first_step + job.stage_epoch * job.steps_per_epoch)
    train_loss, train_accuracy = mean(trained)
    loss, accuracy = mean(tested) if tested else (None, None)
    line = {
        "epoch": epoch,
        "step": job.step,
        "cut": job.stage_runner.cut,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        **train_balance(job),
        "test_loss": loss,
        "test_accuracy": accuracy,
        **balance_of(tested),
        "train_seconds": train_seconds(spent),
        "seconds": spent,
        "images_per_second": images / max(train_seconds(spent), 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "cache": report["cache"],
    }
    held_out = job.solved.chosen if job.solved is not None else None
    if held_out is not None:
        line |= {"held_out_loss": held_out.held_out_loss, "held_out_accuracy": held_out.held_out_accuracy}
    if job.config.data.data == TEXT:
        line |= {f"train_{name}": value for name, value in per_character(train_loss).items()}
        line |= {f"test_{name}": value for name, value in ({} if loss is None else per_character(loss)).items()}
    return line | own_part(report, line) | by_model(job.strategy.models, train=trained, test=tested)


def train_balance(job: Job) -> dict[str, float]:
    """Return what the record says beside an accuracy on training samples; nothing where their classes are equal."""
    return {} if job.majority_share is None else {"train_majority_share": job.majority_share}


def tell_epoch(job: Job, line: dict[str, Any]) -> None:
    """Tell the user of an epoch, given its line of metrics.jsonl. Not a collective."""
    majority = job.majority_share
    fitted = f"loss {line['train_loss']:.4f} | train {accuracy_in_words(line['train_accuracy'], majority=majority)}"
    if "held_out_loss" in line:
        # A head that is solved is right on what it was fitted to, whatever it has learnt.
        right = accuracy_in_words(line["held_out_accuracy"], majority=majority)
        fitted = f"held-out loss {line['held_out_loss']:.4f} | held-out {right}"
    loss, accuracy = line["test_loss"], line["test_accuracy"]
    balanced, largest = (line.get(f"test_{key}") for key in ("balanced_accuracy", "majority_share"))
    tested = "" if accuracy is None else accuracy_in_words(accuracy, majority=largest, balanced=balanced)
    shown = f"test {tested}" if tested else "not evaluated"
    if "test_bits_per_character" in line:
        shown += f", {line['test_bits_per_character']:.3f} bits per character"
    samples = "windows" if job.config.data.data == TEXT else "images"
    job.logger.info(
        f"epoch {line['epoch']:3d} | cut {line['cut']} | {fitted} | {shown} | "
        f"{line['train_seconds']:.1f} s | {line['images_per_second']:.0f} {samples}/s"
    )
    if loss is not None and not math.isfinite(loss):
        job.logger.info("note: the loss on what was evaluated is not finite: its answers overflow; lower --lr")


def end_stage(job: Job, *, failed: bool = False) -> None:
    """Let the guard judge what the stage has made, and the budget plan what comes. Collective.

    `failed`: numbers that are not finite ended it early.
    """
    judge(job)
    taken_back = end_trial(job, failed=failed)
    if job.budget is not None:
        for line in job.budget.after_stage(job.stage_runner):
            job.logger.info(line)
    if not taken_back:
        judge_tuned(job)


def own_part(report: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return what is in a strategy's report, and neither in a line of the record nor a part of every report."""
    common = {*line, "cut_history", "allreduce_bytes", "other_collective_bytes", "cache"}
    return {key: value for key, value in report.items() if key not in common}


def leave(job: Job) -> None:
    """Write a checkpoint and leave with the code that says so. Collective."""
    # The uninterrupted run settles here only for a checkpoint that is due; at an epoch's end, evaluation comes first.
    settled = not job.at_epoch_end and is_due(job)
    with job.clock.within("checkpoint"):
        save(job, settled=settled)
        finish_saving(job)
    raise Preempted(f"asked to leave: stopped after step {job.step} of {job.total_steps}; go on with --resume")


@contextmanager
def leaving_on_signal(job: Job) -> Iterator[None]:
    """Ask all ranks to leave after the step in which SIGUSR1, or for a lone process SIGTERM, arrives on one of them."""

    def ask(number: int, frame: FrameType | None) -> None:
        job.asked_to_leave = True

    with ExitStack() as handled:
        for number in [signal.SIGUSR1] + ([signal.SIGTERM] if job.world.size == 1 else []):
            handled.enter_context(handling(number, ask))
        yield
