from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.program import call


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended, which no test changes; its flags are the module's SMALL."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = call("train", *request.module.SMALL, "--run-dir", str(folder))
    assert outcome.returncode == 0, str(outcome)
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of figures without a drawing, which takes most of a report's time."""

    def save(figure: Any, base: Path) -> Path:
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_name(base.name + ".png").write_bytes(b"")
        svg = base.with_name(base.name + ".svg")
        svg.write_text("<svg/>")
        return svg

    monkeypatch.setattr("hvfreeze.report.figures.save_figure", save)
