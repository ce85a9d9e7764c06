"""Workers whose ranks make many checks in one start: what must hold at 1, 2, 3 and 4 ranks.

A worker in workers/ reports the checks that it has made, and ends the job with the name of the one that failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvfreeze.training.stage_build import CHOICES
from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

WORKERS = Path(__file__).with_name("workers")
CHECKS: dict[str, list[Any]] = {
    "staged stops": sizes(2, 3, of=(2, 3, 4)),
    "staged parts": sizes(2, of=(2, 3)),
    "staged trials": sizes(2, 3, of=(2, 3)),
    "staged own_layer": sizes(2, 3, of=(2, 3)),
    "staged small_gains": sizes(3, of=(2, 3)),
    "staged tuning_on": sizes(3, of=(2, 3)),
    "staged whole_tunings": sizes(2, of=(2, 3)),
    "staged budgets": sizes(3, of=(2, 3)),
    "staged every_stop": sizes(of=(2,)),
    "runs some": sizes(1, 2, 3, 4),
    "runs all": sizes(of=(2,)),
    "cached": sizes(2, 3),
    "solved": sizes(1, 3, of=(1, 2, 3)),
    "kept_points": sizes(2, 3, of=(1, 2, 3)),
    "updating": sizes(3),
    **{f"contract {name}": sizes(2, 3) for name in CHOICES},
    "grid": sizes(2, 3, 4),
    "local_sgd": sizes(1, 3),
    "local_critics": sizes(2, 3, 4),
    "subnets": sizes(1, 2, 4),
    "redealt": sizes(2, 3, of=(2, 3, 4)),
    "shared_trunk": sizes(2, 3),
    "stale_ring": sizes(1, 2, 3, of=(1, 2, 3, 4)),
    "own_scripts": sizes(1, 3, of=(1, 2, 3)),
    "own_arguments": sizes(2, 3, of=(1, 2, 3)),
    "own_rest started": sizes(2, of=(2, 3)),
    "own_rest not-yet": sizes(3, of=(2, 3, 4)),
    "own_rest loop": sizes(2, of=(2, 3, 4)),
    "own_drop_in running": sizes(2, 3, of=(2, 3, 4)),
    "own_optimizer running": sizes(2, 3, of=(2, 3)),
    "own_optimizer not-yet": sizes(1, of=(1, 4)),
    "invariants": sizes(1, 2, 3, 4),
    "exchanging": sizes(1, 2, 3, 4),
    "lanes": sizes(1, 2, 3, 4),
    "node_pixels": sizes(2, 3, 4),
}

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("worker", "size"),
    [pytest.param(worker, *size.values, marks=size.marks) for worker, each in CHECKS.items() for size in each],
)
def test_every_check_of_a_worker_holds(worker: str, size: int, tmp_path: Path) -> None:
    name, *more = worker.split()
    result = mpirun(size, WORKERS / f"{name}.py", args=[str(tmp_path), *more], timeout=280)
    assert result.returncode == 0, result
    made = [rank["checks"] for rank in result.ranks]
    assert made[0] and made == [made[0]] * size
