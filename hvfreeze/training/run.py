"""A run from its configuration to its summary."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.mpi_environment import noticing
from hvfreeze.comm.world import World
from hvfreeze.config.sections import TEXT
from hvfreeze.config.tree import Config
from hvfreeze.data.text import per_character
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.heads.multilevel import MultiLevelClassifier
from hvfreeze.inference.card import head_named, sha256_of, write_card
from hvfreeze.integration.script_world import report_errors, script_world
from hvfreeze.runs.clock import train_seconds
from hvfreeze.runs.directory import resuming
from hvfreeze.runs.files import publish, publishing
from hvfreeze.runs.reading import SUMMARY, read_config, read_object
from hvfreeze.runs.record import finite
from hvfreeze.strategies.base import WholeModel
from hvfreeze.training.auto import report_of_stages
from hvfreeze.training.best_model import best_path, out_of_patience
from hvfreeze.training.build import prepare
from hvfreeze.training.checkpoint import directory_of, restore, save
from hvfreeze.training.checkpoint_file import newest
from hvfreeze.training.evaluation import balance_of, by_model, mean
from hvfreeze.training.job import Job
from hvfreeze.training.loop import own_part, train_balance, train_stages
from hvfreeze.training.progress import Curves, Progress
from hvfreeze.wording import plural


def train(config: Config) -> dict[str, Any]:
    """Run a configuration in this process, or as this rank of the job, and return summary.json's object. Collective.

    As `hvfreeze train` with the same settings. An error that nobody catches ends the job with its exit code.

    Raises:
        HvfreezeError: as the program would end; `exit_code` is the one that it would end with.
    """
    if not isinstance(config, Config):
        raise UsageError(f"train: config must be a hvfreeze.Config, not {type(config).__name__}")
    world = script_world(rests=False)
    report_errors(world)
    return run(config, world)


def run(
    config: Config,
    world: World,
    *,
    asked: Sequence[int] = (),
    started: float | None = None,
    given: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Train as `config` says and return summary.json's object, on every rank. Collective.

    Args:
        config: the run.
        world: all ranks of the job.
        asked: signals that asked this rank to leave before this call.
        started: `time.monotonic()` from which --time-budget counts; None is now.
        given: settings that were asked for, by flag with underscores, beside those that are not the defaults: the user
            is told which of them have no effect.

    Raises:
        HvfreezeError: see its subclasses; raised on all ranks.
    """
    with noticing(signal.SIGUSR1) as came:
        came.extend(asked)
        job = prepare(config, world, started=started, given=given)
        with logging_its_end(job):
            return train_and_conclude(job, came)


def train_and_conclude(job: Job, asked: Sequence[int]) -> dict[str, Any]:
    """Go on from the newest checkpoint or start, train to the end, and return the summary; see `run`. Collective."""
    world, resumes = job.world, job.config.run.resume
    wrote = restore(job) if resumes else None
    done = finished(job, has_state=wrote is not None) if resumes else None
    job.progress = Progress(job.logger, job.total_steps, done=job.step)
    try:
        if done is not None:
            job.logger.info(f"{job.directory} is complete; nothing to do")
            return done
        raise_on_all_ranks(world, job.record.begin, name="record.begin")
        draws = job.config.run.tensorboard and world.rank == 0
        job.curves = raise_on_all_ranks(
            world, lambda: Curves(job.directory / "tensorboard", step=job.step) if draws else None, name="curves"
        )
        introduce(job, resumed=wrote is not None)
        if wrote not in (None, world.size):
            # At once, in place of those that count other steps: the newest is found by its number of steps.
            save(job, settled=True, alone=True)
        train_stages(job, asked=asked)
    finally:
        job.progress.close()
        if job.curves is not None:
            job.curves.close()
        job.strategy.close()
        if job.saving is not None:
            job.saving.let_go()
    return conclude(job)


@contextmanager
def logging_its_end(job: Job) -> Iterator[None]:
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
    where = "from the last checkpoint" if newest(directory_of(job)) else "anew, there is no checkpoint yet,"
    return f"go on {where} with: {resuming(job.directory, ranks=job.world.size)}"


def introduce(job: Job, *, resumed: bool) -> None:
    """Say what is about to happen."""
    config, say = job.config, job.logger.info
    say(
        f"{config.model.model} ({' | '.join(job.block_names)}) on {config.data.data}, "
        f"{plural(job.world.size, 'rank')}, {plural(job.steps_per_epoch, 'step')} an epoch, "
        f"freeze {config.freeze.freeze}, cache {config.cache.cache}; files in {job.directory}"
    )
    for note in job.notes:
        say(f"note: {note}")
    if job.budget is not None and not resumed:
        for line in job.budget.describe():
            say(line)
    if resumed:
        say(f"resumed after step {job.step} of {job.total_steps}, cut {job.stage_runner.cut}")


