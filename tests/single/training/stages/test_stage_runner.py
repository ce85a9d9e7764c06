from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from logging import getLogger
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hvfreeze.config.tree import from_dict
from hvfreeze.training.auto import end_trial
from hvfreeze.training.auto_plan import Costs, stages_of
from hvfreeze.training.stages import TRY, StageRunner, joined
from hvfreeze.training.trial import Trial

COSTS = Costs(views=2, frozen=0.0, judging=1.5, haste=0.75, plain=Costs(views=1, frozen=0.0, judging=1.5, haste=0.75))
CACHE = {"mode": "auto", "exact": True, "bytes": 1, "rows_written": 2, "seconds_saved": 0.5}


def stage_runner() -> StageRunner:
    made = cast(StageRunner, StageRunner.__new__(StageRunner))
    made.mirror, made.ends_tuned = None, False
    made.stages, made.number, made._earlier = (
        stages_of(
            from_dict({"freeze": "auto"}), batches_per_epoch=20, guarded_batches=18, cut=2, deepest=5, costs=COSTS
        ),
        0,
        {},
    )
    made.asked = (20, 18, 20, 0)
    return made


def test_what_a_runner_keeps_is_what_it_knows() -> None:
    made = stage_runner()
    assert made.knows(made.state_dict())
    assert made.knows({"number": 0, "steps": [20], "earlier": {}}), "a run may go on with more stages than it had"


def test_a_run_goes_on_in_stages_that_are_those_it_began_with_alone() -> None:
    made, state = stage_runner(), stage_runner().state_dict()
    assert state["names"] == ["solve", "tune", "solve", "back"] and made.fits(state, keeps_plan=False)
    assert made.fits(state | {"names": ["solve", "try", "tune"]}, keeps_plan=False), "those to come are planned anew"
    assert not made.fits(state | {"names": ["solve", "try", "tune"]}, keeps_plan=True)
    assert not made.fits(state | {"names": ["try", "tune", "solve"]}, keeps_plan=False)
    del state["names"]
    assert made.fits(state, keeps_plan=False)
    first = replace(made.stages[1], name=TRY)
    made.stages = (first, *made.stages)
    assert not made.fits(state, keeps_plan=False), "a run that began with a solution"


@pytest.mark.parametrize("keeps_plan", [False, True])
def test_a_run_of_a_source_with_other_stages_does_not_go_on_in_them(keeps_plan: bool) -> None:
    """Such a checkpoint is as good as any other, and may be of more stages."""
    tried, plain = tried_runner(), stage_runner()
    before = {"number": 1, "steps": [20, 18, 20], "earlier": {}}
    assert tried.knows(before) and not tried.fits(before, keeps_plan=keeps_plan), "it tuned where a trial comes"
    assert plain.fits(before, keeps_plan=keeps_plan)
    more = tried.state_dict() | {"number": 4}
    assert plain.knows(more) and not plain.fits(more, keeps_plan=keeps_plan)
    assert not plain.fits(more | {"names": None}, keeps_plan=keeps_plan)
    assert tried.fits(more, keeps_plan=keeps_plan) and not tried.fits(more | {"names": None}, keeps_plan=keeps_plan)


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"number": 3, "steps": [20, 18, 20], "earlier": {}},
        {"number": True, "steps": [20, 18, 20], "earlier": {}},
        {"number": 0, "steps": [20, "18", 20], "earlier": {}},
        {"number": 0, "steps": [20, -18, 20], "earlier": {}},
        {"number": 0, "steps": [20, 18, 20], "earlier": None},
        {"number": 0, "steps": [20, 18, 20], "earlier": {}, "mirror": "never"},
    ],
)
def test_junk_is_not_known(junk: Any) -> None:
    assert not stage_runner().knows(junk)


def tried_runner(**settings: Any) -> StageRunner:
    made = stage_runner()
    config = from_dict({"freeze": "auto", "weights": "some.pt", **settings})
    made.stages = stages_of(config, batches_per_epoch=20, guarded_batches=18, cut=0, deepest=5, costs=COSTS)
    return made


@pytest.mark.parametrize("epochs", [4, 12])
def test_the_last_tuning_takes_the_time_of_the_solution_that_is_left_out(epochs: int) -> None:
    made = tried_runner(epochs=epochs)
    made.opened = cast(Any, SimpleNamespace(length=SimpleNamespace(epochs=0)))
    assert [stage.name for stage in made.stages] == ["try", "solve", "tune", "solve", "back"]
    assert made.stages[1].is_spare == (epochs == 4)
    before = [stage.steps for stage in made.stages]
    made.tune_at_once()
    spared = int(COSTS.solution / COSTS.tuning_step(32) * made.stages[2].steps_per_epoch)
    assert spared > 0, "a solution takes no time: this says nothing"
    assert [stage.steps for stage in made.stages] == [
        before[0],
        0,
        before[2] + (0 if epochs == 4 else spared),
        before[3],
        0,
    ]
    tuned = made.stages[2]
    assert tuned.config.optimizer.epochs == tuned.epochs


