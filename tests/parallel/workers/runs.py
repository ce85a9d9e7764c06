"""Every rank makes whole runs in one process: a run that was stopped and resumed is the uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hvfreeze.comm import reducer
from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config, applying, from_dict
from hvfreeze.data.batches import Batch
from hvfreeze.errors import Preempted
from hvfreeze.freezing.criteria import CRITERIA, Criterion, Evidence
from hvfreeze.heads.solution import Stop
from hvfreeze.strategies import compression_choice
from hvfreeze.strategies.compression_choice import Trial
from hvfreeze.strategies.fitted_head import FittedHead
from hvfreeze.training import loop
from hvfreeze.training.job import Job
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_models_be_small

MODEL = "shufflenet_v2_x0_5"
STEPS, EPOCHS, BATCH = 4, 3, 8
VOTED = {
    "freeze": "percentile",
    "eta_max": float("inf"),
    "interval": 2,
    "freeze_warmup": 2,
    "quorum": 0.25,
    "shadow": "gradient-norm,linear",
}
SCHEDULED = {"freeze": "linear", "interval": 3, "freeze_warmup": 2}


def configuration(directory: Path, size: int, **changes: Any) -> Config:
    base = {
        "model": MODEL,
        # A fifth is held out and evaluated on, which is much less than the test split.
        "train_samples": STEPS * BATCH * size * 5 // 4,
        "validation_fraction": 0.2,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "lr": 0.05,
        "weight_decay": 1e-2,
        "schedule": "cosine",
        "threads": 1,
        "run_dir": str(directory),
    }
    # What a fitted head has no use for.
    known = applying({**base, **changes})
    return from_dict({**{name: value for name, value in base.items() if name in known}, **changes})


class Runs:
    """Runs of one configuration with changes, each in a directory of its own.

    Attributes:
        world: the ranks.
        root: where the directories are.
        settings: what all runs share.
        more: what `run` takes beside a configuration.
    """

    def __init__(self, world: World, root: Path, settings: Mapping[str, Any], **more: Any) -> None:
        self.world, self.root, self.settings, self.more = world, root, settings, more

    def __call__(self, name: str, **changes: Any) -> dict[str, Any]:
        """Make a run in the directory `name`; return its summary. A change to None leaves a setting out."""
        given = {"threads": 1, "run_dir": str(self.root / name), **self.settings, **changes}
        left_out = [setting for setting, value in changes.items() if value is None]
        return run(from_dict({key: given[key] for key in given if key not in left_out}), self.world, **self.more)

    def numbers(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a run's record without measured times."""
        return [line for kind in ("metrics", "decisions") for line in lines(self.root / name, kind)]


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    timed = ("seconds", "train_seconds", "images_per_second", "cache", "exchange")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def stopped_solving(runs: Runs, name: str, *, when: Callable[[int, str], bool], **changes: Any) -> None:
    """Make a run whose last rank is asked to leave `when` the solver's count of rows and note say so."""
    solve = FittedHead.fit

    def fit(self: FittedHead, *args: Any, stop: Stop, **rest: Any) -> Any:
        last = runs.world.rank == runs.world.size - 1

        def stopping(count: int, note: str = "") -> bool:
            return stop(count, note) or (last and when(count, note))

        return solve(self, *args, stop=stopping, **rest)

    FittedHead.fit = fit  # type: ignore[method-assign]
    try:
        runs(name, **changes)
    except Preempted:
        return
    finally:
        FittedHead.fit = solve  # type: ignore[method-assign]
    raise AssertionError("the run was not stopped")


def interrupted(config: Config, world: World, *, after: int) -> None:
    """Make a run that is asked to leave, on the last rank, in the step after `after` steps."""
    make_step = loop.train_step

    def step(job: Job, batches: Sequence[Batch]) -> float:
        if job.step == after and world.rank == world.size - 1:
            job.asked_to_leave = True
        return make_step(job, batches)

    loop.train_step = step
    try:
        run(config, world)
    except Preempted:
        return
    finally:
        loop.train_step = make_step
    raise AssertionError("the run was not interrupted")


MEASURED = ("cpu_seconds", "wait_seconds", "peak_memory_bytes", "forward_seconds", "evaluation_wire_bytes")
"""Numbers of a strategy that differ between equal runs; evaluations come at other steps where a run was stopped."""


