"""What keeps tests of the experiments from training, and from writing figures; each module says which it uses."""

from __future__ import annotations

import pytest

from analysis.sweeps import experiment, writeup
from tests.single.analysis.runs_material import made_up


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made up."""
    monkeypatch.setattr(experiment, "launch", made_up)
    monkeypatch.setattr(experiment, "require_cluster", lambda: None)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not written, which takes most of the time."""
    monkeypatch.setattr(writeup, "save_figure", lambda figure, path: None)
