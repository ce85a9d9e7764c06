"""What runs are compared with, and what a comparison says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvfreeze.report.comparison import compare, name_of, spread
from hvfreeze.report.tables import percent, seconds, shown, summary_table
from hvfreeze.runs.reading import load_run, load_runs
from tests.single.report.run_directories import groups_of, vote, write_run


def test_runs_that_differ_in_the_seed_only_are_one_group(tmp_path: Path) -> None:
    flags = ({"seed": 1}, {"seed": 2, "data_seed": 5}, {"seed": 1, "lr": 0.5}, {"seed": 3, "finished": False})
    groups = groups_of(tmp_path, {f"work-seed{number}": leaves for number, leaves in enumerate(flags)})
    assert [[run.name for run in group.runs] for group in groups] == [
        ["work-seed0", "work-seed1"],
        ["work-seed2"],
        ["work-seed3"],
    ]
    assert groups[0].name == "work"


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("digits-1", "digits-2", "digits"),
        ("photos1", "photos2", "photos"),
        ("loss_a", "loss_b", "loss"),
        ("full-s0", "full-s1", "full"),
        ("full s10", "full s12", "full"),
        ("full_seed3", "full_seed4", "full"),
        ("full.seed", "full.seed1", "full"),
        ("a/full", "a/voted", "a"),
        ("seed1", "seed2", "seed1"),
        ("s1-full", "s2-full", "s1-full"),
    ],
)
def test_the_name_of_a_group_loses_a_seed_and_no_other_letter(
    first: str, second: str, name: str, tmp_path: Path
) -> None:
    run = load_run(write_run(tmp_path / "run", accuracies=[0.1]))
    assert name_of([replace(run, name=first), replace(run, name=second)]) == name


@pytest.mark.parametrize(("speed", "saved"), [(1.25, 0.2), (0.5, -1)])
def test_speed_up_and_time_saved_say_the_same_in_two_forms(speed: float, saved: float, tmp_path: Path) -> None:
    groups = groups_of(tmp_path, {"full": {}, "other": {"speed": speed, "freeze": "linear"}})
    comparison = compare(groups[1], groups)
    assert comparison is not None and compare(groups[0], groups) is None
    assert comparison.baseline.name == "full"
    assert comparison.speed_up.mean == pytest.approx(speed) and comparison.time_saved.mean == pytest.approx(saved)


@pytest.mark.parametrize(
    "other",
    [
        {"epochs": 7},
        {"batch_size": 64},
        {"size": 4},
        {"precision": "bfloat16"},
        {"environment": {"processor": "another"}},
        {"environment": {"hosts": ["node0", "node1"]}},
        {"finished": False},
        {"cache": "auto"},
        {"shadow": "linear"},
    ],
)
def test_a_run_of_other_work_is_no_baseline(tmp_path: Path, other: dict[str, object]) -> None:
    groups = groups_of(tmp_path, {"full": other, "voted": {"freeze": "linear"}})
    assert compare(groups[1], groups) is None


@pytest.mark.parametrize("flags", [{"time_budget": "20s"}, {"early_stop": 2, "validation_fraction": 0.1, "epochs": 9}])
def test_runs_that_end_by_themselves_after_other_steps_are_not_compared(
    tmp_path: Path, flags: dict[str, object]
) -> None:
    """Both take all of a time budget, however fast their steps are."""
    others = {
        "more": {"accuracies": [0.1, 0.2], "speed": 2, "freeze": "linear", **flags},
        "as-many": {"speed": 2, "freeze": "geometric", **flags},
    }
    groups = groups_of(tmp_path, {"full": flags, **others})
    compared = [compare(group, groups) for group in groups]
    assert compared[1] is None and compared[2] is not None and compared[2].speed_up.mean == pytest.approx(2)


def test_a_run_is_compared_with_the_baseline_of_its_seed(tmp_path: Path) -> None:
    full = {f"full-{s}": {"seed": s, "speed": 1 + s} for s in (0, 1)}
    groups = groups_of(tmp_path, full | {f"voted-{s}": {"seed": s, "speed": 4.0, "freeze": "linear"} for s in (0, 1)})
    comparison = compare(groups[1], groups)
    assert comparison is not None
    assert (comparison.speed_up.low, comparison.speed_up.high, comparison.speed_up.n) == pytest.approx((2, 4, 2))
    (alone,) = groups_of(tmp_path, {"voted-9": {"seed": 9, "freeze": "linear"}})
    against_mean = compare(alone, groups)
    assert against_mean is not None and against_mean.speed_up.mean == pytest.approx(0.75)


def test_a_mean_is_shown_with_its_range_and_n_with_its_name(tmp_path: Path) -> None:
    assert shown(spread([0.5, 0.6]), percent) == "55.0 % (50.0 to 60.0)"
    assert shown(spread([0.5, 0.5]), percent) == "50.0 %"
    assert [seconds(value) for value in (1.234, 12.34, 1234.5)] == ["1.23 s", "12.3 s", "1234 s"]
    full = {f"full-{s}": {"accuracies": [0.9 + s / 100], "seed": s} for s in (0, 1)}
    table = summary_table(groups_of(tmp_path, full))
    row = dict(zip(table.columns, table.rows[0]))
    assert row["Run"] == "full (2 seeds)"
    assert row["Accuracy"] == "90.5 % (90.0 to 91.0)"
    assert row["Speed-up"] == "baseline"
    assert row["Allreduce"] == "10.0 MB"


def test_a_run_whose_blocks_are_frozen_by_its_strategy_is_no_baseline(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "a", accuracies=[0.5])
    trunk = write_run(
        tmp_path / "b", accuracies=[0.5], decisions=[vote(1, before=0, after=5, proposals=[5], weights=[1.0])]
    )
    assert [run.is_baseline for run in load_runs([plain, trunk])] == [True, False]
