"""A cached run is the uncached run, bit for bit, through a moving cut, a resumption, and from older files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.mpirun import mpirun
from tests.parallel.sizes import sizes

CACHED = Path(__file__).with_name("workers") / "cached.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("size", sizes(2, 3))
def test_a_cached_run_is_the_uncached_run(size: int, tmp_path: Path) -> None:
    result = mpirun(size, CACHED, args=[str(tmp_path)], timeout=280)
    assert result.returncode == 0, result
    for model, found in result.ranks[0].items():
        assert len(set(found["digests"].values())) == 1, f"{model}: {found}"
        assert len({cut for _, _, cut in found["cuts"]}) > 2, f"{model}: the cut hardly moved: {found['cuts']}"
        for name in ("cached", "resumed", "again"):
            assert found["cache"][name]["exact"] is True, f"{model}: {found}"
            assert found["cache"][name]["rows_read"] > 0, f"{model}: nothing was read: {found}"
