"""One row of the bench, from its command line through mpirun to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.parts.peers import read_timings
from tests.parallel.mpirun import ROOT, environment

pytestmark = [pytest.mark.mpi]


@pytest.mark.seldom
def test_a_row_is_measured_on_two_ranks_and_written(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "analysis.bench", "--quick", "--only", "allreduce_bytes", "--out", str(out)]
    variables = environment({}, out=tmp_path, timeout=120)
    job = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    (row,) = json.loads(out.read_text())
    assert (row["name"], row["ratio"], row["ok"], row["n"]) == ("allreduce_bytes", 1.0, True, 6)
    assert "allreduce_bytes" in job.stdout
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.seldom
def test_each_kind_of_step_is_timed_and_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analysis.step_costs", "--quick", "--results", str(tmp_path)]
    variables = environment({}, out=tmp_path, timeout=240)
    job = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    (timings,) = read_timings(tmp_path, 32).values()
    assert set(timings) == {"live0", "live1", "cached1", "ddp"}
    assert all(seconds and min(seconds) > 0 for seconds in timings.values())
