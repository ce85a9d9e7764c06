"""Execute a run, from its configuration to its summary."""

from __future__ import annotations

import math
import os
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
from hvfreeze.config.data import TEXT
from hvfreeze.config.flags import data_of, settings_of_auto
from hvfreeze.config.freeze import AUTO
from hvfreeze.config.tree import Config, check_known, from_dict, to_dict
from hvfreeze.data.text import per_character
from hvfreeze.errors import HvfreezeError, Preempted, RefusedError, UsageError
from hvfreeze.heads.multilevel import MultiLevelClassifier
from hvfreeze.inference.card import sha256_of, write_card
from hvfreeze.inference.run_card import head_named
from hvfreeze.integration.script_world import report_errors, script_world
from hvfreeze.runs.checkpoint_file import newest
from hvfreeze.runs.clock import train_seconds
from hvfreeze.runs.directory import resuming
from hvfreeze.runs.files import publish, publishing
from hvfreeze.runs.progress import Progress
from hvfreeze.runs.reading import SUMMARY, read_config, read_object
from hvfreeze.runs.record import finite
from hvfreeze.runs.trackers import open_trackers
from hvfreeze.strategies.base import WholeModel
from hvfreeze.training.best_model import best_path, out_of_patience
from hvfreeze.training.build import prepare
from hvfreeze.training.checkpoint import directory_of, finish_saving
from hvfreeze.training.evaluation import by_model, mean, other_numbers
from hvfreeze.training.job import Job
from hvfreeze.training.loop import leaving_on_signal, own_numbers, tested_in_words, train_balance
from hvfreeze.training.recipes import plain, recipe_of
from hvfreeze.training.resuming import restore
from hvfreeze.training.verbs import Run
from hvfreeze.wording import did_you_mean, in_time, plural


