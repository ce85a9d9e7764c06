"""Two runs to report on: one trained in full, and one that was voted frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.single.report.run_directories import vote, write_run

VOTES = [
    vote(10, before=0, after=1, proposals=[1, 2], weights=[1.0, 0.5]),
    vote(20, before=1, after=1, proposals=[1, 2], weights=[1.0, 0.25]),
]


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    full = write_run(tmp_path / "full", accuracies=[0.5, 0.9, 0.8])
    voted = write_run(
        tmp_path / "voted", accuracies=[0.5, 0.7, 0.75], speed=1.25, freeze="gradient-norm", decisions=VOTES
    )
    return [full, voted]
