"""Jobs whose ranks make many checks in one start: what must hold at 1, 2, 3 and 4 ranks; see workers/checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.training.stage_build import CHOICES
from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import seldom

PROGRAM = Path(__file__).with_name("workers") / "checks.py"
COMM = "exchanging invariants lanes"
"""Lanes last: they leave Horovod with a longer cycle."""
STRATEGIES = [f"contract:{name}" for name in CHOICES]
CONTRACTS = [" ".join(STRATEGIES[:3]), " ".join(STRATEGIES[3:])]
ALIKE = "own_optimizer:running own_drop_in own_arguments"
"""Scripts that start Horovod themselves."""
JOBS: dict[str, tuple[int, ...]] = {
    "staged.stops staged.own_layer staged.whole_tunings": (2,),
    "staged.parts staged.trials": (2,),
    "staged.stops staged.own_layer staged.small_gains": (3,),
    "staged.budgets staged.tuning_on": (3,),
    "staged.trials": (3,),
    "runs:some": (1, 2, 3, 4),
    "cached": (2, 3),
    "solved": (3,),
    "kept_points": (2, 3),
    "updating": (3,),
    **dict.fromkeys(CONTRACTS, (2, 3)),
    "grid": (2, 3, 4),
    "own_scripts local_sgd subnets stale_ring solved": (1,),
    "local_sgd": (3,),
    "local_critics": (2, 3, 4),
    "subnets": (2, 4),
    "redealt": (2, 3),
    "shared_trunk": (2, 3),
    "stale_ring": (2, 3),
    ALIKE: (2,),
    f"{ALIKE} own_scripts": (3,),
    "own_rest:started": (2,),
    "own_rest:not-yet": (3,),
    "own_rest:loop": (2,),
    f"own_optimizer:not-yet {COMM}": (1,),
    COMM: (2, 3, 4),
    "node_pixels": (2, 3, 4),
}
"""The parts of a job, and on how many ranks it runs."""
SELDOM: dict[str, tuple[int, ...]] = {
    "staged.stops": (4,),
    "staged.parts": (3,),
    "staged.small_gains": (2,),
    "staged.tuning_on": (2,),
    "staged.whole_tunings": (3,),
    "staged.budgets": (2,),
    "staged.every_stop": (2,),
    "runs:all": (2,),
    "cached": (1, 4),
    "solved": (2,),
    "kept_points": (1,),
    "updating": (1, 2, 4),
    **dict.fromkeys(CONTRACTS, (1, 4)),
    "grid": (1,),
    "local_sgd": (2, 4),
    "local_critics": (1,),
    "subnets": (3,),
    "redealt": (4,),
    "shared_trunk": (1, 4),
    "stale_ring": (4,),
    "own_scripts": (2,),
    "own_arguments": (1,),
    "own_rest:started": (3,),
    "own_rest:not-yet": (2, 4),
    "own_rest:loop": (3, 4),
    "own_drop_in": (4,),
    "own_optimizer:not-yet": (4,),
    "node_pixels": (1,),
}

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("parts", "size"),
    [(parts, size) for parts, sizes in JOBS.items() for size in sizes]
    + [seldom(parts, size) for parts, sizes in SELDOM.items() for size in sizes],
)
def test_every_check_of_a_job_holds(parts: str, size: int, tmp_path: Path) -> None:
    result = mpirun(size, PROGRAM, args=[str(tmp_path), *parts.split()], timeout=280)
    assert result.returncode == 0, str(result)
    made = [rank["checks"] for rank in result.ranks]
    assert made[0] and made == [made[0]] * size


def test_checks_that_fail_are_named_and_others_made_while_ranks_can_go_on(tmp_path: Path) -> None:
    result = mpirun(2, PROGRAM, args=[str(tmp_path), "failing"], timeout=60, every_rank_reports=False)
    assert result.returncode == 1 and result.ranks == [], str(result)
    assert result.stderr.count("failing check_one_rank fails") == 1, str(result)
    assert result.stderr.count("failing check_all_ranks fails") == 2, str(result)
    assert "other ranks cannot go on after failing check_one_that_others_wait_for" in result.stderr, str(result)
    called = ("one_rank", "all_ranks", "that_holds", "one_that_others_wait_for")
    assert result.stdout.split("\n")[:-1] == [f"failing check_{name}" for name in called], str(result)


def test_a_job_with_a_check_that_fails_fails_in_the_end(tmp_path: Path) -> None:
    result = mpirun(
        1,
        PROGRAM,
        args=[str(tmp_path), "failing.all_ranks", "failing.that_holds"],
        timeout=60,
        every_rank_reports=False,
    )
    assert result.returncode == 1 and result.ranks == [], str(result)
    assert "rank 0: failed: failing.all_ranks check_all_ranks\n" in result.stderr, str(result)
