"""The program's own runs with a cache, started alone: what they may read, and what they must refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.__main__ import main

TRAIN = (
    *("train", "--data", "digits", "--train-samples", "64", "--batch-size", "16", "--augment", "none"),
    *("--lr", "0.01", "--threads", "1", "--checkpoint-every", "0"),
)
SQUEEZENET = ("--model", "squeezenet1_1", "--freeze", "static", "--cut", "1", "--epochs", "2", "--image-size", "64")


def train(run: Path, *flags: str) -> dict[str, Any]:
    """Train in `run` and return its summary."""
    assert main([*TRAIN, *flags, "--run-dir", str(run)]) == 0
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def test_rows_of_a_prefix_that_ends_elsewhere_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    # The same parameters before the cut, which is one operation without any further on.
    before, after = (("--blocks", f"features.0,features.{start},classifier") for start in (2, 3))
    first = train(tmp_path / "first", *SQUEEZENET, *before, *cached)
    assert first["cache"]["rows_read"] > 0
    files = set((tmp_path / "cache").iterdir())
    capsys.readouterr()
    truth = train(tmp_path / "truth", *SQUEEZENET, *after)
    other = train(tmp_path / "other", *SQUEEZENET, *after, *cached)
    assert other["parameter_digest"] == truth["parameter_digest"]
    assert other["cache"]["rows_written"] == first["cache"]["rows_written"] > 0
    assert len(set((tmp_path / "cache").iterdir())) == 2 * len(files)
    again = train(tmp_path / "again", *SQUEEZENET, *before, *cached)
    assert again["parameter_digest"] == first["parameter_digest"]
    assert again["cache"]["rows_written"] == 0, "the first run's own rows are still good"