def finished(job: Job, *, has_state: bool) -> dict[str, Any] | None:
    """Return the summary of a run that has ended already, on every rank; None for one that has not. Collective.

    `has_state` tells whether the job has a checkpoint's. Raises RefusedError where the run has ended, leaves none to go
    on from, and is to be longer.
    """
    path = job.directory / "summary.json"

    def read() -> dict[str, Any] | None:
        if job.world.rank > 0 or not path.exists():
            return None
        before, epochs = read_config(path.with_name("config.yaml"))["optimizer"]["epochs"], job.config.optimizer.epochs
        if not has_state and before != epochs:
            raise RefusedError(
                f"the run in {job.directory} has ended, and there is no checkpoint from which it could go on to "
                f"--epochs ({epochs}); put its checkpoints back, or start anew in another --run-dir"
            )
        ended = job.ended or out_of_patience(job) or not has_state
        return read_object(path, SUMMARY) if ended else None

    return job.world.broadcast_object(raise_on_all_ranks(job.world, read, name="summary.read"), name="finished")


def conclude(job: Job) -> dict[str, Any]:
    """Check that ranks agree, keep the models and write the summary. Collective."""
    job.strategy.settle()
    # Not training, in which the clock would have it.
    with job.clock.within("checkpoint"):
        digest = job.strategy.check(step=job.step)
        export(job, digest=digest)
    seconds = job.clock.read()
    spent = train_seconds(seconds)
    report = job.stage_runner.report()
    if job.config.freeze.auto:
        report |= report_of_stages(job)
    summary: dict[str, Any] = {
        "test_accuracy": job.last_accuracy,
        "best_test_accuracy": job.best_accuracy,
        **balance_of(job.last_scores),
        **train_balance(job),
        "epochs": job.epochs_done,
        "steps": job.step,
        "world_size": job.world.size,
        "train_seconds": spent,
        "seconds": seconds,
        "cpu_seconds": job.clock.processor_seconds(),
        "images_per_second": job.images(job.step) / max(spent, 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "other_collective_bytes": report["other_collective_bytes"],
        "final_cut": job.stage_runner.cut,
        "cut_history": [list(move) for move in report["cut_history"]],
        "cache": report["cache"],
        "parameter_digest": digest,
        "resumed": list(job.record.resumed),
    }
    if job.overlap is not None:
        summary["evaluated_in_training"] = {"found": job.overlap.found, "looked_at": job.overlap.looked_at}
    if job.conflict is not None:
        summary["trained_in_two_classes"] = {"found": job.conflict.found, "looked_at": job.conflict.looked_at}
    if job.mirror is not None:
        summary["mirror"] = job.mirror.describe() | {"taken": job.stage_runner.mirror != "off"}
    if job.budget is not None:
        summary |= job.budget.report()
    if job.config.run.keep == "best":
        summary["kept"] = {name: best._asdict() for name, best in job.best.items()}
    if job.config.data.data == TEXT and job.last_scores:
        found = per_character(mean(job.last_scores).loss)
        summary |= {f"test_{name}": value for name, value in found.items()}
    summary |= own_part(report, summary) | by_model(job.strategy.models, test=job.last_scores)
    summary = job.world.broadcast_object(finite(summary), name="summary")
    raise_on_all_ranks(job.world, lambda: job.record.summary(summary), name="summary.write")
    return summary


def export(job: Job, *, digest: str) -> None:
    """Write each trained model, as it is or was best, as a state_dict, with its card. Collective."""
    kept = job.best if job.config.run.keep == "best" else {}
    # The head of the stage that is open, whose model this is: stages behind it may have been planned and not made.
    opened = job.stage_runner.opened.chain.model
    reads_mirrored = isinstance(opened, MultiLevelClassifier) and opened.reads_mirrored
    head = head_named(job.stage.config.head, reads_mirrored=reads_mirrored)
    done = replace(job.card, head=head, epochs=job.epochs_done, steps=job.step, parameter_digest=digest)

    def write(model: WholeModel) -> None:
        if job.world.rank == 0:
            path = job.directory / f"{model.name}.pt"
            score, best = job.last_scores.get(model.name), kept.get(model.name)
            card = replace(done, accuracy=score.accuracy if score else job.last_accuracy)
            if score is not None:
                majority = score.majority_share
                card = replace(card, balanced_accuracy=score.balanced_accuracy, majority_share=majority)
            if best is not None:
                publish(path, [best_path(job, model.name).read_bytes()])
                card = replace(
                    done,
                    accuracy=best.accuracy,
                    balanced_accuracy=best.balanced_accuracy,
                    majority_share=best.majority_share,
                    epochs=best.epoch + 1,
                    steps=best.step,
                    parameter_digest=best.parameter_digest,
                )
            else:
                with publishing(path) as file:
                    torch.save(model.state, file)
            classes = model.classes or done.classes
            card = replace(card, sha256=sha256_of(path), classes=classes, exits=model.exits)
            write_card(path.with_name(f"{model.name}.yaml"), card)

    for model in job.strategy.whole_models():
        raise_on_all_ranks(job.world, partial(write, model), name="export")