@pytest.mark.parametrize(
    ("epochs", "loss", "left"),
    [(3, 0.6, "tune"), (3, 0.4, "tune solve"), (16, 0.6, "tune solve tune solve")],
    ids=["much is left to learn", "little is left", "there is time for much"],
)
def test_a_short_tuning_with_much_left_to_learn_takes_the_time_of_the_solution_behind_it(
    epochs: int, loss: float, left: str
) -> None:
    made = tried_runner(epochs=epochs)
    made.mirror = "on"
    _, spare, tune, last, *_ = made.stages
    assert spare.solves and last.solves
    trial_ends(made, loss, trial=Trial(before=1.0, samples=60, guess=2.0), best=None, before_trial={})
    assert [stage.name for stage in made.stages[1:] if stage.steps] == left.split()
    longer = made.stages[2]
    assert longer.config.optimizer.epochs == longer.epochs
    if left == "tune":
        assert longer.steps == tune.steps + int(last.worth * tune.steps_per_epoch) > tune.steps


def trial_ends(made: StageRunner, loss: float, **guard: Any) -> None:
    """Let heads have this loss after the trial under way."""
    chain = SimpleNamespace(model=torch.nn.Linear(1, 1))
    made.opened = cast(Any, SimpleNamespace(length=SimpleNamespace(epochs=0), chain=chain))
    job = SimpleNamespace(
        guard=SimpleNamespace(**{"before_trial": None, **guard}),
        stage_runner=made,
        judge=SimpleNamespace(loss=lambda chain: loss),
        clock=SimpleNamespace(within=lambda phase: nullcontext()),
        config=from_dict({"freeze": "auto", "optimizer": "adamw"}),
        stage=made.stage,
        best_accuracy=0.0,
        logger=getLogger(__name__),
    )
    taken_back = end_trial(cast(Any, job))
    assert taken_back == (made.mirror is None), "a solution finds out itself"


@pytest.mark.parametrize(
    ("epochs", "loss", "left"),
    [
        (3, 0.99, "solve"),
        (3, 0.9, "solve"),
        (3, 0.5, "tune solve"),
        (16, 0.99, "solve"),
        (12, 0.87, "solve tune solve"),
        (12, 0.5, "tune solve"),
        (16, 0.87, "solve tune solve tune solve"),
        (16, 0.5, "tune solve tune solve"),
        (16, math.inf, "solve"),
    ],
)
def test_after_a_trial_blocks_are_tuned_or_a_head_is_solved_for_them_as_they_were(
    epochs: int, loss: float, left: str
) -> None:
    state = {"weight": torch.full((1, 1), 7.0), "bias": torch.full((1,), 8.0)}
    made = tried_runner(epochs=epochs)
    made.mirror = "on"
    trial_ends(made, loss, trial=Trial(before=1.0, samples=60), best=None, before_trial=state)
    assert [stage.name for stage in made.stages[1:] if stage.steps] == left.split()
    solves = next(stage for stage in made.stages if stage.solves and stage.steps)
    tuned = left.startswith("tune")
    mirror = "off" if tuned and epochs == 3 else "auto"
    assert solves.config.data.mirror == mirror, "mirror images where there is time for them"
    weight = made.opened.chain.model.state_dict()["weight"]
    assert torch.equal(weight, state["weight"]) == (not tuned)


def test_reports_of_stages_add_up() -> None:
    def part(**changes: Any) -> dict[str, Any]:
        common = {"allreduce_bytes": 3, "other_collective_bytes": 4, "cut_history": [(0, 0, 5)], "cache": CACHE}
        return {**common, **changes}

    assert joined({}, part()) == part()
    both = joined(part(head={"loss": 1.0}), part(cache={**CACHE, "mode": "off", "exact": False}))
    assert both["allreduce_bytes"] == 6 and both["other_collective_bytes"] == 8
    assert both["cut_history"] == [(0, 0, 5), (0, 0, 5)] and both["head"] == {"loss": 1.0}
    assert both["cache"] == {"mode": "auto", "exact": False, "bytes": 2, "rows_written": 4, "seconds_saved": 1.0}
