"""What holds for every optimizer, and for what is done to gradients and losses, at 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

WORKER = Path(__file__).with_name("workers") / "updating.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", sizes(3))
def test_frozen_blocks_leave_every_optimizer_and_a_stopped_run_goes_on_bit_for_bit(size: int, tmp_path: Path) -> None:
    result = mpirun(size, WORKER, args=[str(tmp_path)], timeout=200)
    assert result.returncode == 0, result
    digests = [rank["digests"] for rank in result.ranks]
    assert all(digest == digests[0] for digest in digests) and len(set(digests[0].values())) == 3
