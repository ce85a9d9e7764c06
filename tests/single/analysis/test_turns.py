"""Jobs take turns: whoever waits is stopped, and a job that ends instead is told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from analysis.parts.networks.turns import Turns
from hvfreeze.comm.end_guard import is_stopped
from hvfreeze.errors import RefusedError

RANK = """
from pathlib import Path
import sys, time
from analysis.parts.networks.turns import leave_turn
job, rank, folder, fails = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
for turn in range(3):
    leave_turn(folder, job, rank, turn)
    if fails == f"{rank}.{turn}":
        raise SystemExit(7)
    with (folder / "log").open("a") as log:
        log.write(f"{job} {rank} {turn}\\n")
"""
LAUNCHER = """
import subprocess, sys
job, folder, fails = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, "-m", "turn_rank", job, str(rank), folder, fails]) for rank in range(2)]
raise SystemExit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begun(name: str, folder: Path, stack: ExitStack, fails: str = "never") -> Turns:
    (folder / "turn_rank.py").write_text(RANK)
    variables = {"PYTHONPATH": f"{Path(__file__).resolve().parents[3]}:{folder}"}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, name, str(folder), fails], env=variables, start_new_session=True
    )
    job = Turns(name, folder, 2, process)
    stack.enter_context(job.ended())
    job.wait(0)
    return job


def lines(folder: Path) -> list[str]:
    path = folder / "log"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_job_works_in_its_turn_alone(tmp_path: Path, stack: ExitStack) -> None:
    one, other = (begun(name, tmp_path, stack) for name in ("one", "other"))
    assert lines(tmp_path) == []
    one.advance()
    one.wait(1)
    other.advance()
    other.wait(1)
    other.advance()
    other.wait(2)
    done = ["one 0 0", "one 1 0", *(f"other {rank} {turn}" for rank in range(2) for turn in range(2))]
    assert lines(tmp_path) == done
    other.conclude()
    assert other.process.returncode == 0
    assert len(lines(tmp_path)) == 8
    assert [is_stopped(process) for process in one._ranks()] == [True, True]


def test_a_job_that_fails_in_its_turn_is_told_and_its_other_rank_is_ended(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = begun("failing", tmp_path, stack, fails="1.1")
        job.advance()
        job.wait(1)
        job.advance()
        time.sleep(0.2)
        job.process.kill()
        with pytest.raises(RefusedError, match="the job of failing ended with code -9"):
            job.wait(2)
    deadline = time.monotonic() + 20
    while job._ranks() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job._ranks() == []


def test_a_job_that_hangs_is_told(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    job = begun("slow", tmp_path, stack)
    monkeypatch.setattr("analysis.parts.networks.turns.SECONDS", 0.1)
    with pytest.raises(RefusedError, match="the job of slow hangs"):
        job.wait(1)


def test_the_last_turn_ends_a_job_or_tells_its_code(tmp_path: Path, stack: ExitStack) -> None:
    job = begun("last", tmp_path, stack, fails="0.2")
    for turn in (1, 2):
        job.advance()
        job.wait(turn)
    with pytest.raises(RefusedError, match="the job of last ended with code 7"):
        job.conclude()
