"""Every rank makes whole runs of stages: equal ones, cached ones, ones stopped in every stage, and one taken back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import hvfreeze
from hvfreeze.comm.world import World
from hvfreeze.data import batches
from hvfreeze.errors import Preempted
from hvfreeze.freezing.criteria import CRITERIA, Criterion
from hvfreeze.heads import rows
from hvfreeze.heads.solution import Stop
from hvfreeze.model.model_sources import build_model
from hvfreeze.strategies.data_parallel import DataParallel
from hvfreeze.training import auto, auto_plan, loop, time_budget, trial
from hvfreeze.training.evaluation import Score
from hvfreeze.training.job import Job
from hvfreeze.training.stages import StageRunner
from hvfreeze.training.time_budget import Timing
from tests.parallel.workers.checking import let_models_be_small
from tests.parallel.workers.runs import Runs, lines

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
    solve, make_step, make_epoch = DataParallel.solve_head, loop.train_step, loop.EPOCHS["kernel"]
    jobs: list[Job] = []
    is_last = world.rank == world.size - 1

    def solve_head(self: DataParallel, *args: Any, stop: Stop, **rest: Any) -> Any:
        def stopping(count: int, note: str = "") -> bool:
            wants = stop(count, note)
            return wants or (is_last and ask(jobs[-1], "pass" if count == 0 else "features"))

        return solve(self, *args, stop=stopping, **rest)

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = job.asked_to_leave or (is_last and ask(job, "step"))
        return make_step(job, batches)

    def solve_epoch(job: Job, epoch: int) -> None:
        jobs.append(job)
        make_epoch(job, epoch)

    DataParallel.solve_head, loop.train_step = solve_head, step  # type: ignore[method-assign]
    loop.EPOCHS["kernel"] = solve_epoch
    try:
        yield
    finally:
        DataParallel.solve_head, loop.train_step = solve, make_step  # type: ignore[method-assign]
        loop.EPOCHS["kernel"] = make_epoch


def stopped(runs: Runs, name: str, ask: Ask, **changes: Any) -> None:
    with asking(runs.world, ask):
        try:
            runs(name, **changes)
        except Preempted:
            return
    raise AssertionError(f"{name} was not stopped")


CENTRES = {"centres": "off", "centres-cached": "on"}


@contextmanager
def few_views() -> Iterator[None]:
    """Let a few views stand for all, so that features are not kept."""
    before, batches.FEW_VIEWS = batches.FEW_VIEWS, 16
    try:
        yield
    finally:
        batches.FEW_VIEWS = before


@contextmanager
def spoiling() -> Iterator[None]:
    """Let tuning end in a network that gives the same for all images."""
    turn = StageRunner.turn

    def spoilt(self: StageRunner) -> None:
        if self.number == 1:
            with torch.no_grad():
                for parameter in self.opened.chain.model.parameters():
                    parameter.zero_()
        turn(self)

    StageRunner.turn = spoilt  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageRunner.turn = turn  # type: ignore[method-assign]


@contextmanager
def clocked(world: World) -> Iterator[None]:
    """Let time pass by a twentieth of a second whenever the clock is read, on other ranks faster than on rank 0."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 0.05 * (world.rank + 1))
    patched: dict[str, Any] = {
        "time": clock,
        "time_batch": lambda *args, **rest: Timing(0.01, 0.1, images=32, evaluated=32),
        "time_comparing": lambda **rest: 0.1,
        "time_answering": lambda **rest: 0.01,
    }
    with patch.multiple(time_budget, **patched), patch.object(loop, "time", clock):
        yield


def counted(number: int, what: str, *, stage: int) -> Ask:
    """Ask at the `number`-th point of a kind in a stage."""
    left = [number]

    def ask(job: Job, kind: str) -> bool:
        left[0] -= kind == what and job.stage_runner.number == stage
        return left[0] < 0

    return ask


STOPS: dict[str, Ask] = {
    "features-of-the-first": counted(1, "features", stage=0),
    "passes-of-the-first": counted(0, "pass", stage=0),
    "first-step": counted(0, "step", stage=1),
    "between-votes": counted(4, "step", stage=1),
    "features-of-the-last": counted(1, "features", stage=2),
    "passes-of-the-last": counted(0, "pass", stage=2),
}


