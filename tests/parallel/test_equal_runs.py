"""Runs that differ in what changes no bit, all of them in one job of three ranks; see workers/equal_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun

CHECKS = Path(__file__).with_name("workers") / "checks.py"

pytestmark = pytest.mark.mpi


def test_a_cache_and_the_number_of_evaluations_change_no_bit(tmp_path: Path) -> None:
    result = mpirun(3, CHECKS, args=[str(tmp_path), "equal_runs"], timeout=150)
    assert result.returncode == 0, str(result)
    assert [len(rank["checks"]) for rank in result.ranks] == [3] * 3
