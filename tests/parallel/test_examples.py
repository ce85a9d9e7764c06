"""The example scripts: how little differs from Horovod alone, and a loop of the parts."""

from __future__ import annotations

import difflib
import re

import pytest

from tests.parallel.mpirun import ROOT, mpirun

EXAMPLES = ROOT / "hvfreeze" / "examples"


def test_so_few_lines_of_a_horovod_script_change() -> None:
    before, after = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("image_horovod", "image"))
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    added, removed = ([line for line in lines if line[0] == sign] for sign in "+-")
    assert 0 < len(removed) < len(added) <= 6, lines
    assert "hvd.DistributedOptimizer" in "".join(removed) and "import hvfreeze" not in before


@pytest.mark.mpi
@pytest.mark.seldom
def test_a_loop_of_the_parts_learns_and_freezes() -> None:
    result = mpirun(2, ["-W", "ignore", "-m", "hvfreeze.examples.parts"], timeout=100)
    assert result.returncode == 0, result
    losses = re.findall(r"loss (\S+), (\d) blocks frozen", result.stdout)
    assert len(losses) == 6 and min(float(loss) for loss, _ in losses) < 0.3, losses
    assert int(losses[0][1]) == 0 < int(losses[-1][1]), f"no block was ever frozen: {losses}"


@pytest.mark.mpi
@pytest.mark.seldom
@pytest.mark.parametrize(("size", "name", "least"), [(1, "head", 40.0), (2, "classifier", 80.0)])
def test_a_head_is_fitted_in_a_script_and_plain_horovod_trains_beside_it(size: int, name: str, least: float) -> None:
    program = ["-W", "ignore", "-m", f"hvfreeze.examples.{name}", "--samples", "128", "--epochs", "1"]
    result = mpirun(size, program, timeout=200)
    assert result.returncode == 0, result
    found = [float(number) for number in re.findall(r"(\d+\.\d) %", result.stdout)]
    assert len(found) == 2 and found[0] > least, result
