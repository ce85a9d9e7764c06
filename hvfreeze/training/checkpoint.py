"""Checkpoints of a run: their content and schedule, and resuming on any number of ranks."""

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
from hvfreeze.config.tree import Config, convert, leaves, to_dict
from hvfreeze.errors import RefusedError
from hvfreeze.runs.checkpoint_file import Checkpoint, Saving, newest, open_checkpoint, packed, unpacked
from hvfreeze.runs.clock import PHASES, train_seconds
from hvfreeze.runs.files import reason_of
from hvfreeze.runs.identity import COMPARED_OTHERWISE, HARMLESS, absolute, absolute_leaves
from hvfreeze.runs.reading import Move
from hvfreeze.strategies.base import State
from hvfreeze.training.best_model import bring_back_best, link_best
from hvfreeze.training.evaluation import Best, Score, Totals
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


def save(job: Job, *, settled: bool, alone: bool = False) -> None:
    """Start writing a checkpoint of all ranks, in the background of the next steps; see `finish_saving`. Collective.

    Compares the replicas first. With `settled`, the strategy has synchronized the replicas. Without it, as when a run
    is asked to leave between two synchronizations, the state is each rank's own, so that the resumed run synchronizes
    at the same steps as an uninterrupted one. With `alone`, all other checkpoints are removed afterwards.

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
    """Return the state that is equal on all ranks, or known to rank 0 alone, with that of the strategy."""
    return {
        "run": identity(job.config),
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
    """Return the state of this rank: random state, sums over samples, processor seconds, and that of the strategy."""
    return {
        "processor_seconds": dict(job.clock.processor),
        "random": torch.get_rng_state(),
        "totals": {name: dataclasses.asdict(sums) for name, sums in job.totals.items()},
    }


def identity(config: Config) -> dict[str, Any]:
    """Return the settings that must equal those of a checkpoint, by flag; paths are absolute."""
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

    With checkpoints, the end of the last verb always writes one, and other verbs if it is cheap.
    """
    cadence = job.config.run.checkpoint_cadence()
    return (is_last or is_cheap(job)) if cadence is None else bool(cadence[0])


def is_cheap(job: Job) -> bool:
    """Return True if another checkpoint keeps their share of training below `LARGEST_SHARE`. Collective.

    Used only at the end of an epoch or a verb, where the strategy synchronizes anyway: a clock must not change any bit.
    """
    seconds = job.clock.read()
    spent, trained = seconds["checkpoint"], train_seconds(seconds)
    cheap = spent + job.checkpoint_seconds <= LARGEST_SHARE * trained
    return job.world.broadcast_object(cheap, name="checkpoint.cheap")


class Redealing:
    """The redistribution of a checkpoint's state to another number of ranks.

    Args:
        job: the job that resumes.
        shared: the checkpoint's shared section.
        checkpoint: the checkpoint; on rank 0 alone.

    Raises:
        RefusedError: the checkpoint does not record its steps per epoch.
    """

    def __init__(self, job: Job, shared: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        self._job, self._shared, self._checkpoint = job, shared, checkpoint
        if type(shared.get("steps_per_epoch")) is not int or shared["steps_per_epoch"] < 1:
            raise RefusedError("the checkpoint does not record its steps per epoch; resume on the same number of ranks")
        self._before: int = shared["steps_per_epoch"]
        self._totals: dict[str, Totals] = {}
        self._random: list[Tensor] = []
        self._processor: list[dict[str, float]] = []
        self._states: Iterator[dict[str, Any]] | None = None

    def restep(self, step: int) -> int:
        """Return the last step of this job that is not after the same fraction of an epoch."""
        epoch, within = divmod(step, self._before)
        now = self._job.steps_per_epoch
        return epoch * now + within * now // self._before

    def describe(self) -> str:
        """Return a clause for the log on the new step count."""
        step = self._shared["step"]
        return (
            f"step {step} ({self._before} per epoch) became {self.restep(step)} ({self._job.steps_per_epoch} per epoch)"
        )

    def shared(self) -> dict[str, Any]:
        """Return the state for all ranks."""
        changed: dict[str, Any] = {"step": self.restep(self._shared["step"])}
        if "exchange" in self._shared:
            # Measured with other ranks on other links.
            changed["exchange"] = {}
        return {**self._shared, **changed}

    def state_of(self, rank: int) -> Tensor | None:
        """Return the packed state of `rank`, on rank 0; call it for ranks in order."""
        if self._checkpoint is None:
            return None
        if self._states is None:
            there, size = self._there(self._checkpoint), self._job.world.size
            self._states = self._job.opened.model.repartitioned(there, size=size, restep=self.restep)
        try:
            state = next(self._states)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(f"the checkpoint {self._checkpoint.path} belongs to another model: {error}") from error
        # Sums over samples are only added over ranks.
        totals = {name: dataclasses.asdict(sums) for name, sums in self._totals.items()} if rank == 0 else {}
        new = torch.Generator().manual_seed(self._job.config.run.seed + rank).get_state()
        random = self._random[rank] if rank < len(self._random) else new
        processor = self._processor[rank] if rank < len(self._processor) else {}
        return packed({**state, "random": random, "totals": totals, "processor_seconds": processor})

    def _there(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Yield the strategy's state of each earlier rank, and store the rest."""
        for rank in range(checkpoint.size):
            own = unpacked(checkpoint.section(1 + rank), name=str(checkpoint.path))
            self._random.append(own["random"])
            self._processor.append(own.get("processor_seconds", {}))
            for name, sums in own["totals"].items():
                before = self._totals.get(name, Totals())
                added = {field: value + getattr(before, field) for field, value in vars(Totals.read(sums)).items()}
                self._totals[name] = Totals(**added)
            yield own


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
        redealing = raise_on_all_ranks(world, lambda: Redealing(job, shared, found), name="checkpoint.redealing")
        own = scatter_sections(world, redealing.state_of)
        shared = redealing.shared()
        change = f"ranks: {wrote} before, {world.size} now; {redealing.describe()}"
        job.record.change(change)
        job.notes.append(f"changed since the run started: {change}")
    fill = partial(load_progress, job, shared, own, name=name)
    raise_on_all_ranks(world, fill, name="checkpoint.restore")
    raise_on_all_ranks(world, lambda: bring_back_best(job, Path(name)), name="best.back")
    job.waiting = partial(load_model, job, shared, own, name=name, redealt=wrote != world.size)
    return wrote


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
    current, theirs = identity(job.config), shared.get("run")
    if not isinstance(theirs, dict):
        raise RefusedError(f"the checkpoint {name} does not record its run; start from scratch in another --run-dir")
    theirs = convert(theirs)
    # A setting that is missing or null in the checkpoint has its default.
    usual = {leaf: leaves()[leaf][1].default for leaf in current}
    theirs = absolute_leaves({leaf: usual[leaf] if theirs.get(leaf) is None else theirs[leaf] for leaf in current})
    differing = [leaf for leaf in current if theirs[leaf] != current[leaf]]
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
        for name in SAVED:
            setattr(job, name, shared[name])
        job.images = shared["part"][-1]
        earlier, moves = shared["earlier"], [Move(*move) for move in shared["earlier"]["cut_history"]]
        job.earlier = {**earlier, "cut_history": moves} if moves else {}
        job.totals = {name: Totals.read(sums) for name, sums in state["totals"].items()}
        job.record.cut_back(shared["position"])
        job.last_scores = {model: Score(*score) for model, score in shared["last_scores"].items()}
        job.best = {name: Best(*best) for name, best in shared["best"].items()}
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


DAMAGES = (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions that loading another run's state raises."""
