from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

WORKER = Path(__file__).with_name("workers") / "shared_trunk.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", sizes(2, 3))
def test_models_on_one_trunk_are_those_that_are_trained_alone(size: int, tmp_path: Path) -> None:
    result = mpirun(size, WORKER, args=[str(tmp_path)], timeout=240)
    assert result.returncode == 0, str(result)
    assert all(len(rank["checks"]) == 5 for rank in result.ranks)
