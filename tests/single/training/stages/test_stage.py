from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.training import auto_plan
from hvfreeze.training.auto_plan import (
    ENOUGH_STEPS,
    LEAST_ROUND,
    MUCH_TUNED,
    Costs,
    rounds_of,
    stages_of,
    tuned_first,
)
from hvfreeze.training.stage_build import HELD_OUT
from hvfreeze.training.stages import Stage, single_stage
from hvfreeze.training.trial import MANY, MOST_TRIED, TRIED, Trial, judging

COSTS = Costs(views=2, frozen=0.25, judging=1.5, haste=0.75)
UPDATES = replace(COSTS, update=64.0)
DEEPEST = 5


def planned(
    *, batches: int = 20, guarded: int = 18, costs: Costs = COSTS, normalises: bool = True, **changes: Any
) -> tuple[Stage, ...]:
    config = from_dict({"freeze": "auto", "weights": "some.pt", **changes})
    sizes = {"batches_per_epoch": batches, "guarded_batches": guarded, "cut": 2, "deepest": DEEPEST}
    return stages_of(config, **sizes, costs=costs, normalises=normalises)


def cost(stages: tuple[Stage, ...], costs: Costs = COSTS, guarded: int = 18, batch: int = 64) -> float:
    """In epochs of full fine-tuning with such batches; what is tuned first is judged before and after."""
    made = [stage for stage in stages if not stage.is_spare]
    each = [costs.plain or costs if stage.config.data.mirror == "off" else costs for stage in made]
    solutions = sum(one.solution for stage, one in zip(made, each, strict=True) if stage.name == "solve")
    trained = [(stage, stage.config.optimizer.batch_size) for stage in stages if stage.name in ("try", "tune")]
    tuned = sum(stage.images(stage.steps) / (guarded * 32) * costs.tuning_step(size) for stage, size in trained)
    judging = 2 * (costs.haste if stages[0].is_in_haste else costs.judging) if trained else 0.0
    own = HELD_OUT * costs.views * sum(stage.name == "tune" for stage in stages)
    return (solutions + judging + tuned + own) / costs.full_step(batch)


