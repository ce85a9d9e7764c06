from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hvfreeze.comm.replica_sync import parameter_digest
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence, Length
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.modes import state_kept
from hvfreeze.training import time_budget as module
from hvfreeze.training.auto_plan import Costs, stages_of
from hvfreeze.training.stages import Opened, Stage, StageRunner, single_stage, with_steps
from hvfreeze.training.time_budget import Expected, TimeBudget, reserve_of
from tests.program import call

SOLVE, STEP, EVALUATION = 4.0, 0.1, 1.0
COSTS = Costs(views=2, frozen=0.25)


class Clock:
    """What `time` is to the budget: it stands still but where a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def stages(passes: float = 100.0, **settings: Any) -> tuple[Stage, ...]:
    config = from_dict(settings)
    if not config.freeze.auto:
        return (single_stage(config, batches_per_epoch=20, epochs=1),)
    return stages_of(config, batches_per_epoch=20, guarded_batches=18, cut=2, deepest=5, costs=COSTS, passes=passes)


def budget_of(clock: Clock, seconds: float, **expected: float) -> TimeBudget:
    parts = {"solve": SOLVE, "step": STEP, "evaluation": EVALUATION, **expected}
    read = Expected(**parts, images=32, source="a guess")
    return TimeBudget(seconds=seconds, world=SoloWorld(), started=clock.now, expected=read, evaluate_every=1000)


def follow(
    budget: TimeBudget, clock: Clock, given: tuple[Stage, ...], *, solve: float, step: Callable[[int], float]
) -> StageRunner:
    """Go through all stages as the loop does; solutions and steps take what is said here."""
    stage_runner = cast(StageRunner, StageRunner.__new__(StageRunner))
    stage_runner.stages, stage_runner.number = given, 0
    stage_runner.opened = opened(stage_runner)
    while True:
        if stage_runner.stage.solves:
            clock.now += solve
        done = 0
        while not stage_runner.stage.solves and done < stage_runner.stage.steps:
            clock.now += step(done)
            done += 1
            budget.after_step(stage_runner, done)
        if stage_runner.stage.solves or stage_runner.is_last:
            clock.now += EVALUATION
            budget.after_evaluation(EVALUATION)
        budget.after_stage(stage_runner)
        if stage_runner.is_last:
            return stage_runner
        stage_runner.number = next(
            n for n in range(stage_runner.number + 1, len(stage_runner.stages)) if stage_runner.stages[n].steps
        )
        stage_runner.opened = opened(stage_runner)


def opened(stage_runner: StageRunner) -> Opened:
    """Return what is open for the stage under way, as far as a plan is concerned."""
    length = Length(stage_runner.stage.config.optimizer.epochs)
    return cast(Opened, SimpleNamespace(length=length))


def test_votes_go_on_in_the_steps_that_a_faster_run_has_time_for(clock: Clock) -> None:
    """Steps get shorter when blocks freeze: what is added to the plan is training like the rest of it."""
    budget = budget_of(clock, 60.0)
    given = budget.plan(stages(freeze="gradient-norm"))
    planned = given[0].config.optimizer.epochs
    stage_runner = follow(budget, clock, given, solve=SOLVE, step=lambda done: STEP if done < 100 else STEP / 5)
    lasted = stage_runner.stage.epochs
    cadence = Cadence.of(
        stage_runner.stage.config.freeze, steps_per_epoch=20, num_epochs=planned, plan=stage_runner.opened.length
    )
    assert lasted > 2 * planned
    assert cadence.epochs == lasted and cadence.num_epochs == planned
    assert cadence.votes(20 * (lasted - 1)) and not cadence.votes(20 * lasted)


@pytest.mark.parametrize("steps", [19, 20, 21, 60])
def test_the_settings_of_a_planned_stage_tell_its_epochs(steps: int) -> None:
    (stage,) = with_steps(stages(freeze="linear"), [steps])
    assert stage.steps == steps and stage.config.optimizer.epochs == stage.epochs == -(-steps // 20)


@pytest.mark.parametrize("seconds", [60.0, 600.0])
@pytest.mark.parametrize(
    ("solve", "step"),
    [
        (SOLVE, lambda done: STEP),
        (2 * SOLVE, lambda done: 3 * STEP),
        (SOLVE / 2, lambda done: STEP / 3),
        (SOLVE, lambda done: STEP if done < 100 else STEP / 5),
        (SOLVE, lambda done: STEP * (1 + done % 7) / 3),
    ],
    ids=["as expected", "slower", "faster", "faster from some step on", "uneven"],
)
@pytest.mark.parametrize("freeze", ["auto", "none"])
def test_a_run_ends_within_a_twentieth_of_its_budget(
    clock: Clock, freeze: str, solve: float, step: Callable[[int], float], seconds: float
) -> None:
    began, budget = clock.now, budget_of(clock, seconds)
    clock.now += 5.0
    planned = budget.plan(stages(freeze=freeze))
    stage_runner = follow(budget, clock, planned, solve=solve, step=step)
    spent = clock.now - began
    assert 0.95 * seconds <= spent + reserve_of(budget.seconds) <= 1.02 * seconds
    assert [stage.steps > 0 for stage in stage_runner.stages if stage.name != "back"][-1]
    assert budget.report()["time_budget"]["spent"] == spent
    assert sum(budget._spent) == pytest.approx(spent - 5.0)


def test_the_plan_is_told_before_it_starts_and_adds_up(clock: Clock) -> None:
    budget = budget_of(clock, 60.0)
    clock.now += 5.0
    budget.plan(stages(freeze="auto"))
    first, *rows, last = budget.describe()
    assert first == "plan for 60 s, from a guess:"
    assert [row.split()[0] for row in rows] == ["set-up", "solve", "tune", "solve", "finish"]
    assert sum(float(row.split()[1]) for row in rows) == pytest.approx(60.0, abs=0.3)
    assert float(last.split()[1]) == pytest.approx(60.0, abs=0.2)


def test_where_there_is_no_time_for_an_epoch_nothing_is_tuned(clock: Clock) -> None:
    budget = budget_of(clock, 12.0)
    stage_runner = follow(budget, clock, budget.plan(stages(freeze="auto")), solve=SOLVE, step=lambda done: STEP)
    assert [stage.steps for stage in stage_runner.stages] == [20, 0, 0, 0]
    assert "no time" in "\n".join(budget.describe())
    slow = budget_of(clock, 20.0)
    stage_runner = follow(slow, clock, slow.plan(stages(freeze="auto")), solve=3 * SOLVE, step=lambda done: STEP)
    assert [stage.steps for stage in stage_runner.stages] == [20, 0, 0, 0], (
        "a solution took longer, and what it left is no epoch"
    )


@pytest.mark.parametrize(("freeze", "what"), [("auto", "solving the head"), ("none", "a step")])
def test_a_budget_that_is_too_short_is_refused_with_the_seconds_that_are_needed(
    clock: Clock, freeze: str, what: str
) -> None:
    budget = budget_of(clock, 5.0, step=4.0)
    clock.now += 2.0
    with pytest.raises(UsageError, match=rf"--time-budget \(5s\) must be at least about 8s here, for set-up, {what}"):
        budget.plan(stages(freeze=freeze))


def test_a_budget_that_goes_on_counts_what_was_spent(clock: Clock) -> None:
    budget = budget_of(clock, 60.0)
    budget.plan(stages(freeze="auto"))
    clock.now += 20.0
    state = budget.state_dict()
    clock.now += 1000.0
    later = budget_of(clock, 60.0)
    clock.now += 3.0
    later.plan(stages(freeze="auto"))
    later.load_state_dict(state)
    assert later.elapsed() == 23.0
    assert later._planned == budget._planned


def test_a_budget_that_goes_on_knows_what_a_solution_took(clock: Clock) -> None:
    budget = budget_of(clock, 60.0)
    follow(budget, clock, budget.plan(stages(freeze="auto")), solve=2 * SOLVE, step=lambda done: STEP)
    later = budget_of(clock, 60.0)
    later.plan(stages(freeze="auto"))
    later.load_state_dict(budget.state_dict())
    assert later.expected.solve == pytest.approx(2 * SOLVE) and not later._guessed
    later.load_state_dict({key: value for key, value in budget.state_dict().items() if key != "solution"})


def test_trying_a_batch_leaves_the_model_as_it_was() -> None:
    chain = cut_into_blocks(build_model("shufflenet_v2_x0_5", num_classes=10, image_size=32).model)
    first, *others = chain.model.parameters()
    gradient = first.grad = torch.ones_like(first)
    before, random = parameter_digest(chain.model), torch.get_rng_state()
    with state_kept(chain.model):
        chain.model.train()
        chain(torch.randn(4, 3, 32, 32)).sum().backward()
        assert parameter_digest(chain.model) != before, "running statistics were not touched: this says nothing"
    assert parameter_digest(chain.model) == before and torch.equal(torch.get_rng_state(), random)
    assert first.grad is gradient and bool((gradient == 1).all())
    assert all(parameter.grad is None for parameter in others)


@pytest.mark.parametrize("seconds", [38.0, 40.0, 60.0])
def test_evaluations_longer_than_all_steps_leave_at_least_one_step(clock: Clock, seconds: float) -> None:
    budget = budget_of(clock, seconds, step=0.5, evaluation=28.0)
    budget.evaluate_every = 1
    clock.now += 5.0
    (planned,) = budget.plan([single_stage(from_dict({}), batches_per_epoch=4, epochs=1)])
    assert planned.steps >= 1


PRETRAINED: dict[str, Any] = {"freeze": "auto", "weights": "some.pt"}


def test_with_much_time_a_solution_may_come_before_tuning_too(clock: Clock) -> None:
    began, given = clock.now, stages(**PRETRAINED)
    budget = budget_of(clock, 60.0, trial=2.0)
    planned = budget.plan(given)
    assert [stage.name for stage in planned] == ["try", "solve", "tune", "solve", "back"]
    assert planned[0].steps == given[0].steps, "a trial is as long as ever"
    stage_runner = follow(budget, clock, planned, solve=SOLVE, step=lambda done: STEP)
    assert 0.9 * 60.0 <= clock.now - began + reserve_of(budget.seconds) <= 1.02 * 60.0
    assert stage_runner.stages[2].steps > 200


@pytest.mark.parametrize(
    ("seconds", "made"),
    [(10.0, "solve"), (16.0, "try solve tune"), (40.0, "try solve tune solve")],
)
def test_tuning_is_tried_only_where_an_epoch_of_it_has_time_too(clock: Clock, seconds: float, made: str) -> None:
    given = stages(**PRETRAINED)
    began, budget = clock.now, budget_of(clock, seconds, solve=SOLVE / 2, trial=1.0)
    planned = budget.plan(given)
    assert " ".join(stage.name for stage in planned if stage.steps) == made, "one solution is always made"
    trial = STEP / 2 + 2.0 / given[0].steps
    follow(budget, clock, planned, solve=SOLVE / 2, step=lambda done: trial if planned[0].steps else STEP)
    assert clock.now - began <= 1.02 * seconds


def test_a_solution_that_is_made_because_nothing_can_be_tried_is_in_the_plan(clock: Clock) -> None:
    budget = budget_of(clock, 12.0, trial=2.0)
    planned = budget.plan(early(8.0))
    assert [stage.steps > 0 for stage in planned] == [False, True, False, False, False]
    rows = [row.split() for row in budget.describe()[1:-1]]
    assert [row[0] for row in rows] == ["set-up", "try", "solve", "tune", "solve", "finish"]
    assert [row[-2:] == ["no", "time"] for row in rows] == [False, True, False, True, True, False]
    assert float(rows[2][1]) > SOLVE


WITH_PLAIN = replace(COSTS, plain=replace(COSTS, views=1))


def early(passes: float) -> tuple[Stage, ...]:
    config = from_dict(PRETRAINED)
    return stages_of(
        config, batches_per_epoch=200, guarded_batches=180, cut=0, deepest=5, costs=WITH_PLAIN, passes=passes
    )


def test_with_little_time_sgd_is_tried_before_a_head_is_solved_and_takes_what_is_left(clock: Clock) -> None:
    began, given = clock.now, early(8.0)
    assert [stage.name for stage in given] == ["try", "solve", "tune", "solve", "back"] and given[1].is_spare
    budget = budget_of(clock, 60.0, trial=2.0)
    planned = budget.plan(given)
    assert [row.split()[0] for row in budget.describe()[1:-1]] == ["set-up", "try", "tune", "solve", "finish"]
    assert budget._takes(planned, 1) == 0.0, "it is made only where nothing is tuned"
    trial = planned[0].steps * STEP / 2 + 2 * 2.0
    assert budget._takes(planned, 0) == pytest.approx(trial), "it is judged before and after"
    planned = with_steps(planned, [0 if stage.is_spare else stage.steps for stage in planned])
    stage_runner = follow(budget, clock, planned, solve=SOLVE, step=lambda done: STEP)
    assert 0.9 * 60.0 <= clock.now - began + reserve_of(budget.seconds) <= 1.02 * 60.0
    assert stage_runner.stages[2].steps > 180


def test_with_little_time_a_refused_trial_is_followed_by_a_solution_alone(clock: Clock) -> None:
    budget, stage_runner = budget_of(clock, 60.0, trial=2.0), cast(StageRunner, StageRunner.__new__(StageRunner))
    stage_runner.stages, stage_runner.number = budget.plan(early(8.0)), 0
    stage_runner.opened = opened(stage_runner)
    plain = budget._takes(stage_runner.stages, 3)
    stage_runner.solve_alone()
    budget.after_stage(stage_runner)
    assert [stage.steps > 0 for stage in stage_runner.stages] == [True, True, False, False, False], "nobody tunes"
    assert stage_runner.stages[1].worth == pytest.approx(2 * stage_runner.stages[3].worth), "twice as many views"
    guessed = module.UNMEASURED * SOLVE / 2 + module.UNMEASURED_SECONDS
    assert plain - EVALUATION == pytest.approx(guessed), "a guess, which may be too low, of half as many views"


@pytest.mark.parametrize(("spent", "left", "steps"), [(55.0, 5, [0, 63, 0, 0]), (65.0, 0, [0, 0, 200, 0])])
def test_where_time_runs_out_in_a_trial_what_it_has_begun_is_ended_or_the_head_solved(
    spent: float, left: int, steps: list[int], clock: Clock
) -> None:
    budget, stage_runner = budget_of(clock, 60.0, trial=2.0), cast(StageRunner, StageRunner.__new__(StageRunner))
    stage_runner.stages, stage_runner.number = budget.plan(early(8.0)), 0
    stage_runner.opened = opened(stage_runner)
    stage_runner.tune_at_once()
    clock.now += spent
    assert budget.after_stage(stage_runner) == [f"{left} s are left, for {sum(steps)} steps"]
    assert [stage.steps for stage in stage_runner.stages[1:]] == steps


def test_of_many_samples_the_tuning_is_judged_in_its_time(clock: Clock) -> None:
    config = from_dict(PRETRAINED)
    given = stages_of(
        config, batches_per_epoch=800, guarded_batches=720, cut=0, deepest=5, costs=WITH_PLAIN, passes=20.0
    )
    assert [stage.name for stage in given] == ["tune", "solve", "back"]
    plans = [budget_of(clock, 600.0, trial=trial).plan(given)[0].steps for trial in (0.0, 30.0)]
    step = STEP * given[0].config.optimizer.batch_size / 32
    assert plans[0] - plans[1] == pytest.approx(2 * 30.0 / step, abs=2)


def test_a_budget_worth_next_to_nothing_solves_alone() -> None:
    assert [stage.name for stage in early(1.5)] == ["solve"]


@pytest.mark.parametrize(
    ("seconds", "made", "spared"),
    [(14.0, "solve", 0), (20.0, "try tune", 0), (20.0, "try solve", 1)],
    ids=["no time for both", "blocks gain", "they do not"],
)
def test_where_a_trial_leaves_time_for_tuning_or_for_a_solution_it_tells_which(
    clock: Clock, seconds: float, made: str, spared: int
) -> None:
    began, given = clock.now, early(3.0)
    assert [stage.name for stage in given] == ["try", "solve", "tune", "back"], "a solution is no spare one of two"
    assert given[1].is_spare and given[1].config.data.mirror == "off"
    budget = budget_of(clock, seconds, trial=2.0)
    planned = budget.plan(given)
    if planned[0].steps:
        stage_runner = cast(StageRunner, StageRunner.__new__(StageRunner))
        stage_runner.stages, stage_runner.number = planned, 0
        stage_runner.opened = opened(stage_runner)
        clock.now += 4.0 + planned[0].steps * STEP / 2
        (stage_runner.solve_alone if spared else stage_runner.tune_at_once)()
        budget.after_stage(stage_runner)
        planned = stage_runner.stages
        after = with_steps(planned, [0, *(stage.steps for stage in planned[1:])])
        left = seconds - (clock.now - began) - sum(budget._takes(after, number) for number in (1, 2))
        assert left >= 0.0 and (spared or left < 2 * reserve_of(seconds)), "tuning takes all of it"
    assert " ".join(stage.name for stage in planned if stage.steps) == made


def test_a_trial_that_is_gone_on_from_counts_for_the_epoch_behind_which_a_head_is_solved(clock: Clock) -> None:
    budget, stage_runner = budget_of(clock, 60.0, trial=2.0), cast(StageRunner, StageRunner.__new__(StageRunner))
    stage_runner.stages, stage_runner.number = budget.plan(early(8.0)), 0
    stage_runner.opened = opened(stage_runner)
    stage_runner.tune_at_once()
    tune = stage_runner.stages[2]
    solution = module.UNMEASURED * SOLVE / 2 + module.UNMEASURED_SECONDS + EVALUATION
    whole = tune.steps_per_epoch * budget._with_evaluations(tune)
    clock.now += 60.0 - reserve_of(60.0) - solution - whole + 1.0
    budget.after_stage(stage_runner)
    tuned, solved = (stage_runner.stages[number].steps for number in (2, 3))
    assert solved and tuned < tune.steps_per_epoch
    trial = stage_runner.stages[0]
    assert tuned * 32 + trial.steps * trial.config.optimizer.batch_size >= 180 * 32


def test_a_step_of_smaller_batches_takes_as_much_less(clock: Clock) -> None:
    budget, given = budget_of(clock, 60.0), early(70.0)
    budget.plan(given)
    sizes = [stage.config.optimizer.batch_size for stage in given[:3:2]]
    per_image = [
        (budget._with_evaluations(stage) - EVALUATION / (1000 * stage.steps_per_epoch)) / size
        for stage, size in zip(given[:3:2], sizes, strict=True)
    ]
    assert sizes[0] == 16 < sizes[1] and per_image[0] == pytest.approx(per_image[1])


def test_a_text_has_no_trial_to_be_timed(tmp_path: Path) -> None:
    flags = "--model tiny-lm --data text --train-samples 64 --batch-size 8 --threads 1 --time-budget 1s --quiet".split()
    outcome = call("train", *flags, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and "--time-budget (1s) must be at least" in str(outcome)
