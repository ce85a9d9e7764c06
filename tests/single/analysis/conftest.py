"""What keeps tests of the experiments from training, and from writing figures; each module says which it uses."""

from __future__ import annotations

import pytest

from analysis.sweeps import pages, sweep
from tests.single.analysis.runs_material import made_up


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; none of them trains."""
    started: list[str] = []

    def launch(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        started.append(planned.name)
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(sweep, "require_cluster", lambda: None)
    return started


@pytest.fixture
def no_training(launches: list[str]) -> None:
    """Runs are made up."""


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not written, which takes most of the time."""
    monkeypatch.setattr(pages, "save_figure", lambda figure, path: None)