def record_of(directory: Path, *, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the lines of a run's record without measured times and without the keys `without`."""
    found = []
    for line in [line for kind in ("metrics", "decisions") for line in lines(directory, kind)]:
        kept = {key: value for key, value in line.items() if key not in without}
        parts = {key: value for key, value in kept.items() if isinstance(value, dict)}
        found.append(kept | {key: {k: v for k, v in part.items() if k not in MEASURED} for key, part in parts.items()})
    return found


def see_that_stopped_runs_go_on(
    configure: Callable[..., Config],
    world: World,
    stops: Sequence[int] | Callable[[dict[str, Any]], Sequence[int]],
    *,
    part: str = "",
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare stopped and resumed runs with an uninterrupted one; return the summary of the latter.

    Args:
        configure: the settings of a run of this name; `resume` lets it go on.
        world: the ranks.
        stops: the steps after which the last rank is asked to leave, or a function of the summary.
        part: the strategy's part of the summary, whose bytes must be equal too.
        without: keys of the record that need not be equal.
    """
    straight = run(configure("straight"), world)
    for stop in stops(straight) if callable(stops) else stops:
        config = configure(f"stop-{stop}")
        interrupted(config, world, after=stop)
        resumed = run(configure(f"stop-{stop}", resume=True), world)
        for key in ("parameter_digest", "cut_history", "models"):
            assert resumed.get(key) == straight.get(key), f"{key} differs when stopped after {stop}"
        if part:
            assert resumed[part]["wire_bytes"] == straight[part]["wire_bytes"], f"stopped after {stop}"
        if world.rank == 0:
            directory = Path(config.run.run_dir or "")
            expected = record_of(directory.with_name("straight"), without=without)
            assert record_of(directory, without=without) == expected, f"stopped after {stop}"
        world.barrier(name="test.resumed")
    return straight


def see_that_resumed_runs_are_equal(
    world: World, root: Path, name: str, stops: Sequence[int], **settings: Any
) -> list[list[int]]:
    """Compare runs that are stopped after so many steps with the one that never was."""
    straight = run(configuration(root / f"{name}-straight", world.size, **settings), world)
    for stop in stops:
        see_that_it_goes_on_after(stop, straight, world, root, name, **settings)
    history: list[list[int]] = straight["cut_history"]
    return history


def see_that_it_goes_on_after(
    stop: int, straight: dict[str, Any], world: World, root: Path, name: str, **settings: Any
) -> None:
    """Compare a run that is stopped after so many steps with one of the same settings that never was."""
    directory = root / f"{name}-{stop}"
    interrupted(configuration(directory, world.size, **settings), world, after=stop)
    resumed = run(configuration(directory, world.size, resume=True, **settings), world)
    assert resumed["parameter_digest"] == straight["parameter_digest"], f"{name}: differs when stopped after {stop}"
    assert resumed["cut_history"] == straight["cut_history"]
    assert resumed["allreduce_bytes"] == straight["allreduce_bytes"]
    if world.rank == 0:
        for kind in ("metrics", "decisions"):
            assert lines(directory, kind) == lines(root / f"{name}-straight", kind), f"{kind} differ after {stop}"


@contextmanager
def steps_that_take(seconds: dict[str, float]) -> Iterator[None]:
    """Let trials of compressions find these seconds of a step, for clocks decide otherwise."""
    add = Trial.add
    with patch.object(Trial, "add", lambda trial, step, waiting: add(trial, seconds[trial.now], 0.0)):
        yield


class Given(NamedTuple):
    """The arguments of checks: the ranks, and the folder of runs."""

    world: World
    root: Path


def check_voted_runs(given: Given) -> None:
    settings = {**VOTED, "signal": "local", "checkpoint_every": "0", "augment": "views:2"}
    # In the first step, and at the end of an epoch; one that is stopped in the middle of an epoch freezes and thaws.
    see_that_resumed_runs_are_equal(given.world, given.root, "voted", [0, STEPS], **settings)


def check_scheduled_runs_whose_exchange_is_chosen(given: Given) -> None:
    world, root = given
    reducer.UNCOMPRESSED_STEPS = 1
    compression_choice.TRIED_STEPS, compression_choice.ROUNDS = 2, 1
    thin = {"precision": "bfloat16", "compression": "auto", "accumulate": 3}
    settings = {**SCHEDULED, "interval": 10, "checkpoint_every": "3steps", "epochs": 10, **thin}
    with steps_that_take({"none": 3.0, "fp16": 1.2, "powersgd:32": 1.0, "powersgd:16": 1.0}):
        history = see_that_resumed_runs_are_equal(world, root, "scheduled", [15], **settings)
    assert history[-1][2] > history[0][2], f"the cut never moved, so nothing was shown: {history}"
    exchange = json.loads((root / "scheduled-straight/summary.json").read_text())["exchange"]
    assert exchange["tried"].keys() <= {"none", "fp16", "powersgd:32"}, "fewer gradients need no stronger compression"
    assert exchange["compression"] == "powersgd:32", "the next is no faster"


def freeze_and_thaw(seen: Evidence) -> int:
    """Propose two blocks once gains are known, and none after looks at them: short runs show no others."""
    return 0 if len(seen.probes) == 2 else max(seen.cut, 2 if seen.gains is not None else 0)


def check_runs_that_freeze_and_thaw(given: Given) -> None:
    world, root = given
    settings: dict[str, Any] = {"freeze": "coherence", "interval": 2, "freeze_warmup": 2, "augment": "views:2"}
    settings |= {"epochs": 6, "quorum": 0.25, "checkpoint_every": "0"}
    with patch.dict(CRITERIA, {"coherence": Criterion(freeze_and_thaw, watches="gains")}):
        history = see_that_resumed_runs_are_equal(world, root, "thawed", [STEPS + 1], **settings)
        cached = run(configuration(root / "thawed-cached", world.size, **settings, cache="on"), world)
    cuts = [cut for _, _, cut in history]
    assert cuts[:3] == [0, 2, 0], f"nothing was frozen and thawed: {history}"
    straight = json.loads((root / "thawed-straight/summary.json").read_text())
    assert cached["parameter_digest"] == straight["parameter_digest"], "rows of a cut that was left have changed bits"
    assert [list(move) for move in cached["cut_history"]] == straight["cut_history"]
    assert cached["cache"]["rows_written"] > 0


def setting(world: World, root: Path) -> Given:
    let_models_be_small()
    return Given(world, root)
