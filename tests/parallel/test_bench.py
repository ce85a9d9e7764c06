"""One row of the bench, from its command line through mpirun to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
