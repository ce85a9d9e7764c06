from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import TIMED_OUT, Launcher, mpirun

ALLREDUCE = Path(__file__).with_name("workers") / "allreduce.py"

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_sees_the_sum_of_all_ranks(size: int) -> None:
    result = mpirun(size, ALLREDUCE, timeout=60)
    assert result.returncode == 0, str(result)
    assert [rank["total"] for rank in result.ranks] == [size * (size + 1) // 2] * size
    assert [(rank["size"], rank["local_size"]) for rank in result.ranks] == [(size, size)] * size


def test_horovodrun_starts_the_same_job() -> None:
    result = mpirun(2, ALLREDUCE, timeout=60, launcher="horovodrun")
    assert result.returncode == 0, str(result)
    assert [rank["total"] for rank in result.ranks] == [3, 3]


def test_ranks_get_no_secrets_and_no_other_jobs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_ACCESS_TOKEN", "x")
    monkeypatch.setenv("OMPI_UNIVERSE_SIZE_OF_ANOTHER_JOB", "7")
    result = mpirun(1, ALLREDUCE, timeout=60, env={"ADDED": "1", "HOME": None})
    assert result.returncode == 0, str(result)
    variables = result.ranks[0]["variables"]
    assert "ADDED" in variables
    assert not {"SOME_ACCESS_TOKEN", "OMPI_UNIVERSE_SIZE_OF_ANOTHER_JOB", "HOME"} & set(variables)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_job_that_hangs_is_ended_at_its_deadline_and_shows_its_stacks(launcher: Launcher) -> None:
    result = mpirun(2, ALLREDUCE, timeout=10, args=["hang"], every_rank_reports=False, launcher=launcher)
    assert result.returncode == TIMED_OUT, str(result)
    assert 'allreduce.py", line' in result.stderr, str(result)


def test_a_rank_without_report_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="1 of 2 ranks reported"):
        mpirun(2, ALLREDUCE, timeout=60, args=["silent"])


def test_a_process_left_behind_fails_the_test_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parallel.mpirun.GRACE_SECONDS", 1.0)
    with pytest.raises(AssertionError, match=r"still alive after the job's end: .*sleep 3600"):
        mpirun(2, ALLREDUCE, timeout=60, args=["orphan"])
