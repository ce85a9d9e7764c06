from __future__ import annotations

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
from hvfreeze.training.evaluation import Score
from hvfreeze.training.stages import TRY, StageRunner, joined
from hvfreeze.training.trial import Trial

COSTS = Costs(views=2, frozen=0.0, judging=1.5, plain=Costs(views=1, frozen=0.0, judging=1.5))
CACHE = {"mode": "auto", "exact": True, "bytes": 1, "rows_written": 2, "seconds_saved": 0.5}


def stage_runner() -> StageRunner:
    made = cast(StageRunner, StageRunner.__new__(StageRunner))
    made.mirror, made.other_way, made.ends_tuned = None, False, False
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
    assert tried.fits(more, keeps_plan=keeps_plan) and tried.fits(more | {"names": None}, keeps_plan=keeps_plan)


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
        {"number": 0, "steps": [20, 18, 20], "earlier": {}, "other_way": "sgd"},
    ],
)
def test_junk_is_not_known(junk: Any) -> None:
    assert not stage_runner().knows(junk)


def tried_runner(**settings: Any) -> StageRunner:
    made = stage_runner()
    config = from_dict({"freeze": "auto", "weights": "some.pt", **settings})
    made.stages = stages_of(config, batches_per_epoch=20, guarded_batches=18, cut=0, deepest=5, costs=COSTS)
    return made


def test_stages_to_come_tune_in_the_way_that_was_found_and_a_resumed_run_does_too() -> None:
    made = tried_runner()
    made.number = 2
    before = made.stages
    made.take_other_way()
    assert made.stages[:3] == before[:3] and [s.epochs for s in made.stages] == [s.epochs for s in before]
    tuned = [stage for stage in made.stages if stage.name == "tune"]
    assert len(tuned) > 1 and {(stage.config.optimizer.optimizer, stage.other) for stage in tuned} == {("sgd", None)}
    again = tried_runner()
    again.number, again.opened = 2, cast(Any, SimpleNamespace(length=SimpleNamespace(epochs=0)))
    again.asked = tuple(made.asked)
    again.load_state_dict(made.state_dict(), keeps_plan=True)
    assert again.stages == made.stages


def test_one_tuning_takes_the_steps_of_all_that_are_left_and_one_solution_follows() -> None:
    made = tried_runner()
    made.opened = cast(Any, SimpleNamespace(length=SimpleNamespace(epochs=0)))
    names = [stage.name for stage in made.stages]
    assert names == ["solve", "try", "try", "tune", "solve", "tune", "solve", "tune", "solve", "back"]
    made.number, before = 4, [stage.steps for stage in made.stages]
    made.tune_at_once()
    spared = int(COSTS.solution / COSTS.tuning_step(32) * 18)
    assert spared > 0, "a solution takes no time: this says nothing"
    merged = before[5] + before[7] + spared
    assert [stage.steps for stage in made.stages] == [*before[:5], merged, before[6], 0, 0, 0]
    tuned = made.stages[5]
    assert tuned.config.optimizer.epochs == tuned.epochs


def trial_ends(made: StageRunner, loss: float, **guard: Any) -> None:
    """Let heads have this loss after the trial under way."""
    chain = SimpleNamespace(model=torch.nn.Linear(1, 1))
    made.opened = cast(Any, SimpleNamespace(length=SimpleNamespace(epochs=0), chain=chain))
    job = SimpleNamespace(
        guard=SimpleNamespace(**{"before_trial": None, "after_first": None, **guard}),
        stage_runner=made,
        judge=SimpleNamespace(loss=lambda chain: loss),
        clock=SimpleNamespace(within=lambda phase: nullcontext()),
        best_accuracy=0.0,
        logger=getLogger(__name__),
    )
    end_trial(cast(Any, job))


@pytest.mark.parametrize("epochs", [3, 15])
def test_after_an_early_trial_blocks_are_tuned_or_a_head_is_solved_for_them_as_they_were(epochs: int) -> None:
    state = {"weight": torch.full((1, 1), 7.0), "bias": torch.full((1,), 8.0)}
    for loss, tuned, solved in ((0.99, False, True), (0.9, False, True), (0.5, True, True)):
        made = tried_runner(epochs=epochs)
        made.mirror = "on"
        assert [stage.name for stage in made.stages] == ["try", "tune", "solve", "back"]
        trial_ends(made, loss, trial=Trial(before=1.0), best=None, before_trial=state)
        assert [stage.steps > 0 for stage in made.stages] == [True, tuned, solved, False]
        assert made.mirror == ("on" if tuned else None), "a solution finds out itself"
        mirror = made.stages[2].config.data.mirror
        assert mirror == ("off" if tuned and epochs == 3 else "auto"), "mirror images where there is time for them"
        weight = made.opened.chain.model.state_dict()["weight"]
        assert torch.equal(weight, state["weight"]) == (not tuned)


@pytest.mark.parametrize(
    ("loss", "accuracy", "rounds"),
    [(0.75, 0.6, 1), (0.9, 0.6, 3), (0.75, 0.97, 3)],
    ids=["much is gained", "little is gained", "little is left"],
)
def test_one_tuning_follows_a_trial_that_gains_much_where_much_is_left(
    loss: float, accuracy: float, rounds: int
) -> None:
    made = tried_runner()
    made.number = 2
    best = SimpleNamespace(verdict=SimpleNamespace(held_out_accuracy=accuracy))
    trial_ends(made, loss, trial=Trial(before=1.0, after={"adamw at 0.0003": 0.95}), best=best)
    assert sum(stage.steps > 0 for stage in made.stages if stage.name == "tune") == rounds


@pytest.mark.parametrize("batches", [18, 200])
@pytest.mark.parametrize("loss", [0.97, 1.02])
def test_the_second_way_is_tried_where_the_first_gains_a_little_or_samples_are_few(batches: int, loss: float) -> None:
    made = tried_runner()
    made.number, first = 1, made.stages[1]
    made.stages = (made.stages[0], replace(first, batches_per_epoch=batches), *made.stages[2:])
    state = torch.nn.Linear(1, 1).state_dict()
    best = SimpleNamespace(
        verdict=SimpleNamespace(held_out_accuracy=0.6), state=state, scores={"model": Score(1.0, 0.5)}
    )
    ended: list[bool] = []
    made.drop_rest = lambda: ended.append(True)  # type: ignore[method-assign]
    made.turn_back = lambda **terms: ended.append(True)  # type: ignore[method-assign]
    trial_ends(made, loss, trial=Trial(before=1.0), best=best)
    assert (not ended) == (batches == 18 or loss == 0.97)


def test_reports_of_stages_add_up() -> None:
    def part(**changes: Any) -> dict[str, Any]:
        common = {"allreduce_bytes": 3, "other_collective_bytes": 4, "cut_history": [(0, 0, 5)], "cache": CACHE}
        return {**common, **changes}

    assert joined({}, part()) == part()
    both = joined(part(head={"loss": 1.0}), part(cache={**CACHE, "mode": "off", "exact": False}))
    assert both["allreduce_bytes"] == 6 and both["other_collective_bytes"] == 8
    assert both["cut_history"] == [(0, 0, 5), (0, 0, 5)] and both["head"] == {"loss": 1.0}
    assert both["cache"] == {"mode": "auto", "exact": False, "bytes": 2, "rows_written": 4, "seconds_saved": 1.0}