def same_run(runs: Runs, found: dict[str, Any], name: str, straight: dict[str, Any]) -> None:
    assert found["parameter_digest"] == straight["parameter_digest"], f"{name}: another model"
    for key in ("test_accuracy", "stages", "cut_history", "steps", "epochs", "final_cut"):
        assert found[key] == straight[key], f"{name}: {key}: {found[key]}, not {straight[key]}"
    assert {**found["head"], "exchanged_bytes": 0} == {**straight["head"], "exchanged_bytes": 0}, name
    if runs.world.rank == 0:
        mine, theirs = runs.numbers(name), runs.numbers("straight")
        assert [{**line, "allreduce_bytes": 0} for line in mine] == [{**line, "allreduce_bytes": 0} for line in theirs]


def compare_stopped(runs: Runs, stops: Iterable[str]) -> None:
    """Compare equal runs, one from a cache, and some that were stopped."""
    straight = runs("straight")
    assert [stage["stage"] for stage in straight["stages"]] == ["solve", "tune", "solve", "back"]
    cuts = [cut for _, _, cut in straight["cut_history"]]
    assert cuts[:2] == [5, 0] and cuts[-1] == 5, "frozen, tuned, frozen"
    assert len(cuts) > 3, "no vote has moved the cut: this test says little"
    starts = [step for _, step, _ in straight["cut_history"]]
    assert starts == sorted(starts) and straight["steps"] == sum(stage["steps"] for stage in straight["stages"])
    same_run(runs, runs("again"), "again", straight)
    cached = runs("cached", cache="on")
    same_run(runs, cached, "cached", straight)
    assert cached["cache"]["rows_written"] > 0 and cached["cache"]["exact"]
    for name in stops:
        stopped(runs, name, STOPS[name])
        same_run(runs, runs(name, resume=True), name, straight)
    same_run(runs, runs("again", resume=True), "again", straight)


def check_stops(runs: Runs) -> None:
    some = ("between-votes", "passes-of-the-last") if runs.world.size == 3 else ("features-of-the-first", "first-step")
    compare_stopped(runs, some)


def check_every_stop(runs: Runs) -> None:
    compare_stopped(runs, STOPS)


def check_parts(runs: Runs) -> None:
    """Make runs that leave out what a run of stages can, and ones whose tuning is spoilt."""
    parts = {"no-votes": "votes", "no-last-solve": "last-solve,votes", "only-tuned": "last-solve,guard"}
    without = {name: runs(name, auto_without=left_out) for name, left_out in parts.items()}
    solved = runs("solved", epochs=1)
    with few_views():
        some, same = (runs(name, epochs=1, centres=20, cache=cache) for name, cache in CENTRES.items())
    with spoiling():
        spoilt, unguarded = runs("spoilt"), runs("unguarded", auto_without="guard")
    if runs.world.rank == 0:
        heads = {"solved": "kernel:2", "no-votes": "kernel:2", "no-last-solve": "kernel:2", "centres": "kernel:2"}
        heads["only-tuned"] = "last"
        for name, head in heads.items():
            assert hvfreeze.load_model(runs.root / name).card.head == head, name
        assert "each compared with 20 of them" in (runs.root / "centres" / "log.txt").read_text()
        kept, first = (torch.load(runs.root / name / "model.pt", weights_only=True) for name in ("spoilt", "solved"))
        assert kept.keys() == first.keys()
        assert [key for key in kept if not torch.equal(kept[key], first[key])] == []
    assert some["parameter_digest"] == same["parameter_digest"], "cached rows give another head"
    assert some["head"]["compared_with"] == 20 < some["head"]["rows"] == solved["head"]["rows"]
    assert [stage["stage"] for stage in solved["stages"]] == ["solve"], "one epoch has room for one solution"
    assert [stage.get("kept") for stage in spoilt["stages"]] == [True, False, False, None]
    for key in ("test_accuracy", "head", "parameter_digest"):
        assert spoilt[key] == solved[key], f"what tuning spoilt was not taken back: {key}"
    assert unguarded["parameter_digest"] != solved["parameter_digest"], "there was nothing to take back"
    assert all("kept" not in stage for stage in unguarded["stages"])
    assert [cut for _, _, cut in without["no-votes"]["cut_history"]] == [5, 0, 5]
    assert [stage["stage"] for stage in without["only-tuned"]["stages"]] == ["solve", "tune"]
    back = without["no-last-solve"]
    assert [stage.get("kept") for stage in back["stages"]] == [True, False, None], "a few steps have made a better head"
    assert back["parameter_digest"] == solved["parameter_digest"], "the solution before tuning was not gone back to"
    assert [cut for _, _, cut in back["cut_history"]] == [5, 0, 5]


