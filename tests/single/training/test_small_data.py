"""Few images: the run trains with what there is, and says what it does differently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import Outcome, digest_of, succeed, summary_of

FEW = "--model tests.kept.small_model:small --train-samples 32 --validation-fraction 0.25 --epochs 3".split()
FEW += "--threads 1 --augment none".split()


def train(folder: Path, *flags: str) -> Outcome:
    return succeed("train", *FEW, "--run-dir", str(folder), *flags)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("before") / "run"
    lowered = "note: batch size 24 instead of 128: the 24 samples of the rank with the fewest"
    assert lowered in train(folder).stdout
    summary = summary_of(folder)
    assert (summary["epochs"], summary["steps"]) == (3, 3)
    return ["--weights", str(folder / "model.pt")]


def test_with_few_batches_the_pretrained_statistics_are_kept_and_told(weights: list[str], tmp_path: Path) -> None:
    told = "note: BatchNorm keeps the pretrained statistics: training has only 3 batches"
    assert told in train(tmp_path / "auto", *weights).stdout
    assert told not in train(tmp_path / "kept", *weights, "--statistics", "kept").stdout
    assert told not in train(tmp_path / "batch", *weights, "--statistics", "batch").stdout
    assert digest_of(tmp_path / "auto") == digest_of(tmp_path / "kept") != digest_of(tmp_path / "batch")


def test_a_run_that_kept_the_statistics_goes_on_with_more_epochs(weights: list[str], tmp_path: Path) -> None:
    train(tmp_path / "run", *weights)
    resumed = train(tmp_path / "run", *weights, "--resume", "--epochs", "25")
    assert "resumed after step 3" in resumed.stdout and summary_of(tmp_path / "run")["steps"] == 25


def test_with_enough_batches_or_without_weights_each_batch_has_its_own(weights: list[str], tmp_path: Path) -> None:
    many = ["--batch-size", "3"]
    assert "BatchNorm keeps" not in train(tmp_path / "many", *weights, *many).stdout
    assert "BatchNorm keeps" not in train(tmp_path / "none", "--batch-size", "24").stdout
