"""A run that solves, tunes and solves again is one run: the same bits, cached or not, stopped anywhere or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom, sizes

RUNS = Path(__file__).with_name("workers") / "staged.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def found(size: int, part: str, folder: Path) -> dict[str, Any]:
    """What rank 0 reports of a part of the worker."""
    result = mpirun(size, RUNS, args=[str(folder), part], timeout=300)
    assert result.returncode == 0, str(result)
    first: dict[str, Any] = result.ranks[0]
    return first


@pytest.mark.parametrize(("size", "part"), [(2, "stops"), (3, "stops"), seldom(2, "every-stop"), seldom(4, "stops")])
def test_runs_of_stages_are_equal_cached_or_not_and_stopped_in_any_stage_or_not(
    size: int, part: str, tmp_path: Path
) -> None:
    straight = found(size, part, tmp_path)["straight"]
    assert [stage["stage"] for stage in straight["stages"]] == ["solve", "tune", "solve"]
    cuts = [cut for _, _, cut in straight["cut_history"]]
    assert cuts[:2] == [5, 2] and cuts[-1] == 5, (
        "all frozen, tuned from the cut that freezes few parameters, all frozen"
    )
    assert len(cuts) > 3, "no vote has moved the cut: this test says little"
    starts = [step for _, step, _ in straight["cut_history"]]
    assert starts == sorted(starts) and straight["steps"] == sum(stage["steps"] for stage in straight["stages"])


@pytest.mark.parametrize("size", sizes(2, of=(2, 3)))
def test_each_part_can_be_left_out_and_what_tuning_spoils_is_taken_back(size: int, tmp_path: Path) -> None:
    first = found(size, "parts", tmp_path)
    solved, spoilt, without = first["solved"], first["spoilt"], first["without"]
    assert [stage["stage"] for stage in solved["stages"]] == ["solve"], "one epoch has room for one solution"
    assert [stage.get("kept") for stage in spoilt["stages"]] == [True, None, False]
    for key in ("test_accuracy", "head", "parameter_digest"):
        assert spoilt[key] == solved[key], f"what tuning spoilt was not taken back: {key}"
    assert first["unguarded"]["parameter_digest"] != solved["parameter_digest"], "there was nothing to take back"
    assert [cut for _, _, cut in without["no-votes"]["cut_history"]] == [5, 2, 5]
    assert [stage["stage"] for stage in without["no-last-solve"]["stages"]] == ["solve", "tune"]
    assert all("kept" not in stage for stage in first["unguarded"]["stages"])


@pytest.mark.parametrize("size", sizes(3, of=(2, 3)))
def test_a_run_that_is_given_a_time_keeps_to_it(size: int, tmp_path: Path) -> None:
    runs = found(size, "budgets", tmp_path)
    timed, resumed, trained = runs["timed"], runs["resumed"], runs["trained"]
    for name, run in runs.items():
        assert 3.0 < run["time_budget"]["spent"] < 4.2, f"{name}: {run['time_budget']}"
    assert [stage["stage"] for stage in timed["stages"]] == ["solve", "tune", "solve"]
    assert timed["stages"][1]["steps"] != timed["time_budget"]["planned"][1]["steps"], "clocks have changed nothing"
    assert resumed["time_budget"]["planned"] == timed["time_budget"]["planned"], "a resumed run has its own plan"
    assert trained["steps"] != trained["time_budget"]["planned"][0]["steps"]
    assert trained["cut_history"][-1][2] > 0
