"""A rank that stops or does not come, anywhere between the job's start and its end: who is named, and when."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.mpirun import Result, mpirun

WORKER = Path(__file__).with_name("workers") / "stalling.py"
LIMIT = 2
TO_START = 60

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def faulty(size: int, culprit: int, stage: str, fault: str, **options: Any) -> Result:
    limit = LIMIT if stage == "start" else TO_START
    return mpirun(
        size,
        WORKER,
        timeout=90,
        args=[str(culprit), stage, fault, str(LIMIT)],
        env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(limit)},
        every_rank_reports=False,
        **options,
    )


def only_message(result: Result) -> str:
    said = [line for line in result.stderr.splitlines() if line.startswith("hvfreeze: error: ")]
    assert len(said) == 1 and "Traceback" not in result.stderr, str(result)
    return said[0]


@pytest.mark.parametrize(
    ("size", "culprit", "stage", "fault", "waits_in"),
    [
        (3, 0, "start", "stop", "start"),
        (2, 0, "collective", "stop", "loss"),
        (3, 2, "collective", "spin", "loss"),
        (4, 3, "wire", "stop", "wire.activations from rank 3"),
        (2, 1, "close", "stop", "barrier.close"),
        (3, 0, "shutdown", "stop", "close"),
        (2, 0, "leave", "stop", "close"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_ends_the_job(
    size: int, culprit: int, stage: str, fault: str, waits_in: str
) -> None:
    result = faulty(size, culprit, stage, fault)
    assert result.returncode == 6, str(result)
    why = {"stop": "which gives no sign of life", "spin": "which computes or waits for something else"}[fault]
    match = re.fullmatch(
        rf"hvfreeze: error: rank \d on \S+ waited (\d+) s in '{waits_in}' for rank {culprit}( on \S+)?, {why}; set .*",
        only_message(result),
    )
    assert match, str(result)
    assert int(match[1]) <= LIMIT + 10, str(result)


@pytest.mark.parametrize(
    ("size", "culprit", "stage"), [(2, 0, "left"), (3, 1, "left"), (3, 0, "exit"), (2, 1, "teardown")]
)
def test_a_rank_that_is_stopped_when_nobody_is_left_to_notice_is_named_and_ends_the_job(
    size: int, culprit: int, stage: str
) -> None:
    # A copy of a standing process ends without taking its modules apart.
    result = faulty(size, culprit, stage, "stop", fresh=stage == "teardown")
    assert result.returncode == 128 + signal.SIGKILL, str(result)
    match = re.match(
        rf"hvfreeze: error: rank {culprit} on \S+ was stopped for (\d+) s after it had left MPI", only_message(result)
    )
    assert match, str(result)
    assert LIMIT <= int(match[1]) <= LIMIT + 10, str(result)


@pytest.mark.parametrize(("size", "culprit", "stage"), [(2, 1, "start"), (3, 0, "start"), (3, 2, "leave")])
def test_an_interrupt_of_one_rank_while_mpi_begins_or_ends_is_the_jobs(
    size: int, culprit: int, stage: str, tmp_path: Path
) -> None:
    program = [
        "train",
        "--epochs",
        "1",
        "--train-samples",
        "64",
        "--batch-size",
        "16",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    worker = WORKER.with_name("interrupted.py")
    result = mpirun(size, worker, timeout=90, args=[str(culprit), stage, *program], every_rank_reports=False)
    assert result.returncode == 130, str(result)
    assert "hvfreeze: interrupted" in result.stderr and "waited" not in result.stderr, str(result)


def test_a_world_that_is_not_closed_does_not_disturb_the_exit() -> None:
    result = mpirun(2, WORKER.with_name("unclosed.py"), timeout=60)
    assert result.returncode == 0, result
    assert result.stderr == "", result