@contextmanager
def paying(*, least: float, much: float | None = None) -> Iterator[None]:
    """Let a trial pay where it lowers the loss by the part `least`: -inf is always, 1 never; at once likewise."""
    before = trial.LEAST_GAIN, trial.CHANCE, auto.LEAST_GAIN, trial.MUCH_GAIN
    trial.LEAST_GAIN = trial.CHANCE = auto.LEAST_GAIN = least
    trial.MUCH_GAIN = least if much is None else much
    try:
        yield
    finally:
        trial.LEAST_GAIN, trial.CHANCE, auto.LEAST_GAIN, trial.MUCH_GAIN = before


@contextmanager
def diverging() -> Iterator[None]:
    """Let the second tuning meet numbers that are not finite."""
    turn = StageRunner.turn

    def turned(self: StageRunner) -> None:
        spoils = self.number == 2
        turn(self)
        if spoils:
            with torch.no_grad():
                for parameter in self.opened.chain.model.parameters():
                    parameter.fill_(math.nan)

    with patch.object(StageRunner, "turn", turned):
        yield


def mending(most: float) -> Any:
    """Let a solution mend all but one in `most` mistakes of a tuned layer, at best."""
    return patch.object(auto, "MENDED", most)


@contextmanager
def planning(**numbers: Any) -> Iterator[None]:
    """Let plans be made by other numbers."""
    before = {name: getattr(auto_plan, name) for name in numbers}
    for name, number in numbers.items():
        setattr(auto_plan, name, number)
    try:
        yield
    finally:
        for name, number in before.items():
            setattr(auto_plan, name, number)


def weights_of(runs: Runs) -> str:
    """Write weights of another task, and return where. Collective."""
    path = runs.root / "weights.pt"
    if runs.world.rank == 0:
        torch.manual_seed(0)
        torch.save(build_model(MODEL, num_classes=7, image_size=8).model.state_dict(), path)
    runs.world.barrier(name="weights")
    return str(path)


@contextmanager
def own_layer_is_best() -> Iterator[None]:
    """Let no solved head be as good as the last layer of a tuned model."""
    before, auto.score_of = auto.score_of, lambda *args, **rest: Score(0.0, 1.0)  # type: ignore[assignment]
    try:
        yield
    finally:
        auto.score_of = before


def check_own_layer(runs: Runs) -> None:
    """Make runs that end with the tuned model's own last layer, with and without a solution before it."""
    ends = {"own": {}, "own-early": {"weights": weights_of(runs), "epochs": 12, "optimizer": "auto", "lr": 3e-4}}
    for name, given in ends.items():
        with own_layer_is_best(), paying(least=-math.inf):
            straight = runs(name, **given)
            number = next(n for n, stage in enumerate(straight["stages"]) if stage["stage"] == "tune")
            stopped(runs, f"{name}-stopped", counted(1, "features", stage=number + 1), **given)
            resumed = runs(f"{name}-stopped", resume=True, **given)
            again = runs(name, resume=True, **given)
        kept = [stage["stage"] for stage in straight["stages"] if stage.get("kept")]
        assert "tune" in kept and straight["head"] is None, straight["stages"]
        assert straight["cut_history"][-1][2] == 0, "the model's own blocks, none of which is frozen"
        for key in ("parameter_digest", "test_accuracy", "stages", "cut_history", "steps"):
            assert straight[key] == resumed[key] == again[key], f"{name}: {key}"
        if runs.world.rank == 0:
            loaded = hvfreeze.load_model(runs.root / name)
            assert loaded.card.head == "last"


def names_of(run: dict[str, Any]) -> list[str]:
    return [stage["stage"] for stage in run["stages"] if stage["steps"]]


def see_blocks_as_before(runs: Runs, run: dict[str, Any], name: str, solved: dict[str, Any]) -> None:
    """Compare what tuning was tried on, in vain, with what nothing was tried on."""
    for key in ("test_accuracy", "head"):
        assert run[key] == solved[key], f"the blocks are not as they were: {key}"
    if runs.world.rank == 0:
        kept, first = (torch.load(runs.root / each / "model.pt", weights_only=True) for each in (name, "solved"))
        other = {key for key in kept if not torch.equal(kept[key], first[key])}
        assert other <= {"body.fc.weight", "body.fc.bias"}, "beside the layer that the solved head takes the place of"


