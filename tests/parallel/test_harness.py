"""What runs ranks for tests: a job's end is its result; a check that does not hold is named and harms no other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.parallel import standing
from tests.parallel.mpirun import TIMED_OUT, mpirun
from tests.parallel.sizes import seldom

ENDING = Path(__file__).with_name("workers") / "ending.py"

pytestmark = pytest.mark.mpi


@pytest.mark.standing
@pytest.mark.parametrize(
    ("size", "check", "words"),
    [
        seldom(2, "others_wait_in", ["rank 0:", "assert world.rank > 0", "rank 1 did not come to the end", "barrier"]),
        (1, "leaves_something", ["rank 0 left port ", "left a file: forgotten.txt", "left a process: sleep 3600"]),
    ],
)
def test_a_check_that_does_not_hold_is_named_and_the_next_one_is_made(
    check: str, words: list[str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(AssertionError) as raised:
        standing.call(size, "failing", f"check_that_{check}", deadline=30.0)
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"
    standing.call(size, "failing", "check_that_holds")


@pytest.mark.standing
@pytest.mark.parametrize("size", [1])
def test_what_a_check_changes_in_its_process_is_restored(size: int) -> None:
    standing.call(size, "failing", "check_that_changes_its_process")
    standing.call(size, "failing", "check_that_finds_its_process_as_it_was")


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("raise", 1, "LookupError: on the last rank"),
        ("kill", 128 + signal.SIGKILL, "signal 9"),
    ],
)
def test_the_end_of_one_rank_is_the_jobs(mode: str, code: int, words: str) -> None:
    result = mpirun(2, ENDING, args=[mode], timeout=60, every_rank_reports=False)
    assert result.returncode == code and words in result.stderr, str(result)
    assert ("Traceback" in result.stderr) == (mode == "raise"), str(result)


def test_a_job_that_hangs_is_ended_at_its_deadline_and_shows_its_stacks() -> None:
    result = mpirun(2, ENDING, timeout=3, args=["hang"], every_rank_reports=False)
    assert result.returncode == TIMED_OUT and 'ending.py", line' in result.stderr, str(result)


@pytest.mark.parametrize(
    ("mode", "message"),
    [("first", "1 of 2 ranks reported"), ("orphan", r"still alive after the job's end: .*sleep 3600")],
)
def test_a_missing_report_and_a_process_left_behind_fail_the_test(
    mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.parallel.mpirun.GRACE_SECONDS", 1.0)
    with pytest.raises(AssertionError, match=message):
        mpirun(2, ENDING, timeout=60, args=[mode])
