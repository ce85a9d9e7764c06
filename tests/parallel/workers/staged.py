"""Every rank makes runs with --freeze auto: equal, cached, stopped in every verb, failed, and with a time budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import hvfreeze
from hvfreeze.comm.world import World
from hvfreeze.errors import Preempted
from hvfreeze.freezing.criteria import CRITERIA, Criterion
from hvfreeze.heads import rows
from hvfreeze.heads.probe import Probe
from hvfreeze.heads.solution import Stop
from hvfreeze.model.model_sources import build_model
from hvfreeze.strategies.fitted_head import FittedHead
from hvfreeze.training import auto, budget, loop, verbs
from hvfreeze.training.evaluation import Score
from hvfreeze.training.job import Job
from tests.parallel.workers.checking import let_models_be_small
from tests.parallel.workers.runs import Runs

MODEL = "shufflenet_v2_x0_5"
BATCH = 8
SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "validation_fraction": 0.2,
    "batch_size": BATCH,
    "augment": "views:2",
    "freeze": "auto",
    "epochs": 16,
    "interval": 2,
    "freeze_warmup": 2,
    "pool": 2,
    "checkpoint_every": "5steps",
}
FEW = {"FIRST_ROUND_EPOCHS": (0.5, 0.5), "FIRST_ROUND_STEPS": 1, "GOOD_ENOUGH": -1}
"""Short rounds, of which none is good enough to be the last."""
Ask = Callable[[Job, str], bool]
"""(job, what comes next: features, pass, step) -> whether the last rank asks to leave."""


@contextmanager
def asking(world: World, ask: Ask) -> Iterator[None]:
    """Ask on the last rank to leave, when `ask` says so, at every point where that can be heeded."""
    fit, make_step, fit_head = FittedHead.fit, loop.train_step, verbs.fit_opened_head
    jobs: list[Job] = []
    is_last = world.rank == world.size - 1

    def fitting(self: FittedHead, *args: Any, stop: Stop, **rest: Any) -> Any:
        def stopping(count: int, note: str = "") -> bool:
            wants = stop(count, note)
            return wants or (is_last and ask(jobs[-1], "pass" if count == 0 else "features"))

        return fit(self, *args, stop=stopping, **rest)

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = job.asked_to_leave or (is_last and ask(job, "step"))
        return make_step(job, batches)

    def noted(job: Job, **rest: Any) -> Any:
        jobs.append(job)
        return fit_head(job, **rest)

    with (
        patch.object(FittedHead, "fit", fitting),
        patch.object(loop, "train_step", step),
        patch.object(verbs, "fit_opened_head", noted),
    ):
        yield


def stopped(runs: Runs, name: str, ask: Ask, **changes: Any) -> None:
    with asking(runs.world, ask):
        try:
            runs(name, **changes)
        except Preempted:
            return
    raise AssertionError(f"{name} was not stopped")


def counted(number: int, what: str, *, after: int) -> Ask:
    """Ask at the `number`-th point of a kind once so many verbs have ended."""
    left = [number]

    def ask(job: Job, kind: str) -> bool:
        left[0] -= kind == what and len(job.journal.ended) >= after
        return left[0] < 0

    return ask


@contextmanager
def deciding(*losses: float, **numbers: Any) -> Iterator[None]:
    """Let probes find these losses, one after the other, the last again and again; and decide by other numbers."""
    found = iter([*losses, *itertools.repeat(losses[-1] if losses else 1.0, 99)])
    before = Probe.loss

    def loss(self: Probe, chain: Any, **rest: Any) -> float:
        real = before(self, chain, **rest)
        return next(found) if losses and math.isfinite(real) else real

    with ExitStack() as patched:
        patched.enter_context(patch.object(Probe, "loss", loss))
        for name, number in numbers.items():
            patched.enter_context(patch.object(auto, name, number))
        yield


@contextmanager
def clocked(world: World) -> Iterator[None]:
    """Let time pass by a twentieth of a second whenever the clock is read, on other ranks faster than on rank 0."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 0.05 * (world.rank + 1))
    with (
        patch.object(budget, "time", clock),
        patch.object(loop, "time", clock),
        patch.object(budget, "min_seconds", lambda *_, **__: 0.02),
    ):
        yield


