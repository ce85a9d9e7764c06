"""What a reducer makes of all ranks' gradients, at 1, 2, 3 and 4 ranks in one start each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun

WORKER = Path(__file__).with_name("workers") / "exchanging.py"

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_exchange_gives_the_average_whatever_the_gradients_are(size: int) -> None:
    result = mpirun(size, WORKER, timeout=100)
    assert result.returncode == 0, result
    assert len(result.ranks[0]["checks"]) >= 7, result
