"""Resume a run from its newest checkpoint, on the same or another number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.config.tree import convert, leaves
from hvfreeze.errors import RefusedError
from hvfreeze.runs.checkpoint_file import Checkpoint, newest, open_checkpoint, packed, unpacked
from hvfreeze.runs.clock import PHASES
from hvfreeze.runs.files import reason_of
from hvfreeze.runs.identity import absolute_leaves
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import State
from hvfreeze.training.best_model import bring_back_best
from hvfreeze.training.checkpoint import SAVED, directory_of, identity, save, settings_of_run
from hvfreeze.training.evaluation import Best, Score, Totals
from hvfreeze.training.job import Job

DAMAGES = (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions that loading another run's state raises."""


def restore(job: Job) -> int | None:
    """Load the newest checkpoint into the job and remove later log lines. Collective.

    Only rank 0 reads the file; each rank receives the shared state and its own.

    Returns:
        The number of ranks that wrote the checkpoint; None if there is no checkpoint.

    Raises:
        RefusedError: the checkpoint is damaged, or belongs to another run, another model, or another number of ranks
            without --resume-inexact.
    """
    world, timed = job.world, job.config.run.budget_seconds() is not None
    planned = job.config.freeze.auto or timed
    size = None if job.config.run.resume_inexact or planned else world.size

    def find() -> Checkpoint | None:
        path = newest(directory_of(job)) if world.rank == 0 else None
        opened = None if path is None else open_checkpoint(path, size=size)
        if planned and opened is not None and opened.size != world.size:
            raise RefusedError(
                f"the checkpoint {path} was written by {opened.size} ranks, and hvfreeze auto or "
                f"--time-budget plans other steps for {world.size}; resume on {opened.size} ranks, "
                f"or start from scratch in another --run-dir"
            )
        return opened

    found = raise_on_all_ranks(world, find, name="checkpoint.read")
    described = world.broadcast_object((str(found.path), found.size) if found else None, name="checkpoint.described")
    if described is None:
        # A finished run without checkpoints keeps its lines.
        if not (job.directory / "summary.json").exists():
            job.record.cut_back({})
        return None
    name, wrote = described
    data = read_by_all(world, lambda: found.section(0) if found else None)
    shared = raise_on_all_ranks(
        world, lambda: check_run(job, unpacked(data, name=name), name=name), name="checkpoint.run"
    )
    if wrote == world.size:
        own = scatter_sections(world, lambda rank: found.section(1 + rank) if found else None)
    else:
        before = shared.get("steps_per_epoch")
        if type(before) is not int or before < 1:
            raise RefusedError(
                "the checkpoint does not record its steps per epoch; resume on the same number of ranks"
            ).on_all_ranks()
        now, step = job.steps_per_epoch, shared["step"]
        states = redealt_states(job, found, before=before) if found else iter(())
        own = scatter_sections(world, lambda _: next(states) if found else None)
        shared = {**shared, "step": restep(step, before=before, now=now)}
        if "exchange" in shared:
            # The other number of ranks measured other links.
            shared["exchange"] = {}
        change = (
            f"ranks: {wrote} before, {world.size} now; "
            f"step {step} ({before} per epoch) became {shared['step']} ({now} per epoch)"
        )
        job.record.change(change)
        job.notes.append(f"changed since the run started: {change}")
    fill = partial(load_progress, job, shared, own, name=name)
    raise_on_all_ranks(world, fill, name="checkpoint.restore")
    raise_on_all_ranks(world, lambda: bring_back_best(job, Path(name)), name="best.back")
    job.waiting = partial(load_model, job, shared, own, name=name, redealt=wrote != world.size)
    return wrote


def restep(step: int, *, before: int, now: int) -> int:
    """Convert a number of steps from epochs of `before` steps to epochs of `now` steps, rounded down."""
    epoch, within = divmod(step, before)
    return epoch * now + within * now // before


def redealt_states(job: Job, checkpoint: Checkpoint, *, before: int) -> Iterator[Tensor]:
    """Yield the packed state of each rank of this job, from the states of another number of ranks.

    Not a collective: rank 0 calls it. Earlier epochs had `before` steps.

    Raises:
        RefusedError: the checkpoint belongs to another model.
    """
    random, processor, totals = list[Tensor](), list[dict[str, float]](), dict[str, Totals]()

    def earlier() -> Iterator[dict[str, Any]]:
        """Yield the strategy's state of each earlier rank, and store the rest."""
        for rank in range(checkpoint.size):
            own = unpacked(checkpoint.section(1 + rank), name=str(checkpoint.path))
            random.append(own["random"])
            processor.append(own.get("processor_seconds", {}))
            for name, sums in own["totals"].items():
                so_far = totals.get(name, Totals())
                added = {field: value + getattr(so_far, field) for field, value in vars(Totals.read(sums)).items()}
                totals[name] = Totals(**added)
            yield own

    resteps = partial(restep, before=before, now=job.steps_per_epoch)
    states = job.opened.model.repartitioned(earlier(), size=job.world.size, restep=resteps)
    try:
        for rank, state in enumerate(states):
            new = torch.Generator().manual_seed(job.config.run.seed + rank).get_state()
            more = {
                # Sums over samples are only added over ranks.
                "totals": {name: dataclasses.asdict(sums) for name, sums in totals.items()} if rank == 0 else {},
                "random": random[rank] if rank < len(random) else new,
                "processor_seconds": processor[rank] if rank < len(processor) else {},
            }
            yield packed({**state, **more})
    except DAMAGES as error:
        raise RefusedError(f"the checkpoint {checkpoint.path} belongs to another model: {error}") from error