def check_trials(runs: Runs) -> None:
    """Make runs that try tuning before a head is solved: in vain, with numbers that are not finite, and not in vain."""
    given = {"weights": weights_of(runs), "epochs": 36, "optimizer": "auto", "lr": 3e-4}
    solved = runs("solved", **given | {"epochs": 1})
    with paying(least=1.0):
        tried = runs("tried", **given)
        few = runs("few", **given | {"epochs": 12})
    with planning(SGD_RATE=1e30):
        diverged = runs("diverged", **given)
    for name, run in {"tried": tried, "few": few, "diverged": diverged}.items():
        assert names_of(run) == ["try", "solve"], run["stages"]
        assert run["trial"]["way"] == f"sgd at {'1e+30' if name == 'diverged' else '0.05'}", run["trial"]
        see_blocks_as_before(runs, run, name, solved)
    assert tried["trial"]["before"] > 0 and tried["trial"]["after"] > 0 and diverged["trial"]["after"] is None
    cuts = [cut for _, _, cut in tried["cut_history"]]
    assert cuts[0] == 0 and cuts[-1] == 5
    with paying(least=-math.inf), planning(LEAST_ROUND=1), mending(math.inf):
        straight = runs("straight", **given)
        assert names_of(straight) == ["try", "tune", "solve", "tune", "solve"], straight["stages"]
        assert straight["parameter_digest"] != solved["parameter_digest"]
        pairs = runs("pairs", **given, accumulate=2)
        for run in (straight, pairs):
            assert run["steps"] == sum(stage["steps"] for stage in run["stages"]), "other steps than were planned"
        asks = {
            "trying": counted(2, "step", stage=0),
            "tuning": counted(1, "step", stage=2),
            "solving": counted(0, "pass", stage=3),
            "again": counted(0, "step", stage=4),
        }
        for name, ask in asks.items():
            stopped(runs, name, ask, **given)
            same_run(runs, runs(name, resume=True, **given), name, straight)
    again = runs("tried", resume=True, **given)
    assert [again[key] for key in ("stages", "parameter_digest")] == [
        tried[key] for key in ("stages", "parameter_digest")
    ]


def check_tuning_on(runs: Runs) -> None:
    """Make runs whose first tuning leaves too much for a solved head to mend."""
    given = {"weights": weights_of(runs), "epochs": 36, "optimizer": "auto", "lr": 3e-4}
    with paying(least=-math.inf), planning(LEAST_ROUND=1):
        with mending(0):
            straight = runs("straight", **given)
            assert names_of(straight) == ["try", "tune", "tune", "solve"], straight["stages"]
            for name, ask in {"again": counted(0, "step", stage=4), "last": counted(0, "pass", stage=5)}.items():
                stopped(runs, name, ask, **given)
                same_run(runs, runs(name, resume=True, **given), name, straight)
            with diverging():
                lost = runs("lost", **given)
        with mending(math.inf), patch.object(auto, "goes_on", lambda *_: False):
            ended = runs("ended", **given)
    assert names_of(lost) == names_of(straight) and names_of(ended) == ["try", "tune", "solve"]
    assert lost["parameter_digest"] == ended["parameter_digest"], "not the blocks of the first tuning"
    assert lost["head"] == ended["head"] and lost["parameter_digest"] != straight["parameter_digest"]


def check_small_gains(runs: Runs) -> None:
    """Make runs whose trial gains too little to go without a head for the blocks as they were."""
    given = {"weights": weights_of(runs), "epochs": 36, "optimizer": "auto", "lr": 3e-4}
    solved = runs("solved", **given | {"epochs": 1})
    with paying(least=-math.inf, much=1.0):
        straight = runs("straight", **given)
        few = runs("few", **given | {"epochs": 8})
        assert names_of(straight) == ["try", "solve", "tune", "solve"], straight["stages"]
        assert straight["stages"][1]["held_out_loss"] == solved["stages"][0]["held_out_loss"], "other blocks"
        asks = {
            "trying": counted(2, "step", stage=0),
            "solving": counted(0, "pass", stage=1),
            "tuning": counted(0, "step", stage=2),
        }
        for name, ask in asks.items():
            stopped(runs, name, ask, **given)
            same_run(runs, runs(name, resume=True, **given), name, straight)
    assert names_of(few) == ["try", "solve"], "no room for both"


