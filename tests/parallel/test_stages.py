"""A run that solves, tunes and solves again is one run: the same bits, cached or not, stopped anywhere or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

RUNS = Path(__file__).with_name("workers") / "staged.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", sizes(2, 3))
def test_runs_of_stages_are_equal_cached_or_not_and_stopped_in_any_stage_or_not(size: int, tmp_path: Path) -> None:
    result = mpirun(size, RUNS, args=[str(tmp_path)], timeout=300)
    assert result.returncode == 0, str(result)
    first = result.ranks[0]
    straight, solved, spoilt = first["straight"], first["solved"], first["spoilt"]
    assert [stage["stage"] for stage in straight["stages"]] == ["solve", "tune", "solve"]
    cuts = [cut for _, _, cut in straight["cut_history"]]
    assert cuts[:2] == [5, 2] and cuts[-1] == 5, (
        "all frozen, tuned from the cut that freezes few parameters, all frozen"
    )
    assert len(cuts) > 3, "no vote has moved the cut: this test says little"
    starts = [step for _, step, _ in straight["cut_history"]]
    assert starts == sorted(starts) and straight["steps"] == sum(stage["steps"] for stage in straight["stages"])

    assert [stage["stage"] for stage in solved["stages"]] == ["solve"], "one epoch has room for one solution"
    assert [stage.get("kept") for stage in spoilt["stages"]] == [True, None, False]
    for key in ("test_accuracy", "head", "parameter_digest"):
        assert spoilt[key] == solved[key], f"what tuning spoilt was not taken back: {key}"
    assert first["unguarded"]["parameter_digest"] != solved["parameter_digest"], "there was nothing to take back"
    without = first["without"]
    assert [cut for _, _, cut in without["no-votes"]["cut_history"]] == [5, 2, 5]
    assert [stage["stage"] for stage in without["no-last-solve"]["stages"]] == ["solve", "tune"]
    assert all("kept" not in stage for stage in first["unguarded"]["stages"])

    timed, resumed, trained = first["timed"], first["resumed"], first["trained"]
    for name, found in (("timed", timed), ("resumed", resumed), ("trained", trained)):
        assert 3.0 < found["time_budget"]["spent"] < 4.2, f"{name}: {found['time_budget']}"
    assert [stage["stage"] for stage in timed["stages"]] == ["solve", "tune", "solve"]
    assert timed["stages"][1]["steps"] != timed["time_budget"]["planned"][1]["steps"], "clocks have changed nothing"
    assert resumed["time_budget"]["planned"] == timed["time_budget"]["planned"], "a resumed run has its own plan"
    assert trained["steps"] != trained["time_budget"]["planned"][0]["steps"]
    assert trained["cut_history"][-1][2] > 0
