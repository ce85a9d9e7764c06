"""Checkpoints of a run: their content and their schedule. `resuming.py` reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.runs.checkpoint_file import Saving, newest, packed
from hvfreeze.runs.clock import train_seconds
from hvfreeze.runs.identity import COMPARED_OTHERWISE, HARMLESS, absolute
from hvfreeze.training.best_model import link_best
from hvfreeze.training.job import Job

GATHERED_AT_ONCE = 2**26
"""Bytes of all ranks' states above which rank 0 receives them one by one, to save memory."""
MAY_CHANGE = (*HARMLESS, *COMPARED_OTHERWISE)
"""Settings that may differ from a run's checkpoint; the run directory checks the important ones."""


CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""


def directory_of(job: Job) -> Path:
    """Return the folder of the run's checkpoints."""
    return job.directory / CHECKPOINTS


def has_begun(directory: Path) -> bool:
    """Return True if a run directory has a checkpoint or a finished run."""
    return newest(directory / CHECKPOINTS) is not None or (directory / "summary.json").exists()


def save(job: Job, *, settled: bool, alone: bool = False) -> None:
    """Start writing a checkpoint of all ranks, in the background of the next steps; see `finish_saving`. Collective.

    The replicas are synchronized and compared before anything is written. With `settled`, the checkpoint has the
    synchronized state. Without it, it has each rank's own earlier state, for a run that is asked to leave between two
    synchronizations; the resumed run then synchronizes at the same steps as an uninterrupted one. With `alone`, all
    other checkpoints are removed afterwards.

    Raises:
        DivergedError: replicas are not equal; nothing was written.
        RefusedError: the previous checkpoint could not be written.
    """
    finish_saving(job)
    if settled:
        compare_settled(job)
    strategy = job.opened.model.state_dict()
    # Copies: the next steps may change the tensors.
    shared = packed({**shared_state(job), **strategy.shared}) if job.world.rank == 0 else torch.empty(0)
    own = packed({**rank_state(job), **strategy.own})
    if not settled:
        compare_settled(job)
    raise_on_all_ranks(
        job.world, lambda: link_best(job, directory_of(job)) if job.world.rank == 0 else None, name="best.link"
    )
    lengths = job.world.allgather_object(len(own), name="checkpoint.lengths")
    saving = None
    if job.world.rank == 0:
        sections = [len(shared), *lengths]
        saving = Saving(directory_of(job), step=job.step, size=job.world.size, lengths=sections, alone=alone)
        # At once, so that an interrupted job can release its thread.
        job.saving = saving
        saving.put(shared)
    for section in sections_of_ranks(own, lengths, job.world):
        if saving is not None:
            saving.put(section)
    if saving is not None:
        saving.finish()


def compare_settled(job: Job) -> None:
    """Synchronize the replicas; raise DivergedError on all ranks unless their models are equal. Collective."""
    job.opened.model.settle()
    job.opened.model.check(step=job.step)


def sections_of_ranks(own: Tensor, lengths: list[int], world: World) -> Iterator[Tensor]:
    """Yield every rank's bytes in rank order on rank 0, nothing on other ranks. Collective."""
    if sum(lengths) <= GATHERED_AT_ONCE:
        yield from world.gather_bytes(own, name="checkpoint.own")
        return
    for rank in range(world.size):
        given = own if rank == world.rank else own[:0]
        yield from world.gather_bytes(given, name=f"checkpoint.own.{rank}")[rank : rank + 1]


def finish_saving(job: Job) -> None:
    """Wait until the checkpoint is on the disk. Collective.

    Raises:
        RefusedError: it could not be written, as on a full disk; older checkpoints are untouched.
    """

    def wait() -> None:
        saving, job.saving = job.saving, None
        if saving is not None:
            saving.result()

    raise_on_all_ranks(job.world, wait, name="checkpoint.written")


SAVED = ("snapshots", "flips", "step", "epochs_done", "epoch_seconds", "best_accuracy", "last_accuracy")
"""Attributes of the job that a checkpoint has under their names."""


