"""Few images: the run trains with what there is, and says what it does differently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.program import Outcome, call

FEW = "--model resnet20 --train-samples 32 --validation-fraction 0.25 --epochs 3 --threads 1 --augment none".split()


def train(folder: Path, *flags: str) -> Outcome:
    outcome = call("train", *FEW, "--run-dir", str(folder), *flags)
    assert outcome.returncode == 0, str(outcome)
    return outcome


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("before") / "run"
    lowered = "note: batch size 24 instead of 128: the 24 samples of the rank with the fewest"
    assert lowered in train(folder).stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["epochs"], summary["steps"]) == (3, 3)
    return ["--weights", str(folder / "model.pt")]


def digest(folder: Path) -> str:
    found: str = json.loads((folder / "summary.json").read_text())["parameter_digest"]
    return found


def test_with_few_batches_the_pretrained_statistics_are_kept_and_told(weights: list[str], tmp_path: Path) -> None:
    told = "note: BatchNorm keeps the pretrained statistics: training has only 3 batches"
    assert told in train(tmp_path / "auto", *weights).stdout
    assert told not in train(tmp_path / "kept", *weights, "--statistics", "kept").stdout
    assert told not in train(tmp_path / "batch", *weights, "--statistics", "batch").stdout
    assert digest(tmp_path / "auto") == digest(tmp_path / "kept") != digest(tmp_path / "batch")


def test_with_enough_batches_or_without_weights_each_batch_has_its_own(weights: list[str], tmp_path: Path) -> None:
    many = ["--batch-size", "3"]
    assert "BatchNorm keeps" not in train(tmp_path / "many", *weights, *many).stdout
    assert "BatchNorm keeps" not in train(tmp_path / "none", *many, "--batch-size", "24").stdout