def auto(data: str | os.PathLike[str], **settings: Any) -> dict[str, Any]:
    """Fine-tune on a dataset like `hvfreeze auto`, and return the content of summary.json. Collective.

    Args:
        data: a folder with train/CLASS/ and test/CLASS/, a built-in dataset such as "digits", or "package:function".
        settings: flags of `hvfreeze auto` by name, as in `auto("photos", weights="DEFAULT", image_size=128)`.

    Raises:
        HvfreezeError: the run fails; `exit_code` is the exit code of the command.
    """
    known = dict.fromkeys(settings_of_auto())
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise UsageError(f"auto: unknown setting {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return train(from_dict({**data_of(os.fspath(data), settings.get("data_dir")), **settings, "freeze": AUTO}))


def train(config: Config) -> dict[str, Any]:
    """Run a configuration like `hvfreeze train`, and return the content of summary.json. Collective.

    An error that is not caught ends the job with its exit code.

    Raises:
        HvfreezeError: the run fails; `exit_code` is the exit code of the command.
    """
    if not isinstance(config, Config):
        raise UsageError(f"train: config must be a hvfreeze.Config, not {type(config).__name__}")
    check_known(config, config.given)
    world = script_world(rests=False)
    report_errors(world)
    return run(config, world)


def run(
    config: Config,
    world: World,
    *,
    asked: Sequence[int] = (),
    started: float | None = None,
) -> dict[str, Any]:
    """Train a configuration and return the content of summary.json, on every rank. Collective.

    Args:
        config: the run.
        world: all ranks of the job.
        asked: signals that asked this rank to leave before the call.
        started: `time.monotonic()` at the start of --time-budget; None is now.

    Raises:
        HvfreezeError: see its subclasses; raised on all ranks.
    """
    with noticing(signal.SIGUSR1) as came:
        came.extend(asked)
        job = prepare(config, world, started=started)
        with logging_its_end(job):
            return train_and_conclude(job, came)


def train_and_conclude(job: Job, asked: Sequence[int]) -> dict[str, Any]:
    """Resume from the newest checkpoint or start, run the recipe, and return the summary. Collective.

    For `asked` see `run`.
    """
    world, resumes = job.world, job.config.run.resume
    wrote = restore(job) if resumes else None
    done = finished(job, has_state=wrote is not None) if resumes else None
    job.progress = Progress(job.logger, done=job.step)
    try:
        if done is not None:
            job.logger.info(f"{job.directory} is complete; nothing to do")
            return done
        raise_on_all_ranks(world, job.record.begin, name="record.begin")
        if world.rank == 0:
            names, settings = job.config.run.trackers(), to_dict(job.config)
            job.record.trackers = open_trackers(names, job.directory, settings, step=job.step, say=job.logger.info)
        introduce(job, resumed=wrote is not None)
        with leaving_on_signal(job):
            if asked:
                job.asked_to_leave, job.asked_by = True, signal.Signals(asked[0]).name
            job.clock.restart()
            verbs = Run(job)
            recipe_of(job.config)(verbs)
            verbs.load()
            with job.clock.within("checkpoint"):
                finish_saving(job)
    finally:
        job.progress.close()
        job.opened.model.close()
        if job.saving is not None:
            job.saving.release()
    return conclude(job)


@contextmanager
def logging_its_end(job: Job) -> Iterator[None]:
    """Log the reason of an early end and the command to resume; unlock the run directory."""
    try:
        yield
    except Preempted as error:
        message = f"{error}; {resume_advice(job)}"
        job.record.log(message)
        raise Preempted(message) from None
    except HvfreezeError as error:
        job.record.log(f"error: {error}")
        raise
    except KeyboardInterrupt:
        message = f"{job.place}; {resume_advice(job)}"
        job.record.log(f"interrupted {message}")
        raise KeyboardInterrupt(message) from None
    finally:
        job.record.close()


def resume_advice(job: Job) -> str:
    """Return the command that continues an interrupted run."""
    last = newest(directory_of(job))
    step = last and int(last.stem.removeprefix("step-"))
    way = "no checkpoint yet, start again" if last is None else f"continue from the last checkpoint (step {step})"
    return f"{way} with: {resuming(job.directory, ranks=job.world.size)}"


def introduce(job: Job, *, resumed: bool) -> None:
    """Log the model, the data and the settings of the run."""
    config, say = job.config, job.logger.info
    data, weights = config.data, "random" if config.model.weights == "none" else config.model.weights
    noun = "window" if data.data == TEXT else "image"
    say(f"model: {config.model.model} ({' | '.join(job.block_names)}); weights {weights}")
    context = job.factory.context
    trained = plural(context.feed.plan.samples, f"training {noun}")
    tested = plural(len(context.corpus.evaluated_ids), f"test {noun}")
    held = f" ({job.factory.held_out_samples} of them held out)" if config.head.solved else ""
    say(
        f"data: {data.data_dir or data.data}, {trained}{held}, "
        f"{tested}, {plural(len(job.card.classes), *job.task.nouns)}; {plural(job.world.size, 'rank')}"
    )
    if not config.freeze.auto:
        say(
            f"training: {plural(config.optimizer.epochs, 'epoch')} of {plural(job.steps_per_epoch, 'step')}, "
            f"freeze {config.freeze.freeze}, cache {config.cache.cache}"
        )
    for detail in job.details:
        job.logger.detail(f"note: {detail}")
    for note in job.notes:
        say(f"note: {note}")
    if config.run.resume and not resumed:
        say(f"note: {job.directory} holds no checkpoint; starting from scratch")
    say(f"files: {job.directory}")
    if resumed:
        say(f"resumed after step {job.step}")


def finished(job: Job, *, has_state: bool) -> dict[str, Any] | None:
    """Return the summary of a finished run, on every rank; None for an unfinished one. Collective.

    `has_state` is True if the job has loaded a checkpoint.

    Raises:
        RefusedError: the run has ended without a checkpoint, so it cannot become longer.
    """
    path = job.directory / "summary.json"

    def read() -> dict[str, Any] | None:
        if job.world.rank > 0 or not path.exists():
            return None
        before, epochs = read_config(path.with_name("config.yaml"))["optimizer"]["epochs"], job.config.optimizer.epochs
        if not has_state and before != epochs:
            raise RefusedError(
                f"the run in {job.directory} has ended and has no checkpoint to continue from to "
                f"--epochs ({epochs}); restore its checkpoints, or start from scratch in another --run-dir"
            )
        done = read_object(path, SUMMARY)
        # The last checkpoint may have been removed, and plain training may be continued.
        is_plain = recipe_of(job.config) is plain
        at_end = job.journal.has_ended("tune" if is_plain else "finish")
        longer = is_plain and job.budget.seconds is None and job.epochs_done < epochs and not out_of_patience(job)
        return done if not has_state or (at_end and not longer) else None

    return job.world.broadcast_object(raise_on_all_ranks(job.world, read, name="summary.read"), name="finished")


def conclude(job: Job) -> dict[str, Any]:
    """Check that ranks agree, save the models and write the summary. Collective."""
    job.opened.model.settle()
    # The clock counts this as other than training.
    with job.clock.within("checkpoint"):
        digest = job.opened.model.check(step=job.step)
        export(job, digest=digest)
    seconds = job.clock.read()
    spent = train_seconds(seconds)
    report = job.report()
    summary: dict[str, Any] = {
        "test_accuracy": job.last_accuracy,
        "best_test_accuracy": math.nan if math.isnan(job.last_accuracy) else job.best_accuracy,
        **other_numbers(job.last_scores),
        **train_balance(job),
        "epochs": job.epochs_done,
        "steps": job.step,
        "world_size": job.world.size,
        "train_seconds": spent,
        "set_up_seconds": job.set_up_seconds,
        "seconds": seconds,
        "cpu_seconds": job.clock.processor_seconds(),
        "images_per_second": (job.images + job.images_of(job.part_step)) / max(spent, 1e-9),
        "allreduce_bytes": report["allreduce_bytes"],
        "other_collective_bytes": report["other_collective_bytes"],
        "final_cut": job.cut,
        "cut_history": [list(move) for move in report["cut_history"]],
        "cache": report["cache"],
        "parameter_digest": digest,
        "resumed": list(job.record.resumed),
    }
    if job.overlap is not None:
        summary["evaluated_in_training"] = {"found": job.overlap.found, "compared": job.overlap.compared}
    if job.conflict is not None:
        summary["trained_in_two_classes"] = {"found": job.conflict.found, "compared": job.conflict.compared}
    if job.flip_trial is not None:
        summary["mirror"] = job.flip_trial.describe() | {"taken": job.flips != "off"}
    if job.budget.seconds is not None:
        summary["time_budget"] = {"seconds": job.budget.seconds, "spent": job.budget.elapsed()}
    if job.config.head.solved:
        summary["verbs"] = [
            {"verb": entry.verb, "value": entry.value} for entry in job.journal.ended if entry.value is not None
        ]
        summary["head"] = report.get("head") if job.opened.part.fits_head else None
    if job.config.run.keep == "best":
        summary["kept"] = {name: best._asdict() for name, best in job.best.items()}
    if job.config.data.data == TEXT and job.last_scores:
        found = per_character(mean(job.last_scores).loss)
        summary |= {f"test_{name}": value for name, value in found.items()}
    summary |= own_numbers(report, summary) | by_model(job.opened.model.models, test=job.last_scores)
    summary = job.world.broadcast_object(finite(summary), name="summary")
    raise_on_all_ranks(job.world, lambda: job.record.summary(summary), name="summary.write")
    if job.config.freeze.auto:
        log_result(job, summary)
    if job.world.rank == 0 and job.config.run.trackers():
        # It loads matplotlib.
        from hvfreeze.inference.run_figures import files_for_trackers

        job.record.trackers.finish(summary, files_for_trackers(job.directory))
    return summary


def log_result(job: Job, summary: dict[str, Any]) -> None:
    """Log the result of the run and the command that uses it."""
    shown = f"{'' if job.task.is_examined else 'accuracy '}{tested_in_words(job, summary)}"
    job.logger.info(
        f"result: test {shown}; training {in_time(summary['train_seconds'])}; model {job.directory}/model.pt"
    )
    job.logger.info(f"next: hvfreeze predict {job.directory} IMAGES...")


def export(job: Job, *, digest: str) -> None:
    """Write each model, final or best, as a state_dict with its card. Collective."""
    kept = job.best if job.config.run.keep == "best" else {}
    opened = job.opened.chain.model
    reads_mirrored = isinstance(opened, MultiLevelClassifier) and opened.reads_mirrored
    head = head_named(job.opened.part.settings.head, reads_mirrored=reads_mirrored)
    done = replace(
        job.card.of_task(job.task), head=head, epochs=job.epochs_done, steps=job.step, parameter_digest=digest
    )

    def write(model: WholeModel) -> None:
        if job.world.rank == 0:
            path = job.directory / f"{model.name}.pt"
            best = kept.get(model.name)
            scored = best or job.last_scores.get(model.name)
            card = replace(done, accuracy=scored.accuracy if scored else job.last_accuracy)
            if scored is not None:
                card = replace(
                    card,
                    balanced_accuracy=scored.balanced_accuracy,
                    majority_share=scored.majority_share,
                    thresholds=scored.thresholds,
                )
            if best is not None:
                publish(path, [best_path(job, model.name).read_bytes()])
                card = replace(card, epochs=best.epoch + 1, steps=best.step, parameter_digest=best.parameter_digest)
            else:
                with publishing(path) as file:
                    torch.save(model.state, file)
            classes = model.classes or done.classes
            card = replace(card, sha256=sha256_of(path), classes=classes, exits=model.exits)
            if math.isnan(card.accuracy or 0.0):
                card = replace(card, accuracy=None)
            write_card(path.with_name(f"{model.name}.yaml"), card)

    for model in job.opened.model.whole_models():
        raise_on_all_ranks(job.world, partial(write, model), name="export")
