"""A run's state: what a checkpoint must hold so that the run goes on bit for bit, and how it is put back."""

from __future__ import annotations

import dataclasses
import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import RefusedError
from hvfreeze.ranks.agreement import together
from hvfreeze.runs.clock import PHASES
from hvfreeze.runs.publishing import publishing
from hvfreeze.strategies.strategy import State
from hvfreeze.training import checkpoint
from hvfreeze.training.evaluation import Totals
from hvfreeze.training.job import Job


def directory_of(job: Job) -> Path:
    """Return where the run keeps its checkpoints."""
    return job.directory / "checkpoints"


def save(job: Job, *, settled: bool) -> None:
    """Write a checkpoint of all ranks.

    With `settled` the strategy settles first, and the model that all ranks then hold is compared. Without it, as when
    a run is asked to leave between two such points, every rank's own state is kept as it is, so that the resumed run
    settles exactly when the uninterrupted one does.

    Collective: every rank of the world must call this.

    Raises:
        DivergedError: replicas are not equal.
        RefusedError: the file cannot be written.
    """
    if settled:
        job.strategy.settle()
        job.strategy.check(step=job.step)
    strategy = job.strategy.state_dict()
    ranks = job.world.gather_bytes(packed({**rank_state(job), **strategy.own}), name="checkpoint.ranks")

    def write() -> None:
        if job.world.rank == 0:
            state = {**shared_state(job), **strategy.shared, "ranks": ranks}
            checkpoint.save(directory_of(job), state, step=job.step, size=job.world.size)

    together(job.world, write, name="checkpoint.write")


def shared_state(job: Job) -> dict[str, Any]:
    """Return what is equal on all ranks, or known to rank 0 alone; the strategy adds its own."""
    return {
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


def packed(state: dict[str, Any]) -> Tensor:
    """Return plain values and tensors as the bytes of a `torch.save` archive, uint8 [length]."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> dict[str, Any]:
    """Undo `packed`."""
    state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return state


def restore(job: Job) -> bool:
    """Put the newest checkpoint's state into the job; return False where there is none, and drop what was logged.

    Collective: every rank of the world must call this.

    Raises:
        RefusedError: the checkpoint is damaged, or is another model's.
    """
    state = checkpoint.load_everywhere(directory_of(job), job.world)
    if state is None:
        job.record.cut_back({})
        return False
    together(job.world, lambda: put_back(job, state), name="checkpoint.restore")
    return True


def put_back(job: Job, state: dict[str, Any]) -> None:
    """Put a loaded state into the job, on this rank."""
    if state.get("data") != job.data_identities:
        raise RefusedError(
            f"the checkpoint in {directory_of(job)} was trained on other data; restore that, or start anew"
        )
    try:
        fill(job, state, unpacked(state["ranks"][job.world.rank]))
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RefusedError(f"the checkpoint in {directory_of(job)} is another model's: {first_line(error)}") from error


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


def export(job: Job) -> None:
    """Write each trained model as a plain state_dict, model.pt where there is one, for --weights or torchvision.

    Collective: every rank of the world must call this.
    """

    def write(name: str, state: dict[str, Tensor]) -> None:
        if job.world.rank == 0:
            with publishing(job.directory / f"{name}.pt") as file:
                torch.save(state, file)

    for name, state in job.strategy.whole_models():
        together(job.world, partial(write, name, state), name="export")
