"""The example scripts: how little differs from Horovod alone, and what that little does at 1, 2 and 3 ranks."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.parallel.mpirun import ROOT, mpirun
from tests.parallel.sizes import sizes

EXAMPLES = ROOT / "hvfreeze" / "examples"
WORKER = Path(__file__).with_name("workers") / "own_scripts.py"


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize(("name", "most"), [("voted", 2), ("cached", 7)])
def test_so_few_lines_of_a_horovod_script_change(kind: str, name: str, most: int) -> None:
    plain, converted = ((EXAMPLES / kind / f"{script}.py").read_text().splitlines() for script in ("plain", name))
    lines = [line for line in difflib.ndiff(plain, converted) if line[0] in "+-"]
    added, removed = ([line for line in lines if line[0] == sign] for sign in "+-")
    assert 0 < len(added) <= most, lines
    assert len(removed) <= len(added), lines
    assert "hvd.DistributedOptimizer" in "".join(removed) and "import hvfreeze" not in plain


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", sizes(1, 3, of=(1, 2, 3)))
def test_converted_scripts_freeze_and_a_cache_changes_no_bit(size: int, tmp_path: Path) -> None:
    result = mpirun(size, WORKER, args=[str(tmp_path)], timeout=280)
    assert result.returncode == 0, result
    for rank in result.ranks:
        assert rank["cuts"] == result.ranks[0]["cuts"]
        assert all(rank["files"].values()), f"nothing was cached: {rank}"
