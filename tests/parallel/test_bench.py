"""One row of the bench, from its command line through mpirun to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import bench

pytestmark = [pytest.mark.mpi]


@pytest.mark.seldom
def test_a_row_is_measured_on_two_ranks_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    code = bench.main(["--quick", "--only", "allreduce_bytes", "--out", str(out)])
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    (row,) = json.loads(out.read_text())
    assert (row["name"], row["ratio"], row["ok"], row["n"]) == ("allreduce_bytes", 1.0, True, 6)
    assert "allreduce_bytes" in said.out
    assert list(tmp_path.iterdir()) == [out]
