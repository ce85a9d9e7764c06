"""A run directory for programs that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import contents


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory that nothing may be written to."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    yield folder
    assert contents(folder) == before
