from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import call


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended, which no test changes; its flags are the module's SMALL."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = call("train", *request.module.SMALL, "--run-dir", str(folder))
    assert outcome.returncode == 0, str(outcome)
    return folder
