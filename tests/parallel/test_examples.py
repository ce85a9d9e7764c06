"""The example scripts: how little differs from Horovod alone; `workers/own_scripts.py` and `alone.py` run them."""

from __future__ import annotations

import difflib

from tests.parallel.mpirun import ROOT

EXAMPLES = ROOT / "hvfreeze" / "examples"


def test_so_few_lines_of_a_horovod_script_change() -> None:
    before, after = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("image_horovod", "image"))
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    added, removed = ([line for line in lines if line[0] == sign] for sign in "+-")
    assert 0 < len(removed) < len(added) <= 6, lines
    assert "hvd.DistributedOptimizer" in "".join(removed) and "import hvfreeze" not in before
