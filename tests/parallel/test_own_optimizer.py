"""`DistributedOptimizer` in place of Horovod's; each start makes many checks and names the one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom

WORKER = Path(__file__).with_name("workers") / "own_optimizer.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(("size", "horovod"), [(1, "not yet"), (2, "running"), (3, "running"), seldom(4, "not yet")])
def test_a_script_that_wraps_its_optimizer_trains_as_before_and_freezes(size: int, horovod: str) -> None:
    result = mpirun(size, WORKER, args=[horovod], timeout=200)
    assert result.returncode == 0, result
    assert all(len(rank["checks"]) == 10 for rank in result.ranks), result
