"""A rank that stops or does not come, anywhere between the job's start and its end: who is named, and when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.faulted import only_message
from tests.parallel.mpirun import Result, mpirun
from tests.parallel.sizes import seldom

WORKER = Path(__file__).with_name("workers") / "stalling.py"
LIMIT = 2
TO_START = 120
TO_END = 240
"""Seconds for a whole job, also where other tests leave it little time."""
Case = tuple[int, int, str, str]
"""Ranks, the rank with the fault, the stage of the job's life, and the fault."""

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def faulty(case: Case) -> Result:
    size, culprit, stage, fault = case
    return mpirun(
        size,
        WORKER,
        timeout=TO_END,
        args=[str(culprit), stage, fault, str(LIMIT)],
        env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT if stage == "start" else TO_START)},
        every_rank_reports=False,
    )


REASONS = {"stop": "which does not respond", "spin": "which is computing or waits for something else"}


@pytest.mark.parametrize(
    ("case", "waits_in"),
    [
        ((2, 0, "start", "stop"), "start"),
        ((2, 1, "collective", "stop"), "loss"),
        seldom((3, 2, "collective", "spin"), "loss"),
        seldom((2, 0, "shutdown", "stop"), "close"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_ends_the_job(case: Case, waits_in: str) -> None:
    result = faulty(case)
    assert result.returncode == 6, str(result)
    who = rf"in '{waits_in}' for rank {case[1]}( on \S+)?, {REASONS[case[3]]}; .* sets the limit"
    assert re.fullmatch(rf"hvfreeze: error: rank \d on \S+ has waited \d+ s {who}", only_message(result)), str(result)


@pytest.mark.parametrize(("culprit", "stage"), [(1, "import"), (0, "start"), seldom(1, "exit")])
def test_an_interrupt_of_one_rank_as_it_begins_or_ends_is_the_jobs(culprit: int, stage: str, tmp_path: Path) -> None:
    program = ["train", "--model", "shufflenet_v2_x0_5", "--epochs", "1", "--train-samples", "64"]
    program += ["--batch-size", "16", "--run-dir", str(tmp_path)]
    worker = WORKER.with_name("interrupted.py")
    result = mpirun(2, worker, timeout=90, args=[str(culprit), stage, *program], every_rank_reports=False)
    if stage == "exit":
        assert result.returncode == 0 and "Traceback" not in result.stderr, str(result)
    else:
        assert result.returncode == 130, str(result)
        assert "hvfreeze: interrupted" in result.stderr and "waited" not in result.stderr, str(result)


@pytest.mark.seldom
def test_a_rank_that_imports_waits_for_nobody_and_a_world_that_is_not_closed_does_not_disturb_the_exit() -> None:
    result = mpirun(2, WORKER.with_name("unclosed.py"), timeout=60)
    assert result.returncode == 0 and result.stderr == "", result
    assert [rank["imported"] for rank in result.ranks] == [True, True]
