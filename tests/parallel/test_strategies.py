from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.training.choice import CHOICES
from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom

CONTRACT = Path(__file__).with_name("workers") / "contract.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) if size in (2, 3) else seldom(name, size) for name in CHOICES for size in (1, 2, 3, 4)],
)
def test_every_strategy_keeps_the_contract(name: str, size: int, tmp_path: Path) -> None:
    result = mpirun(size, CONTRACT, args=[str(tmp_path), name], timeout=200)
    assert result.returncode == 0, result
    assert all(len(rank["checks"]) >= 6 for rank in result.ranks)
