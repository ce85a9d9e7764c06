"""A rank that stops or does not come, anywhere between the job's start and its end: who is named, and when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun

WORKER = Path(__file__).with_name("workers") / "stalling.py"
LIMIT = 2

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


@pytest.mark.parametrize(
    ("size", "culprit", "stage", "fault", "waits_in"),
    [
        (3, 0, "start", "stop", "start"),
        (2, 0, "collective", "stop", "loss"),
        (3, 2, "collective", "spin", "loss"),
        (4, 3, "wire", "stop", "wire.activations from rank 3"),
        (2, 1, "close", "stop", "barrier.close"),
        (2, 0, "leave", "stop", "close"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_ends_the_job(
    size: int, culprit: int, stage: str, fault: str, waits_in: str
) -> None:
    result = mpirun(
        size,
        WORKER,
        timeout=90,
        args=[str(culprit), stage, fault],
        env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT)},
        every_rank_reports=False,
    )
    assert result.returncode == 6, str(result)
    said = [line for line in result.stderr.splitlines() if line.startswith("hvfreeze: error: ")]
    assert len(said) == 1 and "Traceback" not in result.stderr, str(result)
    why = {"stop": "which gives no sign of life", "spin": "which computes or waits for something else"}[fault]
    match = re.fullmatch(
        rf"hvfreeze: error: rank \d on \S+ waited (\d+) s in '{waits_in}' for rank {culprit}( on \S+)?, {why}; set .*",
        said[0],
    )
    assert match, str(result)
    assert int(match[1]) <= LIMIT + 10, str(result)


def test_a_world_that_is_not_closed_does_not_disturb_the_exit() -> None:
    result = mpirun(2, WORKER.with_name("unclosed.py"), timeout=60)
    assert result.returncode == 0, result
    assert result.stderr == "", result