def weights_of(runs: Runs) -> str:
    """Write weights of another task, and return where. Collective."""
    path = runs.root / "weights.pt"
    if runs.world.rank == 0:
        torch.manual_seed(0)
        torch.save(build_model(MODEL, num_classes=7, image_size=8).model.state_dict(), path)
    runs.world.barrier(name="weights")
    return str(path)


def verbs_of(run: dict[str, Any]) -> list[str]:
    return [entry["verb"] for entry in run["verbs"] if entry["verb"] in ("tune", "solve")]


def tunings_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry["value"] for entry in run["verbs"] if entry["verb"] == "tune"]


def same_run(runs: Runs, found: dict[str, Any], name: str, straight: dict[str, Any], of: str = "straight") -> None:
    assert found["parameter_digest"] == straight["parameter_digest"], f"{name}: another model"
    for key in ("test_accuracy", "verbs", "cut_history", "steps", "epochs", "final_cut"):
        assert found[key] == straight[key], f"{name}: {key}: {found[key]}, not {straight[key]}"
    if straight["head"] is not None:
        assert {**found["head"], "exchanged_bytes": 0} == {**straight["head"], "exchanged_bytes": 0}, name
    if runs.world.rank == 0:
        mine, theirs = runs.numbers(name), runs.numbers(of)
        assert [{**line, "allreduce_bytes": 0} for line in mine] == [{**line, "allreduce_bytes": 0} for line in theirs]


def see_pretrained_blocks(runs: Runs, name: str, solved: dict[str, Any], run: dict[str, Any]) -> None:
    """Compare a run that went back to the pretrained blocks with one that never left them."""
    for key in ("test_accuracy", "head"):
        assert run[key] == solved[key], f"{name}: the blocks are not as they were: {key}"
    if runs.world.rank == 0:
        kept, first = (torch.load(runs.root / each / "model.pt", weights_only=True) for each in (name, "solved"))
        assert [key for key in kept if not torch.equal(kept[key], first[key])] == []


def check_rounds(runs: Runs) -> None:
    """Make a run, the same from a cache, and one that is stopped and resumed in each of its verbs."""
    given, losses = {"weights": weights_of(runs)}, (1.0, 0.5, 0.2, 0.2)
    with deciding(*losses, **FEW):
        straight = runs("straight", **given)
    assert verbs_of(straight) == ["tune", "tune", "tune", "solve"], straight["verbs"]
    steps = [tuned["steps"] for tuned in tunings_of(straight)]
    assert sum(steps) == straight["steps"] and steps[1] < steps[2]
    cuts = [cut for _, _, cut in straight["cut_history"]]
    assert cuts[0] == 0 and max(cuts) > 0, "no vote has moved the cut: this test says little"
    with deciding(*losses, **FEW):
        cached = runs("cached", cache="on", **given)
    same_run(runs, cached, "cached", straight)
    assert cached["cache"]["rows_written"] > 0 and cached["cache"]["exact"]
    asks = (
        # In the trial, and at its end; probes that are recalled are not made again.
        (counted(1, "step", after=2), 0),
        (counted(steps[0] - 3, "step", after=2), 1),
        # In the first round, and in the second.
        (counted(0, "step", after=4), 1),
        (counted(3, "step", after=8), 2),
        # Between features, and in the fit.
        (counted(0, "features", after=11), 3),
        (counted(0, "pass", after=11), 3),
    )
    for number, (ask, recalled) in enumerate(asks):
        with deciding(*losses[recalled:], **FEW):
            stopped(runs, "stopped", ask, resume=number > 0, **given)
    with deciding(*losses[3:], **FEW):
        same_run(runs, runs("stopped", resume=True, **given), "stopped", straight)


