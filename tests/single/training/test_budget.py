"""One budget for work and for seconds: the rest, the cost of verbs, and the number of affordable steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import UsageError
from hvfreeze.training import budget as module
from hvfreeze.training.budget import RESERVED, RESERVED_SECONDS, Budget, Pace, Work
from tests.program import call

TABLE = Work(forward=1e9, rows=100.0, evaluated=10.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands unless a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_epochs_are_a_limit_of_work_that_no_clock_changes(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), limit=1000.0)
    budget.begin()
    clock.now = 1e6
    budget.end(300.0)
    assert budget.left() == 700.0 and budget.deadline(100.0) is None
    again = Budget(work=TABLE, world=SoloWorld(), limit=1000.0)
    again.recall(budget.mark())
    assert again.left() == 700.0


def test_seconds_become_work_by_the_measured_rate(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), seconds=100.0, rate=50.0, started=0.0)
    clock.now = 10.0
    budget.begin()
    kept = 100.0 - RESERVED_SECONDS - RESERVED * 100.0
    assert budget.left() == pytest.approx((kept - 10.0) * 50.0 - TABLE.evaluated)
    clock.now = 30.0
    # Half as fast as was timed: the first measurement counts as one second.
    budget.end(500.0)
    rate = (50.0 + 500.0) / 21.0
    assert budget.rate == pytest.approx(rate) and budget.deadline(rate) == pytest.approx(31.0)
    again = Budget(work=TABLE, world=SoloWorld(), seconds=100.0, rate=7.0, started=0.0)
    again.load_state_dict(budget.state_dict())
    again.recall(budget.mark())
    assert (again.left(), again.rate) == (budget.left(), budget.rate)
    clock.now += 5.0
    assert again.elapsed() == 65.0, "the seconds of the job before count, and those of this one with its set-up"


def test_the_table_counts_frozen_blocks_updates_and_pairs_of_rows() -> None:
    assert Work(forward=1e9).step(8) == 8 * 4
    assert Work(forward=1e9, frozen=0.5).step(8) == 8 * 2.5
    assert Work(forward=1e9, parameters=10**6).step(8) == 8 * 4 + 1.0
    linear, few, many = (Work(forward=1e9, rows=100.0, kernel=kernel) for kernel in (None, (500, 100), (500, 500_000)))
    assert 100 < few.head_fit < linear.head_fit < many.head_fit
    assert Work(forward=1e9, rows=100.0, looks=2).head_fit == pytest.approx(linear.head_fit + 100)


def test_steps_end_at_the_deadline_whatever_they_turn_out_to_take(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), seconds=100.0, started=0.0)
    pace, planned, made = Pace(budget, 20.0, steps_per_evaluation=1e9, evaluation_seconds=0.0), 1000, 0
    while made < planned:
        made += 1
        clock.now += 0.1 if made < 50 else 0.2
        planned = pace.after_step(made, planned)
    assert 19.0 < clock.now <= 20.3 and 110 < made < 140


def test_seconds_of_evaluations_are_no_seconds_of_steps(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), seconds=100.0, started=0.0)
    pace, planned, made = Pace(budget, 20.0, steps_per_evaluation=10, evaluation_seconds=0.0), 1000, 0
    while made < planned:
        made += 1
        clock.now += 0.1
        planned = pace.after_step(made, planned)
        if made % 10 == 0 and made < planned:
            clock.now += 1.0
            pace.after_evaluation(1.0)
    assert 18.0 < clock.now <= 21.5


def test_no_evaluation_begins_that_would_end_after_the_deadline(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), seconds=100.0, started=0.0)
    pace = Pace(budget, 20.0, steps_per_evaluation=10, evaluation_seconds=5.0)
    clock.now = 15.0
    assert pace.allows_evaluation()
    pace.after_evaluation(6.0)
    assert not pace.allows_evaluation(), "the last one is made at the deadline"


def test_a_time_that_is_too_short_is_refused_with_one_that_is_not(clock: Any) -> None:
    budget = Budget(work=TABLE, world=SoloWorld(), seconds=3.0, rate=10.0, started=0.0)
    budget.check(10.0, what="a step")
    with pytest.raises(UsageError, match=r"--time-budget \(3s\) must be at least about \d+s here.*a step"):
        budget.check(100.0, what="a step")


@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=["new", "nothing to resume"])
def test_the_program_refuses_a_time_that_is_too_short_and_leaves_no_directory(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "reserve_of", lambda seconds: 60.0)
    small = ["--model", "tests.kept.small_model:small", "--train-samples", "60", "--batch-size", "8", "--threads", "1"]
    told = call("train", *small, "--time-budget", "30s", "--run-dir", str(tmp_path / "run"), *flags)
    assert told.returncode == 2 and "--time-budget (30s) must be at least about" in told.messages[0], str(told)
    assert not (tmp_path / "run").exists()
