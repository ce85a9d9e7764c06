"""A run's state: what a checkpoint must hold so that the run goes on bit for bit, and how it gets to the disk.

Size of a checkpoint: model and optimizer once, plus for every rank its running statistics and random state, and in the
middle of an interval of local votes also 4 bytes for each parameter that may still freeze.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.config.tree import Config, to_dict
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.identity import COMPARED_OTHERWISE, HARMLESS
from hvfreeze.training.checkpoints.best import link_best
from hvfreeze.training.checkpoints.file import Saving, packed
from hvfreeze.training.job import Job

GATHERED_AT_ONCE = 2**26
"""Larger states of all ranks together come to rank 0 one by one, so that it never holds all of them."""
MAY_CHANGE = (*HARMLESS, *COMPARED_OTHERWISE)
"""Settings in which a run may differ from its checkpoint; the run directory judges those that matter."""


def directory_of(job: Job) -> Path:
    """Return where the run keeps its checkpoints."""
    return job.directory / "checkpoints"


def save(job: Job, *, settled: bool, alone: bool = False) -> None:
    """Begin to write a checkpoint of all ranks, which goes on beside the next steps; see `finish_saving`.

    Replicas are compared first. With `settled` the state is that after the strategy has settled. Without it, as when a
    run is asked to leave between two such points, it is every rank's own from before, so that the resumed run settles
    exactly when the uninterrupted one does. With `alone` all other checkpoints are removed afterwards.

    Collective: every rank of the world must call this.

    Raises:
        DivergedError: replicas are not equal; nothing was written.
        RefusedError: the checkpoint before could not be written.
    """
    finish_saving(job)
    if settled:
        compare_settled(job)
    strategy = job.strategy.state_dict()
    # Copies: what comes next may change the tensors.
    shared = packed({**shared_state(job), **strategy.shared}) if job.world.rank == 0 else torch.empty(0)
    own = packed({**rank_state(job), **strategy.own})
    if not settled:
        compare_settled(job)
    together(job.world, lambda: link_best(job, directory_of(job)) if job.world.rank == 0 else None, name="best.link")
    lengths = job.world.allgather_object(len(own), name="checkpoint.lengths")
    saving = None
    if job.world.rank == 0:
        sections = [len(shared), *lengths]
        saving = Saving(directory_of(job), step=job.step, size=job.world.size, lengths=sections, alone=alone)
        saving.put(shared)
    for section in sections_of_ranks(own, lengths, job.world):
        if saving is not None:
            saving.put(section)
    if saving is not None:
        saving.finish()
    job.saving = saving


def compare_settled(job: Job) -> None:
    """Settle, and raise DivergedError on all ranks unless their models are equal. Collective."""
    job.strategy.settle()
    job.strategy.check(step=job.step)


def sections_of_ranks(own: Tensor, lengths: list[int], world: World) -> Iterator[Tensor]:
    """Yield on rank 0 every rank's bytes, in rank order; on the others nothing. Collective."""
    if sum(lengths) <= GATHERED_AT_ONCE:
        yield from world.gather_bytes(own, name="checkpoint.own")
        return
    for rank in range(world.size):
        given = own if rank == world.rank else own[:0]
        yield from world.gather_bytes(given, name=f"checkpoint.own.{rank}")[rank : rank + 1]


def finish_saving(job: Job) -> None:
    """Return when the checkpoint that is being written is safe on the disk.

    Collective: every rank of the world must call this.

    Raises:
        RefusedError: it could not be written, as on a full disk; older checkpoints are untouched.
    """

    def wait() -> None:
        saving, job.saving = job.saving, None
        if saving is not None:
            saving.result()

    together(job.world, wait, name="checkpoint.written")


def shared_state(job: Job) -> dict[str, Any]:
    """Return what is equal on all ranks, or known to rank 0 alone; the strategy adds its own."""
    return {
        "run": identity(job.config),
        "course": job.course.state_dict(),
        "budget": job.budget.state_dict(),
        "guard": None if job.guard is None else job.guard.state_dict(),
        "step": job.step,
        "steps_per_epoch": job.steps_per_epoch,
        "data": job.data_identities,
        "position": job.record.position(),
        "epochs_done": job.epochs_done,
        "seconds": job.clock.read(),
        "epoch_seconds": dict(job.epoch_seconds),
        "best_accuracy": job.best_accuracy,
        "last_accuracy": job.last_accuracy,
        "last_scores": {model: list(score) for model, score in job.last_scores.items()},
        "best": {name: list(best) for name, best in job.best.items()},
        "evaluations_in_vain": job.evaluations_in_vain,
    }


def rank_state(job: Job) -> dict[str, Any]:
    """Return what differs between ranks: random state and sums over samples; the strategy adds its own."""
    return {
        "random": torch.get_rng_state(),
        "totals": {name: dataclasses.asdict(sums) for name, sums in job.totals.items()},
    }


def identity(config: Config) -> dict[str, Any]:
    """Return the settings that a run shares with its checkpoint, by flag."""
    sections = to_dict(config).values()
    return {leaf: value for section in sections for leaf, value in section.items() if leaf not in MAY_CHANGE}
