"""What is wrong with a script of one's own ends in one message and the whole job's exit code, never in a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom

WORKER = Path(__file__).with_name("workers") / "own_mistakes.py"

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("mistake", "start", "code", "message"),
    [
        seldom(
            "a cut of unknown blocks", "running", 2, "cut (1): freezing starts before the first forward pass of Own"
        ),
        (
            "other layers on one rank",
            "not yet",
            2,
            "second.bias is 'float32 [2]' on rank 0 and 'float32 [3]' on",
        ),
        seldom("clipped too early", "running", 2, "call synchronize() before you clip"),
        ("one rank fails", "running", 1, "nobody expected this"),
    ],
)
def test_a_mistake_ends_the_job_with_its_message(mistake: str, start: str, code: int, message: str) -> None:
    result = mpirun(2, WORKER, args=[mistake, start], timeout=60, every_rank_reports=False)
    assert result.returncode == code, result
    assert message in result.stderr, result
    assert ("Traceback" in result.stderr) == (code == 1), result
    if mistake in ("a cut of unknown blocks", "other layers on one rank"):
        assert result.stderr.count("hvfreeze: error:") == 1, result


def test_one_process_is_told_without_a_traceback() -> None:
    result = mpirun(1, WORKER, args=["a cut of unknown blocks", "not yet"], timeout=60, every_rank_reports=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr and "example=" in result.stderr, result