def read_by_all(world: World, read: Callable[[], Tensor | None]) -> Tensor:
    """Read bytes on rank 0 and return them on every rank, uint8 [length]. Collective."""
    found = raise_on_all_ranks(world, read, name="checkpoint.section")
    length: int = world.broadcast_object(0 if found is None else len(found), name="checkpoint.length")
    data = torch.empty(length, dtype=torch.uint8) if found is None else found
    world.broadcast_(data, name="checkpoint.shared")
    return data


def scatter_sections(world: World, read: Callable[[int], Tensor | None]) -> Tensor:
    """Return the bytes that rank 0 reads for this rank, sent one rank at a time, uint8 [length]. Collective."""
    received = nothing = torch.empty(0, dtype=torch.uint8)
    for rank in range(world.size):
        section = raise_on_all_ranks(world, lambda rank=rank: read(rank), name="checkpoint.section")  # type: ignore[misc]
        parts = [section if to == rank and section is not None else nothing for to in range(world.size)]
        arrived = world.scatter_bytes(parts, name=f"checkpoint.own.{rank}")
        received = arrived if rank == world.rank else received
    return received


def check_run(job: Job, shared: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Return the shared state, after checking that it belongs to this run."""
    data = shared.get("data") or {}
    # Streamed pixels and older checkpoints have fewer digests.
    known = [what for what in job.data_identities if what in data or what in ("train", "test")]
    other = [what for what in known if data.get(what) != job.data_identities[what]]
    if other:
        splits = " and ".join(dict.fromkeys(what.partition(" ")[0] for what in other))
        raise RefusedError(
            f"the checkpoint {name} was trained on other data ({splits}); restore that "
            f"data, or start from scratch in another --run-dir"
        )
    current, theirs = identity(job), shared.get("run")
    if not isinstance(theirs, dict):
        raise RefusedError(f"the checkpoint {name} does not record its run; start from scratch in another --run-dir")
    theirs = convert(theirs)
    # A setting that is missing or null in the checkpoint has its default.
    usual = {leaf: leaves()[leaf][1].default for leaf in current}
    theirs = absolute_leaves({leaf: usual[leaf] if theirs.get(leaf) is None else theirs[leaf] for leaf in current})
    # Older checkpoints have the settings as the data and the ranks determined them.
    determined = settings_of_run(job.config)
    differing = [leaf for leaf in current if theirs[leaf] not in (current[leaf], determined[leaf])]
    if differing:
        listed = "; ".join(f"{leaf}: {theirs[leaf]!r} before, {current[leaf]!r} now" for leaf in differing)
        raise RefusedError(f"the checkpoint {name} belongs to another run ({listed}); restore this run's checkpoints")
    shared = shared if "journal" in shared else convert_earlier_state(shared)
    job.journal.check_recipe(shared.get("journal"), source=name)
    return shared


def convert_earlier_state(shared: dict[str, Any]) -> dict[str, Any]:
    """Convert the state of a plain training checkpoint of an earlier version to this version."""
    course = shared.get("course")
    if not isinstance(course, dict) or len(course.get("steps") or ()) != 1:
        return shared
    return {
        **shared,
        "journal": {"recipe": {"recipe": "plain"}, "ended": [], "open": ("tune", {})},
        "budget": {"elapsed": (shared.get("budget") or {}).get("elapsed", 0.0), "begun": [0.0, 1.0]},
        "snapshots": {},
        "flips": course.get("mirror"),
        "part": [0, 0, course["steps"][0], 0],
        "earlier": {"cut_history": []},
    }


def load_progress(job: Job, shared: dict[str, Any], own: Tensor, *, name: str) -> None:
    """Load all of a checkpoint but the model into the job, on this rank."""
    try:
        state = unpacked(own, name=name)
        # A strategy reads the time per step from the clock.
        job.clock.seconds = {phase: float(shared["seconds"][phase]) for phase in PHASES}
        # Older checkpoints lack them.
        used = state.get("processor_seconds", {})
        job.clock.processor = {phase: float(used.get(phase, 0.0)) for phase in PHASES}
        job.journal.load_state_dict(shared["journal"], source=name)
        job.budget.load_state_dict(shared["budget"])
        for attribute in SAVED:
            setattr(job, attribute, shared[attribute])
        job.images = shared["part"][-1]
        earlier, moves = shared["earlier"], [Move(*move) for move in shared["earlier"]["cut_history"]]
        job.earlier = {**earlier, "cut_history": moves} if moves else {}
        job.totals = {model: Totals.read(sums) for model, sums in state["totals"].items()}
        job.record.cut_back(shared["position"])
        job.last_scores = {model: Score(*score) for model, score in shared["last_scores"].items()}
        job.best = {model: Best(*best) for model, best in shared["best"].items()}
        job.evaluations_without_gain = shared["evaluations_in_vain"]
    except DAMAGES as error:
        raise RefusedError(f"the checkpoint {name} belongs to another run: {reason_of(error)}") from error


def load_model(job: Job, shared: dict[str, Any], own: Tensor, *, name: str, redealt: bool) -> None:
    """Load a checkpoint's model into the open part, if the same part was open in the checkpoint. Collective."""

    def load() -> None:
        try:
            state = unpacked(own, name=name)
            job.opened.model.load_state_dict(State(shared, state))
            torch.set_rng_state(state["random"])
        except DAMAGES as error:
            raise RefusedError(f"the checkpoint {name} belongs to another model: {reason_of(error)}") from error

    raise_on_all_ranks(job.world, load, name="checkpoint.model")
    job.opened.first_step, job.opened.first_epoch, steps, _ = shared["part"]
    job.opened.plan(steps)
    job.opened.is_used = True
    if redealt:
        # At once, to replace checkpoints with other step counts: the highest step is the newest checkpoint.
        save(job, settled=True, alone=True)