def check_whole_tunings(runs: Runs) -> None:
    """Make runs with many samples, whose first tuning is judged before any head is solved."""
    given = {"weights": weights_of(runs), "epochs": 12, "optimizer": "auto", "lr": 3e-4}
    solved = runs("solved", **given | {"epochs": 1})
    with planning(MANY=1):
        with paying(least=1.0):
            in_vain = runs("in-vain", **given)
        with planning(SGD_RATE=1e30):
            not_finite = runs("not-finite", **given)
        with paying(least=-math.inf):
            straight = runs("straight", **given)
            for name, ask in {"tuning": counted(2, "step", stage=0), "solving": counted(0, "pass", stage=1)}.items():
                stopped(runs, name, ask, **given)
                same_run(runs, runs(name, resume=True, **given), name, straight)
            with planning(LEAST_ROUND=1), mending(math.inf):
                longer = runs("longer", **given | {"epochs": 36})
        with paying(least=1.0), planning(LEAST_ROUND=1):
            stays = runs("stays", **given | {"epochs": 36})
    # Nothing is tried where a part is left out, and what was solved first is there to go back to.
    diverged = runs("diverged", **given | {"optimizer": "sgd", "lr": 1e30, "auto_without": "last-solve"})
    assert diverged["steps"] > solved["steps"] and diverged["cut_history"][-1][2] == 5
    for key in ("test_accuracy", "head", "parameter_digest"):
        assert diverged[key] == solved[key], f"the solution was not gone back to: {key}"
    for name, stages in {"not-finite": 2, "diverged": 2}.items():
        assert len(lines(runs.root / name, "metrics")) == stages, "epochs after the one with such numbers"
    for name, run in {"in-vain": in_vain, "not-finite": not_finite, "stays": stays}.items():
        assert names_of(run) == ["tune", "solve"], run["stages"]
        assert "kept" not in run["stages"][0], "what was taken back has no layer of its own to be judged by"
        assert run["head"] == solved["head"], "only held-out samples have chosen, as for blocks that saw the others"
        see_blocks_as_before(runs, run, name, solved)
    assert stays["steps"] < in_vain["steps"] + solved["steps"], "the first of two tunings is judged"
    assert straight["trial"]["samples"] and straight["parameter_digest"] != solved["parameter_digest"]
    assert names_of(longer) == ["tune", "solve", "tune", "solve"], longer["stages"]


def check_budgets(runs: Runs) -> None:
    """Make runs that are given a time, by a clock that passes by itself."""
    with clocked(runs.world):
        timed = runs("timed", time_budget="4s")
    with clocked(runs.world):
        stopped(runs, "timed-stopped", counted(4, "step", stage=1), time_budget="4s")
    with clocked(runs.world):
        resumed = runs("timed-stopped", resume=True, time_budget="4s")
    with clocked(runs.world):
        trained = runs("timed-plain", time_budget="4s", freeze="linear", head="last", head_fit="sgd")
    for name, run in {"timed": timed, "resumed": resumed, "trained": trained}.items():
        assert 3.0 < run["time_budget"]["spent"] < 4.2, f"{name}: {run['time_budget']}"
    assert [stage["stage"] for stage in timed["stages"]] == ["solve", "tune", "solve", "back"]
    assert timed["stages"][1]["steps"] != timed["time_budget"]["planned"][1]["steps"], "clocks have changed nothing"
    assert resumed["time_budget"]["planned"] == timed["time_budget"]["planned"], "a resumed run has its own plan"
    assert trained["steps"] != trained["time_budget"]["planned"][0]["steps"]
    assert trained["cut_history"][-1][2] > 0


def setting(world: World, root: Path) -> Runs:
    let_models_be_small()
    # A criterion that wants one block more as soon as it has seen gradients twice: short runs show no other.
    CRITERIA["coherence"] = Criterion(lambda seen: min(seen.cut + (seen.gains is not None), 4), watches="gains")
    # Two batches to a chunk, so that a rank has several.
    rows.CHUNK_ROWS = 2 * BATCH
    settings = {**SETTINGS, "train_samples": 40 * world.size * 5 // 4}
    return Runs(world, root, settings, started=0.0)
