"""--tensorboard: an epoch's numbers by their names, taken back where a run goes on from before them."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.program import call

FLAGS = ("--model", "shufflenet_v2_x0_5", "--train-samples", "32", "--batch-size", "16", "--threads", "1", "--quiet")


class Writer:
    """Stands for TensorBoard's; remembers what it was told."""

    made: list[Writer] = []  # noqa: RUF012

    def __init__(self, folder: str, *, purge_step: int | None) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.told: dict[tuple[str, int], float] = {}
        self.made.append(self)

    def add_scalar(self, name: str, value: float, *, global_step: int) -> None:
        self.told[name, global_step] = value

    def flush(self) -> None:
        assert self.told

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    board: Any = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr("hvfreeze.runs.progress.find_spec", lambda name: name)
    monkeypatch.setattr(Writer, "made", [])


def test_an_epochs_numbers_are_drawn_by_step(library: None, tmp_path: Path) -> None:
    flags = (*FLAGS, "--tensorboard", "--schedule", "cosine", "--run-dir", str(tmp_path))
    assert call("train", *flags, "--epochs", "2").returncode == 0
    (writer,) = Writer.made
    assert writer.folder == str(tmp_path / "tensorboard") and writer.purge_step is None and writer.closed
    names = {name for name, _ in writer.told}
    assert {"train_loss", "test_accuracy", "cut", "learning_rate", "seconds/backward", "cache/bytes"} <= names
    assert {step for _, step in writer.told} == {2, 4}
    assert call("train", *flags, "--epochs", "3", "--resume").returncode == 0
    assert Writer.made[1].purge_step == 5 and {step for _, step in Writer.made[1].told} == {6}


def test_without_the_library_nothing_is_begun_and_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hvfreeze.runs.progress.find_spec", lambda name: None)
    outcome = call("train", *FLAGS, "--tensorboard", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and "pip install tensorboard" in outcome.stderr, str(outcome)
    assert not (tmp_path / "run").exists()
