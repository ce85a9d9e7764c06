"""A run's state: what a checkpoint must hold so that the run goes on bit for bit, and how it is put back.

Size of a checkpoint: model and optimizer once, plus for every rank its running statistics and random state, and in the
middle of an interval of local votes also 4 bytes for each parameter that may still freeze.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.applying.card import sha256_of, write_card
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.errors import RefusedError
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PHASES
from hvfreeze.runs.identity import COMPARED_OTHERWISE, HARMLESS
from hvfreeze.runs.publishing import publishing
from hvfreeze.strategies.strategy import State, WholeModel
from hvfreeze.training.checkpoint import Checkpoint, Saving, newest, open_checkpoint, packed, unpacked
from hvfreeze.training.evaluation import Totals
from hvfreeze.training.job import Job

GATHERED_AT_ONCE = 2**26
"""Larger states of all ranks together come to rank 0 one by one, so that it never holds all of them."""
MAY_CHANGE = (*HARMLESS, *COMPARED_OTHERWISE)
"""Settings in which a run may differ from its checkpoint; the run directory judges those that matter."""


def directory_of(job: Job) -> Path:
    """Return where the run keeps its checkpoints."""
    return job.directory / "checkpoints"


def save(job: Job, *, settled: bool) -> None:
    """Begin to write a checkpoint of all ranks, which goes on beside the next steps; see `finish_saving`.

    Replicas are compared first. With `settled` the state is that after the strategy has settled. Without it, as when a
    run is asked to leave between two such points, it is every rank's own from before, so that the resumed run settles
    exactly when the uninterrupted one does.

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
    lengths = job.world.allgather_object(len(own), name="checkpoint.lengths")
    saving = None
    if job.world.rank == 0:
        saving = Saving(directory_of(job), step=job.step, size=job.world.size, lengths=[len(shared), *lengths])
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
        "step": job.step,
        "data": job.data_identities,
        "position": job.record.position(),
        "epochs_done": job.epochs_done,
        "seconds": job.clock.read(),
        "epoch_seconds": dict(job.epoch_seconds),
        "best_accuracy": job.best_accuracy,
        "last_accuracy": job.last_accuracy,
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


def restore(job: Job) -> bool:
    """Put the newest checkpoint's state into the job; return False where there is none, and drop what was logged.

    Only rank 0 reads the file; every rank receives what is shared, and its own part alone.
    Collective: every rank of the world must call this.

    Raises:
        RefusedError: the checkpoint is damaged, or is another run's or model's.
    """
    world = job.world

    def find() -> Checkpoint | None:
        path = newest(directory_of(job)) if world.rank == 0 else None
        return None if path is None else open_checkpoint(path, size=world.size)

    found = together(world, find, name="checkpoint.read")
    name = world.broadcast_object(None if found is None else str(found.path), name="checkpoint.path")
    if name is None:
        job.record.cut_back({})
        return False
    shared = scattered(found, world, everywhere=True)
    own = scattered(found, world, everywhere=False)
    together(world, lambda: put_back(job, unpacked(shared, name=name), own, name=name), name="checkpoint.restore")
    return True


def scattered(checkpoint: Checkpoint | None, world: World, *, everywhere: bool) -> Tensor:
    """Return the shared section of rank 0's checkpoint, or this rank's own, as uint8 [length]. Collective."""

    def read(number: int) -> Tensor:
        section = together(world, lambda: checkpoint.section(number) if checkpoint else None, name="checkpoint.section")
        return torch.empty(0, dtype=torch.uint8) if section is None else section

    if everywhere:
        data = read(0)
        length = world.broadcast_object(len(data), name="checkpoint.length")
        data = data if world.rank == 0 else torch.empty(length, dtype=torch.uint8)
        world.broadcast_(data, name="checkpoint.shared")
        return data
    mine = torch.empty(0, dtype=torch.uint8)
    for rank in range(world.size):
        section = read(1 + rank)
        parts = [section if to == rank else section[:0] for to in range(world.size)]
        arrived = world.scatter_bytes(parts, name=f"checkpoint.own.{rank}")
        mine = arrived if rank == world.rank else mine
    return mine


def put_back(job: Job, shared: dict[str, Any], own: Tensor, *, name: str) -> None:
    """Put a loaded state into the job, on this rank.

    Raises:
        RefusedError: the state is of other data, other settings or another model.
    """
    if shared.get("data") != job.data_identities:
        raise RefusedError(f"the checkpoint {name} was trained on other data; restore that, or start anew")
    mine, theirs = identity(job.config), shared.get("run")
    if not isinstance(theirs, dict):
        raise RefusedError(f"the checkpoint {name} does not say of which run it is; start anew in another --run-dir")
    differing = [leaf for leaf in mine if theirs.get(leaf) != mine[leaf]]
    if differing:
        listed = "; ".join(f"{leaf}: {theirs.get(leaf)!r} there, {mine[leaf]!r} here" for leaf in differing)
        raise RefusedError(f"the checkpoint {name} is another run's ({listed}); put its own checkpoints back")
    try:
        fill(job, shared, unpacked(own, name=name))
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RefusedError(f"the checkpoint {name} is another model's: {first_line(error)}") from error


def fill(job: Job, shared: dict[str, Any], mine: dict[str, Any]) -> None:
    """Set every part of the job from what all ranks share and from what is this rank's."""
    job.strategy.load_state_dict(State(shared, mine))
    job.totals = {name: Totals(**sums) for name, sums in mine["totals"].items()}
    job.step = shared["step"]
    job.record.cut_back(shared["position"])
    job.clock.seconds = {phase: float(shared["seconds"][phase]) for phase in PHASES}
    job.epochs_done, job.epoch_seconds = shared["epochs_done"], shared["epoch_seconds"]
    job.best_accuracy, job.last_accuracy = shared["best_accuracy"], shared["last_accuracy"]
    torch.set_rng_state(mine["random"])


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def export(job: Job, *, digest: str) -> None:
    """Write each trained model as a plain state_dict, model.pt where there is one, and then its card, model.yaml.

    Args:
        job: a run that has settled.
        digest: summary.json's `parameter_digest`.

    Collective: every rank of the world must call this.
    """
    done = replace(job.card, epochs=job.epochs_done, steps=job.step, parameter_digest=digest)

    def write(model: WholeModel) -> None:
        if job.world.rank == 0:
            path = job.directory / f"{model.name}.pt"
            with publishing(path) as file:
                torch.save(model.state, file)
            score = job.last_scores.get(model.name)
            accuracy = score.accuracy if score else job.last_accuracy
            classes = model.classes or done.classes
            card = replace(done, accuracy=accuracy, sha256=sha256_of(path), classes=classes)
            write_card(path.with_name(f"{model.name}.yaml"), card)

    for model in job.strategy.whole_models():
        together(job.world, partial(write, model), name="export")