def shared_state(job: Job) -> dict[str, Any]:
    """Return the job's state that is equal on all ranks or known only to rank 0, without that of the strategy."""
    return {
        "run": identity(job),
        "journal": job.journal.state_dict(),
        "budget": job.budget.state_dict(),
        **{name: getattr(job, name) for name in SAVED},
        "part": [job.opened.first_step, job.opened.first_epoch, job.opened.steps, job.images],
        "earlier": {**job.earlier, "cut_history": [list(move) for move in job.earlier.get("cut_history", ())]},
        "steps_per_epoch": job.steps_per_epoch,
        "data": job.data_identities,
        "position": job.record.position(),
        "seconds": job.clock.read(),
        "last_scores": {model: list(score) for model, score in job.last_scores.items()},
        "best": {name: list(best) for name, best in job.best.items()},
        "evaluations_in_vain": job.evaluations_without_gain,
    }


def rank_state(job: Job) -> dict[str, Any]:
    """Return this rank's random state, sums over samples and processor seconds, without the state of the strategy."""
    return {
        "processor_seconds": dict(job.clock.processor),
        "random": torch.get_rng_state(),
        "totals": {name: dataclasses.asdict(sums) for name, sums in job.totals.items()},
    }


def identity(job: Job) -> dict[str, Any]:
    """Return the settings that must equal those of a checkpoint, by flag; paths are absolute."""
    requested = job.requested or job.config
    # The numbers of epochs and of ranks determine these, and may change.
    determined = {"batch_size": requested.optimizer.batch_size, "statistics": requested.freeze.statistics}
    return settings_of_run(job.config) | determined


def settings_of_run(config: Config) -> dict[str, Any]:
    """Return the settings that may not change when a run is resumed, by flag; paths are absolute."""
    sections = absolute(to_dict(config)).values()
    return {leaf: value for section in sections for leaf, value in section.items() if leaf not in MAY_CHANGE}


LARGEST_SHARE = 0.03
"""Largest share of the training time for checkpoints with --checkpoint-every auto."""


def save_if_due(job: Job, *, ends_verb: bool = False, is_last: bool = False) -> None:
    """Write a checkpoint if one is due at this step, or at the end of a verb, which may be the last. Collective.

    Records the seconds that training waited for it.
    """
    if not (is_due_at_end(job, is_last=is_last) if ends_verb else is_due(job)):
        return
    before = job.clock.read()["checkpoint"]
    with job.clock.within("checkpoint"):
        save(job, settled=True)
    job.checkpoint_seconds = job.clock.read()["checkpoint"] - before


def is_due(job: Job) -> bool:
    """Return True if a checkpoint is due at this step. Collective."""
    cadence = job.config.run.checkpoint_cadence()
    if cadence is None:
        return job.at_epoch_end and is_cheap(job)
    every, unit = cadence
    if not every:
        return False
    if unit == "epochs":
        return job.at_epoch_end and job.epochs_done % every == 0
    return job.step // every > (job.step - 1) // every


def is_due_at_end(job: Job, *, is_last: bool) -> bool:
    """Return True if a checkpoint is due at the end of a verb. Collective.

    With --checkpoint-every auto, the last verb always writes one, and other verbs do if it is cheap. With an interval,
    every verb writes one.
    """
    cadence = job.config.run.checkpoint_cadence()
    return (is_last or is_cheap(job)) if cadence is None else bool(cadence[0])


def is_cheap(job: Job) -> bool:
    """Return True if another checkpoint keeps their share of training below `LARGEST_SHARE`. Collective.

    Used only at the end of an epoch or a verb, where the strategy synchronizes anyway, so that no result depends on the
    clock.
    """
    seconds = job.clock.read()
    spent, trained = seconds["checkpoint"], train_seconds(seconds)
    cheap = spent + job.checkpoint_seconds <= LARGEST_SHARE * trained
    return job.world.broadcast_object(cheap, name="checkpoint.cheap")