def names_of(stages: tuple[Stage, ...]) -> list[str]:
    return ["spare" if stage.is_spare else stage.name for stage in stages]


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 8, 12, 16, 40])
@pytest.mark.parametrize("update", [0.0, 64.0])
@pytest.mark.parametrize("batches", [200, MANY // 32 + 1])
def test_stages_take_what_epochs_have_room_for_and_no_more(epochs: int, update: float, batches: int) -> None:
    costs = replace(COSTS, update=update, plain=replace(COSTS, views=1, update=update))
    stages = planned(epochs=epochs, costs=costs, batches=batches, guarded=180)
    few = ["try", "spare", "tune", "solve", "back"]
    if batches > 200:
        few = few[2:]
    elif epochs >= 8:
        few[1] = "solve"
    if epochs >= 12:
        few[-1:] = ["tune", "solve", "back"]
    assert names_of(stages) == (few if epochs > 1 else ["solve"])
    made = cost(stages, costs, guarded=180, batch=128 if batches > 200 else 64)
    assert epochs - 0.2 < made <= epochs or epochs == 1, "all of it, and no more"
    assert (stages[-1].name, stages[-1].steps) == (("solve", batches) if epochs == 1 else ("back", 0))
    for stage in stages:
        if not stage.solves and stage.steps:
            assert stage.config.optimizer.optimizer == "sgd" and stage.guarded and stage.is_followed
    last = [stage for stage in stages if stage.solves][-2 if epochs > 1 else -1]
    assert (last.config.data.mirror == "off") == (1 < epochs <= 4), "where there is time for them beside long tuning"
    if epochs == 3 and batches == 200:
        assert stages[1].config.data.mirror == "auto", "where nothing is tuned there is"


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("guarded", [1, 6, 18, 400])
def test_a_trial_has_steps_enough_to_learn_by_however_many_ranks_and_however_few_samples(
    replicas: int, guarded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_plan, "MANY", math.inf)
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
    (first,) = (stage.steps for stage in stages if stage.name == "try")
    assert first >= min(TRIED // 2, MOST_TRIED * 2 * guarded)
    few = 2 * guarded < TRIED // 2
    assert first * 16 * replicas <= max(640 * (1 + few) + 16 * replicas, TRIED // (1 if few else 2) * 16 * replicas)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="sgd", lr=0.01))
    sizes = {"batches_per_epoch": guarded + 2, "guarded_batches": guarded, "cut": 0, "deepest": 5}
    given = stages_of(config, **sizes, costs=COSTS, passes=1000.0, replicas=replicas)
    (other,) = (stage.steps for stage in given if stage.name == "try")
    assert other >= min(TRIED, MOST_TRIED * 2 * guarded) >= first or other > first, "at a rate of one's own"


def test_of_few_samples_the_trial_comes_on_top_of_autos_own_epochs_and_of_no_others() -> None:
    own, fewer = planned(epochs=16, batches=10, guarded=8), planned(epochs=15, batches=10, guarded=8)
    assert own[0].steps > own[0].steps_per_epoch, "this says nothing"
    batch = 16
    assert 16 < cost(own, guarded=8, batch=batch) < 16 + 3.0 and cost(fewer, guarded=8, batch=batch) <= 15


def test_there_must_be_room_for_a_trial_a_solution_and_some_tuning() -> None:
    assert names_of(planned(epochs=2)) == ["solve"]
    many = planned(epochs=8, batches=MANY // 32 + 1, guarded=900)
    assert many[0].config.optimizer.lr_warmup > 0, "no trial has warmed up before"
    plain = replace(COSTS, views=1)
    open_ones = replace(COSTS, plain=plain)
    least = 4.0
    enough = COSTS.solution + MUCH_TUNED * least
    assert tuned_first(enough, open_ones, least=least) == (pytest.approx(MUCH_TUNED * least), True)
    found = tuned_first(enough - 0.1, open_ones, least=least)
    assert found == (pytest.approx(enough - 0.1 - plain.solution), False)
    assert tuned_first(plain.solution + 1.9, open_ones, least=least) is None
    assert tuned_first(COSTS.solution + 2.1, COSTS, least=least) == (pytest.approx(2.1), True), "--mirror was given"


def test_a_second_tuning_is_twice_as_long_as_the_first_which_has_enough_steps() -> None:
    assert rounds_of(14.0, first=4.0, between=2.0) == [4.0, 8.0]
    assert rounds_of(13.9, first=4.0, between=2.0) == [13.9]
    first, second = (stage for stage in planned(epochs=16, batches=200, guarded=180) if stage.name == "tune")
    assert first.steps >= LEAST_ROUND and second.images(second.steps) >= 2 * first.images(first.steps)
    assert (first.config.optimizer.lr_warmup, second.config.optimizer.lr_warmup) == (0, second.steps // 10)
    few = planned(epochs=16, batches=10, guarded=9)
    assert names_of(few) == ["try", "solve", "tune", "solve", "back"], "a few batches are too few steps"


def test_tuning_goes_on_from_a_trial_at_its_rate() -> None:
    trial, _, tune, *_ = planned(epochs=8)
    assert (trial.name, trial.config.optimizer.schedule) == ("try", "constant") and trial.config.optimizer.lr_warmup > 0
    assert (tune.name, tune.config.optimizer.schedule, tune.config.optimizer.lr_warmup) == ("tune", "cosine", 0)
    assert planned(epochs=8, lr_warmup=5)[2].config.optimizer.lr_warmup == 5, "what was asked for"
    stepwise = planned(epochs=8, schedule="step")
    assert stepwise[0].config.optimizer.schedule == "step", "what was asked for"


def test_sgd_takes_the_largest_batches_of_which_there_are_enough() -> None:
    sizes = {}
    for batches in (100, 400, 1000, 4000):
        tune = next(
            stage
            for stage in planned(epochs=8, costs=UPDATES, batches=batches, guarded=batches)
            if stage.name == "tune"
        )
        sizes[batches] = tune.config.optimizer.batch_size
        assert tune.config.optimizer.batch_size == 16 or tune.steps >= ENOUGH_STEPS
    assert sizes == {100: 32, 400: 64, 1000: 128, 4000: 128}

    def few(**changes: Any) -> Stage:
        return planned(**{"epochs": 4, "costs": UPDATES, "batches": 60, "guarded": 54, **changes})[2]

    assert (few().name, few().config.optimizer.batch_size) == ("tune", 16) and few().steps < ENOUGH_STEPS
    assert few(costs=replace(COSTS, update=140.0)).config.optimizer.batch_size == 32
    assert few(batch_size=24).config.optimizer.batch_size == 24, "what was given is taken"
    assert few(optimizer="sgd").config.optimizer.batch_size == few(normalises=False).config.optimizer.batch_size == 32
    tiny = planned(epochs=16, guarded=1)[2]
    assert (tiny.config.optimizer.batch_size, tiny.batches_per_epoch) == (16, 2)

    def of_many(**changes: Any) -> tuple[str, int, float]:
        chosen = planned(**{"epochs": 16, "batches": MANY // 32 + 1, "guarded": 900, **changes})[0].config.optimizer
        return chosen.optimizer, chosen.batch_size, chosen.lr

    assert of_many() == ("sgd", 128, 0.1), "as much a sample, in fewer updates"
    assert of_many(epochs=2) == ("sgd", 32, 0.05), "they would be too few"
    assert of_many(batch_size=128)[1:] == (128, 0.05), "what was given is taken"
    assert of_many(normalises=False)[:2] == ("adamw", 64), "updates take time"


def test_what_was_asked_for_is_neither_tried_nor_made_in_parts() -> None:
    alone = planned(epochs=9, auto_without="guard")
    assert names_of(alone) == ["solve", "tune", "solve"], "nothing is held out that could judge"
    scratch = planned(epochs=9, weights="none")
    assert names_of(scratch) == ["solve", "tune", "solve", "back"]
    assert [stage.config.freeze.statistics for stage in (scratch[1], alone[1])] == ["auto", "kept"]
    assert {stage.config.optimizer.optimizer for stage in (*scratch, *alone)} == {"adamw"}, "nothing tells what pays"


def test_networks_with_batch_norm_are_tuned_by_sgd_and_others_by_adamw_unless_something_was_asked_for() -> None:
    def way(**changes: Any) -> tuple[str, float, str]:
        trial, _, tune, *_ = planned(epochs=8, **changes)
        assert trial.config.freeze == tune.config.freeze
        found = [(stage.config.optimizer.optimizer, stage.config.optimizer.lr) for stage in (trial, tune)]
        assert found[0] == found[1]
        return (*found[0], tune.config.freeze.statistics)

    assert way() == ("sgd", 0.05, "batch") and way(normalises=False) == ("adamw", 3e-4, "kept")
    assert way(optimizer="adamw", lr=1e-3) == ("adamw", 1e-3, "kept")
    assert way(optimizer="sgd", lr=0.01, statistics="batch") == ("sgd", 0.01, "batch")
    decays = [planned(epochs=8, **given)[0].config.optimizer.weight_decay for given in ({}, {"weight_decay": 0.5})]
    assert decays == [from_dict({}).optimizer.weight_decay, 0.5], "SGD's own, or what was given"


def test_tuning_pays_where_the_loss_falls_by_more_than_chance() -> None:
    assert not Trial().pays and not Trial(before=1.0).pays and not Trial(before=1.0, after=math.inf).pays
    gains = [0.97, 0.95, 0.91, 0.89]
    pays = {n: [Trial(before=1.0, after=loss, samples=n).pays for loss in gains] for n in (None, 60, 100, 900)}
    assert pays == {
        None: [False, True, True, True],
        60: [False, False, False, True],
        100: [False, False, True, True],
        900: [False, True, True, True],
    }
    assert [Trial(before=1.0, after=loss).pays_at_once for loss in (0.86, 0.84)] == [False, True]
    told = Trial(before=1.0, after=math.inf, way="sgd at 0.05").line(40, "so it ends")
    assert told == (
        "tried: 40 steps of tuning with sgd at 0.05 change the loss of held-out samples from 1.000 to numbers that are "
        "not finite: so it ends"
    )


def test_a_trial_is_as_long_for_many_samples_as_for_few() -> None:
    assert [planned(epochs=9, batches=count, guarded=count)[0].steps for count in (8, 12, 40, 400)] == [40, 24, 40, 40]


def test_judging_costs_a_small_network_no_more_passes_than_its_operators_take_time() -> None:
    assert judging(1e6, samples=5000) == judging(2e7, samples=5000) > judging(1e9, samples=5000)
    assert judging(1e6, samples=60) < judging(1e6, samples=5000) / 4, "few samples are soon solved for"
    assert judging(1e6, samples=50_000) == judging(1e6, samples=10**6) > 3 * judging(1e6, samples=5000)
    assert judging(1e9, samples=5000, in_haste=True) == pytest.approx(judging(1e9, samples=5000) / 2, rel=0.1)


def test_in_few_epochs_half_as_many_samples_judge_a_trial_and_blocks_have_the_time() -> None:
    costs = replace(COSTS, plain=replace(COSTS, views=1))
    for epochs, hasty in ((3, True), (16, False)):
        stages = planned(epochs=epochs, costs=costs, batches=200, guarded=180)
        slower = planned(epochs=epochs, costs=replace(costs, haste=costs.judging), batches=200, guarded=180)
        assert stages[0].is_trial and stages[0].is_in_haste is hasty
        assert (stages[2].steps > slower[2].steps) is hasty


def test_a_run_without_stages_is_one() -> None:
    stage = single_stage(from_dict({"accumulate": 3}), batches_per_epoch=10, epochs=3)
    assert (stage.steps, stage.steps_per_epoch, stage.epochs) == (12, 4, 3)
    assert [stage.batches(steps) for steps in (0, 1, 3, 4, 5, 12)] == [0, 3, 9, 10, 13, 30]


def test_groups_of_batches_are_for_tuning_alone() -> None:
    trial, solve, tune, last, *_ = planned(epochs=12, accumulate=3)
    assert solve == last and (solve.config.optimizer.accumulate, solve.steps, solve.epochs) == (1, 20, 1)
    assert (trial.config.optimizer.accumulate, tune.config.optimizer.accumulate) == (1, 3)
    assert tune.steps_per_epoch == tune.batches_per_epoch // 3


def test_tuning_leaves_out_what_the_guard_judges_by_and_parts_can_be_left_out() -> None:
    trial, solve, tune, last, _ = planned(epochs=12, optimizer="adamw")
    assert trial.guarded and trial.is_followed
    assert tune.guarded and tune.batches_per_epoch == 18 and not solve.guarded
    assert (tune.config.freeze.freeze, tune.config.freeze.cut) == ("coherence", 2)
    assert (tune.config.head.head, tune.config.head.head_fit) == ("last", "sgd")
    assert tune.config.data.augment == "fresh" and solve.config.data.augment == "none"
    assert solve == last and (solve.config.head.head, solve.config.freeze.cut) == ("multi-level", 1)
    unguarded = planned(epochs=4, auto_without="guard,votes")
    assert not unguarded[1].guarded and unguarded[1].batches_per_epoch == 20
    assert (unguarded[1].config.freeze.freeze, unguarded[1].config.freeze.cut) == ("static", 2)
    assert names_of(planned(epochs=4, auto_without="last-solve,guard")) == ["solve", "tune"]
    assert names_of(planned(epochs=9, guarded=0)) == ["solve"], "no batch is left to tune with"


def test_without_a_last_solution_the_first_can_still_be_gone_back_to() -> None:
    solve, tune, back = planned(epochs=4, auto_without="last-solve")
    assert tune.guarded and tune.batches_per_epoch == 18 and not tune.is_followed
    assert (back.steps, back.epochs, back.config) == (0, 0, solve.config)


def test_a_cache_that_could_never_be_read_again_is_for_solutions_alone() -> None:
    _, solve, tune, *_ = planned(epochs=12, cache="on")
    assert (solve.config.cache.cache, tune.config.cache.cache) == ("on", "off")
    assert planned(epochs=12, cache="on", augment="views:2")[2].config.cache.cache == "on"