def check_trials(runs: Runs) -> None:
    """Make runs whose trial does not pay, or meets NaN."""
    given = {"weights": weights_of(runs)}
    solved = runs("solved", **given, epochs=1)
    assert verbs_of(solved) == ["solve"], "one epoch has room for a head alone"
    with deciding(1.0, 1.0):
        found = {"tried": runs("tried", **given)}
    with deciding(1.0, SGD_RATE=1e30):
        found["diverged"] = runs("diverged", **given)
    for name, run in found.items():
        assert verbs_of(run) == ["tune", "solve"], f"{name}: {run['verbs']}"
        assert tunings_of(run)[0]["is_finite"] == ("diverged" not in name), run["verbs"]
        see_pretrained_blocks(runs, name, solved, run)


def check_ends(runs: Runs) -> None:
    """Make runs that end with the network's own last layer: the last round, or the head, does not help."""
    given = {"weights": weights_of(runs)}
    scores = iter([Score(0.5, 0.8), Score(0.6, 0.7)])
    with deciding(1.0, 0.5, 0.2, 0.2, **FEW), patch.object(verbs, "score_held_out", lambda *_: next(scores)):
        reverted = runs("reverted", **given, auto_without="last-solve")
    with deciding(1.0, 0.5, 0.5, **FEW), patch.object(verbs, "score_held_out", lambda *_: Score(0.0, 1.0)):
        own = runs("own", **given)
        again = runs("own", resume=True, **given)
    assert verbs_of(reverted) == ["tune", "tune", "tune"] and verbs_of(own) == ["tune", "tune", "solve"]
    assert reverted["parameter_digest"] == own["parameter_digest"], "not the network of the first round"
    assert again["parameter_digest"] == own["parameter_digest"]
    assert reverted["head"] is None and own["head"] is None and reverted["final_cut"] == 0
    if runs.world.rank == 0:
        for name in ("own", "reverted"):
            assert hvfreeze.load_model(runs.root / name).card.head == "last", name


def check_parts(runs: Runs) -> None:
    """Make runs that leave out what auto can, and ones without pretrained weights."""
    random = runs("random", epochs=4)
    assert verbs_of(random) == ["tune", "solve"], "nothing is tried on random weights"
    unguarded = runs("unguarded", epochs=4, auto_without="guard,votes", interval=None, freeze_warmup=None)
    assert verbs_of(unguarded) == ["tune", "solve"] and all(e["verb"] != "held_out" for e in unguarded["verbs"])
    assert {cut for _, _, cut in unguarded["cut_history"][:-1]} == {0}


def check_budgets(runs: Runs) -> None:
    """Make runs with a time budget, one of them stopped and resumed, by a simulated clock."""
    given = {"weights": weights_of(runs), "time_budget": "8s", "epochs": None}
    with clocked(runs.world), deciding(1.0, 0.5, 0.1):
        stopped(runs, "resumed", counted(4, "step", after=4), **given)
    with clocked(runs.world), deciding(0.1):
        made = {"resumed": runs("resumed", resume=True, **given)}
    with clocked(runs.world):
        plain = {"freeze": "linear", "head": "last", "head_fit": "sgd", "time_budget": "4s", "lr": 0.01}
        made["plain"] = runs("plain", **plain, epochs=None, pool=None)
    for name, run in made.items():
        part = run["time_budget"]["spent"] / run["time_budget"]["seconds"]
        # What does not pay is not done, however much time is left.
        assert (0.7 if name == "plain" else 0.1) < part < 1.1, f"{name}: {run['time_budget']}"
    assert verbs_of(made["resumed"])[:2] == ["tune", "tune"]
    assert made["plain"]["cut_history"][-1][2] > 0


def setting(world: World, root: Path) -> Runs:
    let_models_be_small()
    # A criterion that wants one block more as soon as it has seen gradients twice: short runs show no other.
    CRITERIA["coherence"] = Criterion(lambda seen: min(seen.cut + (seen.gains is not None), 4), watches="gains")
    # Two batches to a chunk, so that a rank has several.
    rows.CHUNK_ROWS, auto.TRIAL_STEPS = 2 * BATCH, 4
    settings = {**SETTINGS, "train_samples": 40 * world.size * 5 // 4}
    return Runs(world, root, settings, started=0.0)
