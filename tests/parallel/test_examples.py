"""The two example scripts: ten lines apart, and the same training until a block is frozen."""

from __future__ import annotations

import difflib
import re

import pytest

from tests.parallel.mpirun import ROOT, mpirun

EXAMPLES = ROOT / "hvfreeze" / "examples"

pytestmark = pytest.mark.mpi


def losses(name: str) -> list[str]:
    result = mpirun(2, ["-W", "ignore", "-m", f"hvfreeze.examples.{name}"], timeout=100)
    assert result.returncode == 0, result
    return re.findall(r"loss (\S+)", result.stdout)


def test_freezing_by_vote_takes_at_most_ten_lines_more_than_plain_horovod() -> None:
    plain, voted = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("plain", "voted"))
    added = [line for line in difflib.ndiff(plain, voted) if line.startswith("+ ")]
    assert 0 < len(added) <= 10, added


def test_both_scripts_train_alike_before_the_first_frozen_block() -> None:
    plain, voted = losses("plain"), losses("voted")
    assert len(plain) == len(voted) == 6
    assert [float(loss) for loss in voted[:2]] == pytest.approx([float(loss) for loss in plain[:2]], rel=1e-3)
    assert voted != plain, "no block was ever frozen"
