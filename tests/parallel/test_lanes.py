"""Worlds of some ranks, the mesh, transfers in pieces and the wire, at 1, 2, 3 and 4 ranks in one start each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun

WORKER = Path(__file__).with_name("workers") / "lanes.py"

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_moves_between_ranks_arrives_where_it_should_bit_for_bit(size: int) -> None:
    result = mpirun(size, WORKER, timeout=100)
    assert result.returncode == 0, result
