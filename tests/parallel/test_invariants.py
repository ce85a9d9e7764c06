"""What must hold at 1, 2, 3 and 4 ranks; each worker makes many checks in one start, and names the one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom

WORKERS = Path(__file__).with_name("workers")

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_of_a_users_own_loop_keep_replicas_equal_and_frozen_blocks_still(size: int) -> None:
    result = mpirun(size, WORKERS / "invariants.py", timeout=150)
    assert result.returncode == 0, result
    assert all(len(rank["checks"]) == 14 for rank in result.ranks), result


@pytest.mark.parametrize(("size", "stops"), [(1, "some"), (2, "some"), (3, "some"), (4, "some"), seldom(2, "all")])
def test_equal_runs_are_equal_and_a_resumed_run_is_the_uninterrupted_one(size: int, stops: str, tmp_path: Path) -> None:
    result = mpirun(size, WORKERS / "runs.py", args=[str(tmp_path), stops], timeout=280)
    assert result.returncode == 0, result
    history = result.ranks[0]["scheduled"]
    assert history[-1][2] > history[0][2], f"the cut never moved, so nothing was shown: {history}"
