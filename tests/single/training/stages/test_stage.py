from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.training.auto_plan import ENOUGH_STEPS, FEWEST_TUNED, Costs, epochs_of_rounds, stages_of, tuned_first
from hvfreeze.training.stage_build import HELD_OUT
from hvfreeze.training.stages import Stage, single_stage
from hvfreeze.training.trial import MANY, MOST_TRIED, TRIED, Trial, judging

COSTS = Costs(views=2, frozen=0.25, judging=1.5)
UPDATES = replace(COSTS, update=64.0)
DEEPEST = 5


def planned(*, batches: int = 20, guarded: int = 18, costs: Costs = COSTS, **changes: Any) -> tuple[Stage, ...]:
    config = from_dict({"freeze": "auto", "weights": "some.pt", "optimizer": "adamw", **changes})
    return stages_of(config, batches_per_epoch=batches, guarded_batches=guarded, cut=2, deepest=DEEPEST, costs=costs)


def cost(stages: tuple[Stage, ...], costs: Costs = COSTS, guarded: int = 18) -> float:
    """In epochs of full fine-tuning with batches of 64; it is judged before the first trial, and after each."""
    each = [costs.plain or costs if stage.config.data.mirror == "off" else costs for stage in stages]
    solutions = sum(one.solution for stage, one in zip(stages, each, strict=True) if stage.name == "solve")
    trained = [(stage, stage.config.optimizer.batch_size) for stage in stages if stage.name in ("try", "tune")]
    tuned = sum(stage.images(stage.steps) / (guarded * 32) * costs.tuning_step(batch) for stage, batch in trained)
    trials = sum(stage.name == "try" for stage in stages)
    judging = costs.judging * (trials + 1 if trials else 0)
    own = HELD_OUT * costs.views * sum(stage.name == "tune" for stage in stages)
    return (solutions + judging + tuned + own) / costs.full_step(64)


