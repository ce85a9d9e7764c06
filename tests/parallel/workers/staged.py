"""Every rank makes whole runs of stages: equal ones, cached ones, ones stopped in every stage, and one taken back."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import hvfreeze
from hvfreeze.errors import Preempted
from hvfreeze.freezing.voting.criteria import CRITERIA, Criterion, Proposal
from hvfreeze.heads import rows
from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.world import World, end_job_on_exception
from hvfreeze.strategies.replicas.door import Replicas
from hvfreeze.training import loop
from hvfreeze.training.job import Job
from hvfreeze.training.progress import Progress
from hvfreeze.training.stages import budget, opening
from hvfreeze.training.stages.course import Course
from hvfreeze.training.stages.timing import Timing
from tests.parallel.mpirun import report
from tests.parallel.workers.runs import Runs

MODEL = "shufflenet_v2_x0_5"
BATCH = 8
SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "validation_fraction": 0.2,
    "batch_size": BATCH,
    "augment": "views:2",
    "freeze": "auto",
    "epochs": 3,
    "interval": 2,
    "freeze_warmup": 2,
    "lr": 0.01,
    "pool": 2,
    "checkpoint_every": "5s",
}
Ask = Callable[[Job, str], bool]
"""(job, what comes next: features, pass, step) -> whether the last rank asks to leave."""


@contextmanager
def asking(world: World, ask: Ask) -> Iterator[None]:
    """Ask on the last rank to leave, when `ask` says so, at every point where that can be heeded."""
    solve, make_step, make_epoch = Replicas.solve_head, loop.train_step, loop.EPOCHS["kernel"]
    jobs: list[Job] = []
    is_last = world.rank == world.size - 1

    def solve_head(self: Replicas, *args: Any, stop: Callable[[int], bool], **rest: Any) -> Any:
        def stopping(count: int) -> bool:
            wants = stop(count)
            return wants or (is_last and ask(jobs[-1], "pass" if count == 0 else "features"))

        return solve(self, *args, stop=stopping, **rest)

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = job.asked_to_leave or (is_last and ask(job, "step"))
        return make_step(job, batches)

    def solve_epoch(job: Job, epoch: int, progress: Progress) -> None:
        jobs.append(job)
        make_epoch(job, epoch, progress)

    Replicas.solve_head, loop.train_step = solve_head, step  # type: ignore[method-assign]
    loop.EPOCHS["kernel"] = solve_epoch
    try:
        yield
    finally:
        Replicas.solve_head, loop.train_step = solve, make_step  # type: ignore[method-assign]
        loop.EPOCHS["kernel"] = make_epoch


def stopped(runs: Runs, name: str, ask: Ask, **changes: Any) -> None:
    with asking(runs.world, ask):
        try:
            runs(name, **changes)
        except Preempted:
            return
    raise AssertionError(f"{name} was not stopped")


@contextmanager
def few_compared() -> Iterator[None]:
    """Let all samples be more than a head may compare."""
    before = opening.MOST_ROWS  # type: ignore[attr-defined]
    opening.MOST_ROWS = 10  # type: ignore[attr-defined]
    try:
        yield
    finally:
        opening.MOST_ROWS = before  # type: ignore[attr-defined]


@contextmanager
def spoiling() -> Iterator[None]:
    """Let tuning end in a network that gives the same for all images."""
    turn = Course.turn

    def spoilt(self: Course) -> None:
        if self.number == 1:
            with torch.no_grad():
                for parameter in self.opened.model.parameters():
                    parameter.zero_()
        turn(self)

    Course.turn = spoilt  # type: ignore[method-assign]
    try:
        yield
    finally:
        Course.turn = turn  # type: ignore[method-assign]


@contextmanager
def clocked(world: World) -> Iterator[None]:
    """Let time pass by a twentieth of a second whenever the clock is read, on other ranks faster than on rank 0."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 0.05 * (world.rank + 1))
    before = budget.time, loop.time, opening.time_batch, opening.time_comparing  # type: ignore[attr-defined]
    budget.time = loop.time = clock  # type: ignore[assignment,attr-defined]
    opening.time_batch = lambda *args, **rest: Timing(0.01, 0.1)  # type: ignore[attr-defined]
    opening.time_comparing = lambda **rest: 0.1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        budget.time, loop.time, opening.time_batch, opening.time_comparing = before  # type: ignore[attr-defined]


def counted(number: int, what: str, *, stage: int) -> Ask:
    """Ask at the `number`-th point of a kind in a stage."""
    left = [number]

    def ask(job: Job, kind: str) -> bool:
        left[0] -= kind == what and job.course.number == stage
        return left[0] < 0

    return ask


