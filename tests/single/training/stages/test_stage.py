from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.chain.blocks import cut_into_blocks
from hvfreeze.chain.models import build_model
from hvfreeze.config.tree import from_dict
from hvfreeze.training.stages.stage import Costs, Stage, stages_of, tuning_cut

COSTS = Costs(views=2, frozen=0.25)
DEEPEST = 5


def planned(*, batches: int = 20, guarded: int = 18, **changes: Any) -> tuple[Stage, ...]:
    config = from_dict({"freeze": "auto", **changes})
    return stages_of(config, batches_per_epoch=batches, guarded_batches=guarded, cut=2, deepest=DEEPEST, costs=COSTS)


def cost(stages: tuple[Stage, ...]) -> float:
    """In epochs of full fine-tuning."""
    solutions = sum(stage.name == "solve" for stage in stages)
    tuned = sum(stage.batches(stage.steps) for stage in stages if stage.name == "tune")
    return (solutions * COSTS.solution + tuned / 20 * COSTS.tuning_step) / COSTS.full_step


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 9])
def test_stages_take_what_epochs_have_room_for_and_no_more(epochs: int) -> None:
    stages = planned(epochs=epochs)
    names = [stage.name for stage in stages]
    assert names == (["solve"] if epochs == 1 else ["solve", "tune", "solve"])
    assert cost(stages) <= epochs
    assert epochs == 1 or cost(stages) > epochs - 1 / 20


def test_a_run_without_stages_is_one() -> None:
    (stage,) = stages_of(
        from_dict({"epochs": 3, "accumulate": 3}),
        batches_per_epoch=10,
        guarded_batches=0,
        cut=0,
        deepest=5,
        costs=COSTS,
    )
    assert (stage.steps, stage.steps_per_epoch, stage.epochs) == (12, 4, 3)
    assert [stage.batches(steps) for steps in (0, 1, 3, 4, 5, 12)] == [0, 3, 9, 10, 13, 30]


def test_groups_of_batches_are_for_tuning_alone() -> None:
    solve, tune, last = planned(epochs=9, accumulate=3)
    assert solve == last and (solve.config.optimizer.accumulate, solve.steps, solve.epochs) == (1, 20, 1)
    assert (tune.config.optimizer.accumulate, tune.steps_per_epoch) == (3, 6)


def test_tuning_leaves_out_what_the_guard_judges_by_and_parts_can_be_left_out() -> None:
    solve, tune, last = planned(epochs=4)
    assert tune.guarded and tune.batches_per_epoch == 18 and not solve.guarded
    assert (tune.config.freeze.freeze, tune.config.freeze.cut) == ("gradient-norm", 2)
    assert (tune.config.head.head, tune.config.head.head_fit) == ("last", "sgd")
    assert tune.config.data.augment == "fresh" and solve.config.data.augment == "none"
    assert solve == last and (solve.config.head.head, solve.config.freeze.cut) == ("multi-level", 1)
    unguarded = planned(epochs=4, auto_without="guard,votes")
    assert not unguarded[1].guarded and unguarded[1].batches_per_epoch == 20
    assert (unguarded[1].config.freeze.freeze, unguarded[1].config.freeze.cut) == ("static", 2)
    assert [stage.name for stage in planned(epochs=4, auto_without="last-solve")] == ["solve", "tune"]
    assert [stage.name for stage in planned(epochs=9, guarded=0)] == ["solve"], "no batch is left to tune with"


def test_a_cache_that_could_never_be_read_again_is_for_solutions_alone() -> None:
    solve, tune, _ = planned(epochs=4, cache="on")
    assert (solve.config.cache.cache, tune.config.cache.cache) == ("on", "off")
    assert planned(epochs=4, cache="on", augment="views:2")[1].config.cache.cache == "on"


@pytest.mark.parametrize(("model", "cut"), [("resnet18", 2), ("mobilenet_v3_small", 3)])
def test_tuning_begins_behind_the_blocks_that_hold_few_parameters(model: str, cut: int) -> None:
    chain = cut_into_blocks(build_model(model, num_classes=10, image_size=32).model)
    assert tuning_cut(chain, None) == cut
    assert tuning_cut(chain, 1) == 1