def tuned_epochs(stages: tuple[Stage, ...]) -> list[float]:
    return [stage.batches(stage.steps) / stage.batches_per_epoch for stage in stages if stage.name == "tune"]


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 9, 16])
def test_stages_take_what_epochs_have_room_for_and_no_more(epochs: int) -> None:
    stages = planned(epochs=epochs, batches=24, guarded=22)
    names = [stage.name for stage in stages if stage.steps]
    rounds = ["tune", "solve"] * (len(names) // 2 - 1)
    room_for = {1: ["solve"], 2: ["solve"], 3: ["solve"]}
    assert names == room_for.get(epochs, ["solve", "try", *rounds])
    assert cost(stages, guarded=22) <= epochs
    assert epochs <= 3 or cost(stages, guarded=22) > epochs - 1 / 10
    assert (stages[-1].name, stages[-1].steps) == (("solve", 24) if epochs <= 3 else ("back", 0))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("guarded", [1, 6, 18, 400])
def test_a_trial_has_steps_enough_to_learn_by_however_many_ranks_and_however_few_samples(
    replicas: int, guarded: int
) -> None:
    config = from_dict({"freeze": "auto", "weights": "some.pt"})
    stages = stages_of(
        config,
        batches_per_epoch=guarded + 2,
        guarded_batches=guarded,
        cut=0,
        deepest=5,
        costs=COSTS,
        passes=1000.0,
        replicas=replicas,
    )
    (first, second) = (stage.steps for stage in stages if stage.name == "try")
    assert first == second >= min(TRIED, MOST_TRIED * 2 * guarded)
    assert first * 16 * replicas <= max(1280 + 16 * replicas, TRIED * 16 * replicas)


def test_of_few_samples_trials_come_on_top_of_autos_own_epochs_and_of_no_others() -> None:
    own, fewer = planned(epochs=16, optimizer="auto"), planned(epochs=14, optimizer="auto", auto_without="last-solve")
    assert own[1].epochs == 2, "this says nothing"
    assert 16 < cost(own) < 16 + 3.0 and cost(fewer) <= 14


def test_where_no_solution_has_room_behind_it_the_tuned_model_itself_is_judged() -> None:
    config = from_dict({"freeze": "auto", "weights": "some.pt", "epochs": 4, "optimizer": "adamw"})
    dear = replace(COSTS, solving=1.65, judging=1.0)
    stages = stages_of(config, batches_per_epoch=62, guarded_batches=56, cut=2, deepest=5, costs=dear, replicas=2)
    assert [stage.name for stage in stages] == ["solve", "try", "tune", "back"]
    assert stages[2].guarded and not stages[2].is_followed


@pytest.mark.parametrize("epochs", [2, 3, 4, 8, 15])
@pytest.mark.parametrize("update", [0.0, 64.0])
def test_with_few_epochs_sgd_is_tried_before_a_head_is_solved(epochs: int, update: float) -> None:
    costs = replace(COSTS, update=update, plain=replace(COSTS, views=1, update=update))
    stages = planned(epochs=epochs, costs=costs, batches=200, guarded=180, optimizer="auto")
    trial, tune, solve, back = stages
    assert [stage.name for stage in stages] == ["try", "tune", "solve", "back"] and back.steps == 0
    assert [each.config.optimizer.optimizer for each in (trial, tune)] == ["sgd", "sgd"] and tune.other is None
    assert tune.guarded and tune.is_followed and solve.steps == 200
    trained = sum(
        each.images(each.steps) / (180 * 32) * costs.tuning_step(each.config.optimizer.batch_size)
        for each in stages[:2]
    )
    plain = solve.config.data.mirror == "off"
    solution = (costs.plain if plain else costs).solution  # type: ignore[union-attr]
    spent = (trained + solution + 2 * costs.judging + HELD_OUT * costs.views) / costs.full_step(64)
    assert epochs - 0.2 < spent <= epochs, "all of it, and no more"
    assert plain == (epochs <= 4), "mirror images where there is time for them beside long tuning"
    if plain:
        assert solve.other is not None and solve.other.config.data.mirror == "auto", "where nothing is tuned there is"


def test_with_few_epochs_there_must_be_room_for_a_trial_a_solution_and_some_tuning() -> None:
    assert [stage.name for stage in planned(epochs=2, optimizer="auto")] == ["solve"]
    assert planned(epochs=4, optimizer="sgd")[0].name == "solve", "what was asked for is tuned with"
    names = [planned(epochs=epochs, optimizer="auto")[0].name for epochs in (15, 16)]
    assert names == ["try", "solve"], "as many epochs as auto has by itself keep a solution to go back to"
    many = planned(epochs=8, batches=MANY // 32 + 1, guarded=900, optimizer="auto")
    assert [stage.name for stage in many] == ["tune", "solve", "back"], "of many samples the whole tuning is judged"
    assert many[0].config.optimizer.optimizer == "sgd" and many[0].config.optimizer.lr_warmup > 0
    plain = replace(COSTS, views=1)
    open_ones = replace(COSTS, plain=plain)
    least = 4.0
    enough = COSTS.solution + FEWEST_TUNED * least
    assert tuned_first(enough, open_ones, least=least) == (pytest.approx(FEWEST_TUNED * least), True)
    found = tuned_first(enough - 0.1, open_ones, least=least)
    assert found == (pytest.approx(enough - 0.1 - plain.solution), False)
    assert tuned_first(plain.solution + 1.9, open_ones, least=least) is None
    assert tuned_first(COSTS.solution + 2.1, COSTS, least=least) == (pytest.approx(2.1), True), "--mirror was given"


def test_tuning_goes_on_from_an_early_trial_at_its_rate() -> None:
    trial, tune, *_ = planned(epochs=8, optimizer="auto")
    assert (trial.name, trial.config.optimizer.schedule) == ("try", "constant") and trial.config.optimizer.lr_warmup > 0
    assert (tune.name, tune.config.optimizer.schedule, tune.config.optimizer.lr_warmup) == ("tune", "cosine", 0)
    assert planned(epochs=8, optimizer="auto", lr_warmup=5)[1].config.optimizer.lr_warmup == 5, "what was asked for"
    stepwise = planned(epochs=8, optimizer="auto", schedule="step")
    assert stepwise[0].config.optimizer.schedule == "step", "what was asked for"
    solved_first = planned(epochs=16, optimizer="auto")
    assert {stage.config.optimizer.schedule for stage in solved_first} == {"cosine"}, "ways are compared as they end"


def test_sgd_takes_the_largest_batches_of_which_there_are_enough() -> None:
    sizes = {}
    for batches in (100, 400, 1000, 4000):
        stages = planned(epochs=8, costs=UPDATES, batches=batches, guarded=batches, optimizer="auto")
        tune = next(stage for stage in stages if stage.name == "tune" and stage.steps)
        way = tune if tune.config.optimizer.optimizer == "sgd" else tune.other
        assert way is not None
        sizes[batches] = way.config.optimizer.batch_size
        assert way.config.optimizer.batch_size == 16 or way.steps >= ENOUGH_STEPS or tune is not way
    assert sizes == {100: 32, 400: 64, 1000: 64, 4000: 64}
    few = planned(epochs=4, costs=UPDATES, batches=60, guarded=54, optimizer="auto")[1]
    assert (few.name, few.config.optimizer.batch_size) == ("tune", 16) and few.steps < ENOUGH_STEPS
    dear = replace(COSTS, update=140.0)
    assert planned(epochs=4, costs=dear, batches=60, guarded=54, optimizer="auto")[1].config.optimizer.batch_size == 32
    given = planned(epochs=4, costs=UPDATES, batches=60, guarded=54, optimizer="auto", batch_size=24)[1]
    assert given.config.optimizer.batch_size == 24, "what was given is taken"


def test_each_tuning_lasts_twice_as_long_as_the_one_before_and_the_last_takes_the_rest() -> None:
    first, second, third, last = tuned_epochs(planned(epochs=20))
    assert (first, second, third) == (1, 2, 4) and 4 < last < 16
    assert epochs_of_rounds(10.0, 1.0, several=False) == [9.0]
    assert epochs_of_rounds(1.9, 1.0, several=True) == [], "less than an epoch is left"


def test_what_was_asked_for_is_neither_tried_nor_made_in_parts() -> None:
    alone = planned(epochs=9, auto_without="guard")
    assert [stage.name for stage in alone] == ["solve", "tune", "solve"], "nothing is held out that could judge"
    scratch = planned(epochs=9, weights="none")
    assert [stage.name for stage in scratch] == ["solve", "tune", "solve", "back"]
    assert [stage.config.freeze.statistics for stage in (scratch[1], alone[1])] == ["auto", "kept"]


def test_two_ways_to_tune_are_tried_where_there_is_room_and_each_stage_knows_the_other() -> None:
    stages = planned(epochs=16, optimizer="auto", weight_decay=0.5)
    names = [stage.name for stage in stages]
    assert names[:5] == ["solve", "try", "try", "tune", "solve"] and cost(stages) < 19
    found = [(each.optimizer.optimizer, each.optimizer.lr) for each in (stage.config for stage in stages[1:4])]
    assert found == [("adamw", 3e-4), ("sgd", 0.05), ("adamw", 3e-4)]
    assert [stage.config.freeze.statistics for stage in stages[1:4]] == ["kept", "batch", "kept"]
    tuned, other = stages[3], stages[3].other
    assert other is not None and (other.config.optimizer.optimizer, other.config.optimizer.weight_decay) == ("sgd", 0.5)
    assert other.config.freeze == stages[2].config.freeze and other.guarded and other.is_followed
    assert (other.config.optimizer.batch_size, other.batches_per_epoch) == (16, 36), "few steps, of 18 batches of 32"
    assert (other.steps, other.epochs) == (2 * tuned.steps, tuned.epochs)
    given = planned(epochs=16, optimizer="auto", batch_size=8)[3].other
    assert given is not None and given.config.optimizer.batch_size == 8, "what was given is taken"
    tiny = planned(epochs=16, guarded=1, optimizer="auto")[3].other
    assert tiny is not None and (tiny.config.optimizer.batch_size, tiny.batches_per_epoch) == (16, 2)
    usual = planned(epochs=16, optimizer="auto")[2].config.optimizer.weight_decay
    assert usual == from_dict({}).optimizer.weight_decay, "SGD's own"
    scratch = planned(epochs=9, optimizer="auto", weights="none")
    assert [stage.config.optimizer.optimizer for stage in scratch] == ["adamw"] * 4, "nothing is tried"


def test_the_better_way_is_that_after_which_the_loss_is_least() -> None:
    assert not Trial().pays and not Trial(before=1.0).pays
    trial = Trial(before=1.0, after={"adamw": 0.9, "sgd": 0.8})
    assert (trial.pays, trial.best, trial.describe()["after"]) == (True, "sgd", 0.8)
    assert Trial(before=1.0, after={"adamw": 0.97, "sgd": math.inf}).best == "adamw"
    assert not Trial(before=1.0, after={"adamw": 0.97, "sgd": math.inf}).pays
    assert not Trial(before=1.0, after={"adamw": math.inf, "sgd": math.inf}).pays
    found = {0.99: False, 0.97: True, 0.5: True, math.inf: True}
    gains = [0.97, 0.95, 0.91, 0.89]
    pays = {
        n: [Trial(before=1.0, after={"adamw": loss}, samples=n).pays for loss in gains] for n in (None, 60, 100, 900)
    }
    assert pays == {
        None: [False, True, True, True],
        60: [False, False, False, True],
        100: [False, False, True, True],
        900: [False, True, True, True],
    }
    assert {loss: Trial(before=1.0, after={"adamw": loss}).is_promising for loss in found} == found
    assert "from 1.000 to 0.900 (adamw) or numbers that are not finite (sgd)" in Trial(
        before=1.0, after={"adamw": 0.9, "sgd": math.inf}
    ).line(40)


def test_a_trial_is_as_long_for_many_samples_as_for_few() -> None:
    assert [planned(epochs=9, batches=count, guarded=count)[1].steps for count in (20, 100, 1000)] == [40, 80, 80]


def test_judging_costs_a_small_network_no_more_passes_than_its_operators_take_time() -> None:
    assert judging(1e6, samples=5000) == judging(2e7, samples=5000) > judging(1e9, samples=5000)
    assert judging(1e6, samples=60) < judging(1e6, samples=5000) / 4, "few samples are soon solved for"
    assert judging(1e6, samples=50_000) == judging(1e6, samples=10**6) > 4 * judging(1e6, samples=5000)


def test_of_many_samples_an_epoch_may_be_tried_where_short_trials_tell_too_little() -> None:
    few = planned(epochs=16, batches=MANY // 32, guarded=900)
    stages = planned(epochs=16, batches=MANY // 32 + 1, guarded=900)
    names = [stage.name for stage in stages]
    assert names == ["solve", "try", "try longer", *[stage.name for stage in few[2:]]] and "try longer" not in few
    longer, tuned = stages[2], stages[3]
    assert longer.is_trial and (longer.steps, longer.batches_per_epoch) == (450, 450) and longer.guarded
    assert longer.config.optimizer == replace(tuned.config.optimizer, epochs=1, lr_warmup=45)
    sizes = [[s.config.optimizer.batch_size for s in each if s.name != "solve"] for each in (few, stages)]
    tunings = names.count("tune")
    assert sizes == [[16, *[32] * (tunings + 1)], [16, *[64] * (tunings + 1), 32]], "updates take time, and are enough"
    assert planned(epochs=16, batches=MANY // 8, guarded=900, batch_size=8)[2].config.optimizer.batch_size == 8
    cheaper = sum(s.steps for s in few if s.name == "tune") - 2 * sum(s.steps for s in stages if s.name == "tune")
    assert cheaper == pytest.approx(900 * (1 + COSTS.judging / COSTS.tuning_step(32)), abs=4), "it takes their time"
    assert "try longer" not in [s.name for s in planned(epochs=5, batches=MANY // 32 + 1, guarded=900)], "no room"


def test_a_run_without_stages_is_one() -> None:
    stage = single_stage(from_dict({"accumulate": 3}), batches_per_epoch=10, epochs=3)
    assert (stage.steps, stage.steps_per_epoch, stage.epochs) == (12, 4, 3)
    assert [stage.batches(steps) for steps in (0, 1, 3, 4, 5, 12)] == [0, 3, 9, 10, 13, 30]


def test_groups_of_batches_are_for_tuning_alone() -> None:
    solve, _, tune, last, *_ = planned(epochs=9, accumulate=3)
    assert solve == last and (solve.config.optimizer.accumulate, solve.steps, solve.epochs) == (1, 20, 1)
    assert (tune.config.optimizer.accumulate, tune.steps_per_epoch) == (3, 6)


def test_tuning_leaves_out_what_the_guard_judges_by_and_parts_can_be_left_out() -> None:
    solve, trial, tune, last, _ = planned(epochs=4)
    assert trial.guarded and trial.is_followed
    assert tune.guarded and tune.batches_per_epoch == 18 and not solve.guarded
    assert (tune.config.freeze.freeze, tune.config.freeze.cut) == ("coherence", 2)
    assert (tune.config.head.head, tune.config.head.head_fit) == ("last", "sgd")
    assert tune.config.data.augment == "fresh" and solve.config.data.augment == "none"
    assert solve == last and (solve.config.head.head, solve.config.freeze.cut) == ("multi-level", 1)
    unguarded = planned(epochs=4, auto_without="guard,votes")
    assert not unguarded[1].guarded and unguarded[1].batches_per_epoch == 20
    assert (unguarded[1].config.freeze.freeze, unguarded[1].config.freeze.cut) == ("static", 2)
    assert [stage.name for stage in planned(epochs=4, auto_without="last-solve,guard")] == ["solve", "tune"]
    assert [stage.name for stage in planned(epochs=9, guarded=0)] == ["solve"], "no batch is left to tune with"


def test_without_a_last_solution_the_first_can_still_be_gone_back_to() -> None:
    solve, tune, back = planned(epochs=4, auto_without="last-solve")
    assert tune.guarded and tune.batches_per_epoch == 18 and not tune.is_followed
    assert (back.steps, back.epochs, back.config) == (0, 0, solve.config)


def test_a_cache_that_could_never_be_read_again_is_for_solutions_alone() -> None:
    solve, _, tune, *_ = planned(epochs=4, cache="on")
    assert (solve.config.cache.cache, tune.config.cache.cache) == ("on", "off")
    assert planned(epochs=4, cache="on", augment="views:2")[2].config.cache.cache == "on"
