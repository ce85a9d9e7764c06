from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

WORKER = Path(__file__).with_name("workers") / "grid.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", sizes(2, 3, 4))
def test_a_grid_trains_the_model_that_one_process_would(size: int, tmp_path: Path) -> None:
    result = mpirun(size, WORKER, args=[str(tmp_path)], timeout=240)
    assert result.returncode == 0, str(result)
    assert all(len(rank["checks"]) == 6 for rank in result.ranks)


@pytest.mark.parametrize("size", sizes(2, 3, of=(2, 3, 4)))
def test_ranks_whose_blocks_are_frozen_or_cached_train_on(size: int, tmp_path: Path) -> None:
    result = mpirun(size, WORKER.with_name("redealt.py"), args=[str(tmp_path)], timeout=280)
    assert result.returncode == 0, str(result)
    assert all(len(rank["checks"]) == 3 for rank in result.ranks)