STOPS: dict[str, Ask] = {
    "features-of-the-first": counted(1, "features", stage=0),
    "passes-of-the-first": counted(2, "pass", stage=0),
    "first-step": counted(0, "step", stage=1),
    "between-votes": counted(4, "step", stage=1),
    "features-of-the-last": counted(1, "features", stage=2),
    "passes-of-the-last": counted(2, "pass", stage=2),
}


def same_run(runs: Runs, found: dict[str, Any], name: str, straight: dict[str, Any]) -> None:
    assert found["parameter_digest"] == straight["parameter_digest"], f"{name}: another model"
    for key in ("test_accuracy", "stages", "cut_history", "steps", "epochs", "final_cut"):
        assert found[key] == straight[key], f"{name}: {key}: {found[key]}, not {straight[key]}"
    assert {**found["head"], "exchanged_bytes": 0} == {**straight["head"], "exchanged_bytes": 0}, name
    if runs.world.rank == 0:
        mine, theirs = runs.numbers(name), runs.numbers("straight")
        assert [{**line, "allreduce_bytes": 0} for line in mine] == [{**line, "allreduce_bytes": 0} for line in theirs]


def check_stops(runs: Runs, *, everywhere: bool) -> dict[str, Any]:
    """Compare equal runs, one from a cache, and some that were stopped."""
    straight = runs("straight")
    same_run(runs, runs("again"), "again", straight)
    cached = runs("cached", cache="on")
    same_run(runs, cached, "cached", straight)
    assert cached["cache"]["rows_written"] > 0 and cached["cache"]["exact"]
    some = ("between-votes", "passes-of-the-last") if runs.world.size == 3 else ("features-of-the-first", "first-step")
    for name in STOPS if everywhere else some:
        stopped(runs, name, STOPS[name])
        same_run(runs, runs(name, resume=True), name, straight)
    same_run(runs, runs("again", resume=True), "again", straight)
    return {"straight": straight}


def try_parts(runs: Runs) -> dict[str, Any]:
    """Make runs that leave out what a run of stages can, and ones whose tuning is spoilt."""
    parts = {"no-votes": "votes", "no-last-solve": "last-solve,votes"}
    without = {name: runs(name, auto_without=left_out) for name, left_out in parts.items()}
    solved = runs("solved", epochs=1)
    with few_compared():
        runs("linear", epochs=1)
    with spoiling():
        spoilt, unguarded = runs("spoilt"), runs("unguarded", auto_without="guard")
    if runs.world.rank == 0:
        heads = {"solved": "kernel:2", "no-votes": "kernel:2", "no-last-solve": "last", "linear": "multi-level:2"}
        for name, head in heads.items():
            assert hvfreeze.load(runs.root / name).card.head == head, name
        assert "head-fit exact, not kernel: there are more than" in (runs.root / "linear" / "log.txt").read_text()
        kept, first = (torch.load(runs.root / name / "model.pt", weights_only=True) for name in ("spoilt", "solved"))
        assert kept.keys() == first.keys()
        assert [key for key in kept if not torch.equal(kept[key], first[key])] == []
    return {"without": without, "solved": solved, "spoilt": spoilt, "unguarded": unguarded}


def keep_to_budgets(runs: Runs) -> dict[str, Any]:
    """Make runs that are given a time, by a clock that passes by itself."""
    with clocked(runs.world):
        timed = runs("timed", time_budget="4s")
    with clocked(runs.world):
        stopped(runs, "timed-stopped", counted(4, "step", stage=1), time_budget="4s")
    with clocked(runs.world):
        resumed = runs("timed-stopped", resume=True, time_budget="4s")
    with clocked(runs.world):
        trained = runs("timed-plain", time_budget="4s", freeze="linear", head="last", head_fit="sgd")
    return {"timed": timed, "resumed": resumed, "trained": trained}


PARTS: dict[str, Callable[[Runs], dict[str, Any]]] = {
    "stops": partial(check_stops, everywhere=False),
    "every-stop": partial(check_stops, everywhere=True),
    "parts": try_parts,
    "budgets": keep_to_budgets,
}


def main() -> None:
    world = open_world()
    end_job_on_exception(world)
    # A criterion that wants one block more as soon as it has seen gradients twice: short runs show no other.
    CRITERIA["gradient-norm"] = Criterion(
        lambda seen: Proposal(cut=min(seen.cut + (seen.norms is not None), 4)), watches_gradients=True
    )
    # Two batches to a chunk, so that a rank has several.
    rows.CHUNK_ROWS = 2 * BATCH
    settings = {**SETTINGS, "train_samples": 40 * world.size * 5 // 4}
    report(world.rank, **PARTS[sys.argv[2]](Runs(world, Path(sys.argv[1]), settings, started=0.0)))
    world.close()


main()
