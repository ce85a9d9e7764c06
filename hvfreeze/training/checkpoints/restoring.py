"""How a run goes on from its newest checkpoint: bit for bit, or on another number of ranks where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import RefusedError
from hvfreeze.ranks.agreement import together
from hvfreeze.ranks.world import World
from hvfreeze.runs.clock import PHASES
from hvfreeze.strategies.strategy import State
from hvfreeze.training.checkpoints.best import bring_back_best
from hvfreeze.training.checkpoints.file import Checkpoint, newest, open_checkpoint, unpacked
from hvfreeze.training.checkpoints.redealing import Redealing
from hvfreeze.training.checkpoints.saving import directory_of, identity
from hvfreeze.training.evaluation import Best, Score, Totals
from hvfreeze.training.job import Job


def restore(job: Job) -> int | None:
    """Put the newest checkpoint's state into the job, and drop what was logged after it.

    Only rank 0 reads the file; every rank receives what is shared, and its own part alone.
    Collective: every rank of the world must call this.

    Returns:
        How many ranks wrote the checkpoint, None where there is none.

    Raises:
        RefusedError: the checkpoint is damaged, is another run's or model's, or is of another number of ranks and
            --resume-inexact was not given.
    """
    world = job.world
    size = None if job.config.run.resume_inexact else world.size

    def find() -> Checkpoint | None:
        path = newest(directory_of(job)) if world.rank == 0 else None
        return None if path is None else open_checkpoint(path, size=size)

    found = together(world, find, name="checkpoint.read")
    described = world.broadcast_object((str(found.path), found.size) if found else None, name="checkpoint.described")
    if described is None:
        job.record.cut_back({})
        return None
    name, wrote = described
    data = read_by_all(world, lambda: found.section(0) if found else None)
    shared = together(world, lambda: own_run(job, unpacked(data, name=name), name=name), name="checkpoint.run")
    timed = job.config.run.budget_seconds() is not None
    job.course.load_state_dict(shared["course"], keeps_plan=timed)
    if wrote == world.size:
        own = dealt(world, lambda rank: found.section(1 + rank) if found else None)
    else:
        if job.config.freeze.auto or timed:
            raise other_size(wrote, world.size)
        redealing = together(world, lambda: Redealing(job, shared, found), name="checkpoint.redealing")
        own = dealt(world, redealing.state_of)
        shared = redealing.shared()
        change = f"ranks: {wrote} there, {world.size} here; {redealing.told()}"
        job.record.change(change)
        job.notes.append(f"not as before: {change}")
    together(world, lambda: put_back(job, shared, own, name=name), name="checkpoint.restore")
    together(world, lambda: bring_back_best(job, Path(name)), name="best.back")
    return wrote


def read_by_all(world: World, read: Callable[[], Tensor | None]) -> Tensor:
    """Return on every rank what rank 0 reads, uint8 [length]. Collective."""
    found = together(world, read, name="checkpoint.section")
    length: int = world.broadcast_object(0 if found is None else len(found), name="checkpoint.length")
    data = torch.empty(length, dtype=torch.uint8) if found is None else found
    world.broadcast_(data, name="checkpoint.shared")
    return data


def dealt(world: World, read: Callable[[int], Tensor | None]) -> Tensor:
    """Return to each rank what rank 0 reads for it, uint8 [length]; rank 0 holds one rank's at a time. Collective."""
    mine = nothing = torch.empty(0, dtype=torch.uint8)
    for rank in range(world.size):
        section = together(world, lambda rank=rank: read(rank), name="checkpoint.section")  # type: ignore[misc]
        parts = [section if to == rank and section is not None else nothing for to in range(world.size)]
        arrived = world.scatter_bytes(parts, name=f"checkpoint.own.{rank}")
        mine = arrived if rank == world.rank else mine
    return mine


def own_run(job: Job, shared: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Return what ranks share, where it is this run's.

    Raises:
        RefusedError: the state is of other data or other settings.
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
    if not job.course.knows(shared.get("course")):
        raise RefusedError(f"the checkpoint {name} does not say in which stage its run is; start anew")
    before, now = shared["course"]["steps"], [stage.steps for stage in job.course.stages]
    if shared["course"]["number"] > 0 and before != now and job.config.run.budget_seconds() is None:
        raise RefusedError(
            f"the checkpoint {name} is of stages of {before} steps, and --epochs ({job.config.optimizer.epochs}) makes "
            f"them {now}; give the --epochs that it began with, or start anew in another --run-dir"
        )
    return shared


def other_size(wrote: int, size: int) -> RefusedError:
    """Return the refusal of stages that were planned for another number of ranks."""
    error = RefusedError(
        f"the checkpoint was written by {wrote} ranks, for which --freeze auto or --time-budget planned other steps "
        f"than for {size}; resume on {wrote}, or start anew in another --run-dir"
    )
    error.everywhere = True
    return error


def put_back(job: Job, shared: dict[str, Any], own: Tensor, *, name: str) -> None:
    """Put a loaded state into the job, on this rank.

    Raises:
        RefusedError: the state is of another model.
    """
    try:
        fill(job, shared, unpacked(own, name=name))
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RefusedError(f"the checkpoint {name} is another model's: {first_line(error)}") from error


def fill(job: Job, shared: dict[str, Any], mine: dict[str, Any]) -> None:
    """Set every part of the job from what all ranks share and from what is this rank's."""
    # First, for a strategy reads off it how long steps take.
    job.clock.seconds = {phase: float(shared["seconds"][phase]) for phase in PHASES}
    job.strategy.load_state_dict(State(shared, mine))
    job.budget.load_state_dict(shared["budget"])
    if job.guard is not None:
        job.guard.load_state_dict(shared["guard"])
    job.totals = {name: Totals(**sums) for name, sums in mine["totals"].items()}
    job.step = shared["step"]
    job.record.cut_back(shared["position"])
    job.epochs_done, job.epoch_seconds = shared["epochs_done"], shared["epoch_seconds"]
    job.best_accuracy, job.last_accuracy = shared["best_accuracy"], shared["last_accuracy"]
    job.last_scores = {model: Score(*score) for model, score in shared["last_scores"].items()}
    job.best = {name: Best(*best) for name, best in shared["best"].items()}
    job.evaluations_in_vain = shared["evaluations_in_vain"]
    torch.set_rng_state(mine["random"])


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
