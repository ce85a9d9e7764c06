"""A model whose output is NaN or Inf predicts no class, and no sample counts as correct by chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvfreeze.inference.model import Applied
from hvfreeze.tasks import NO_ANSWER, classes_of
from hvfreeze.training.evaluation import Totals
from tests.program import call
from tests.single.inference.conftest import Finished
from tests.single.inference.test_predicting import rows_of

NAN, INF = float("nan"), float("inf")


def test_what_is_not_finite_is_no_class() -> None:
    logits = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [INF, 0.0], [-INF, 0.0], [-INF, -INF]])
    assert classes_of(logits).tolist() == [1, *[NO_ANSWER] * 3, 1, NO_ANSWER]
    totals = Totals()
    totals.add(logits, torch.zeros(6, dtype=torch.int64), 1.0)
    assert (totals.correct, totals.count) == (0, 6)


@pytest.fixture
def some_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Applied.logits

    def every_second(self: Applied, batch: Tensor) -> Tensor:
        found = logits(self, batch)
        found[::2] = torch.nan
        return found

    monkeypatch.setattr(Applied, "logits", every_second)


@pytest.mark.usefixtures("some_overflow")
def test_images_without_an_answer_get_no_class_and_end_in_an_error(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    words = ["predict", str(finished.run), str(finished.images / "test"), "--out", str(out), "--batch-size", "4"]
    outcome = call(*words)
    assert outcome.returncode == 5 and "11 of 21 samples have no prediction" in outcome.stderr, str(outcome)
    rows = rows_of(out.read_text())
    assert len(rows) == 21 and sum(row["class"] == row["probability"] == "" for row in rows) == 11


@pytest.mark.usefixtures("some_overflow")
def test_images_without_an_answer_are_wrong_and_told(finished: Finished, tmp_path: Path) -> None:
    outcome = call("evaluate", str(finished.run), "--out", str(tmp_path / "out"))
    assert outcome.returncode == 0 and "loss nan" in outcome.stdout, str(outcome)
    # The batch of 21 has a loss of NaN: null in a JSON file that other programs read.
    assert "note: 11 of 21 samples have no prediction, because the model's output" in outcome.stdout
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert found["loss"] is None and found["correct"] <= found["top5_accuracy"] * 21 <= 10 and found["samples"] == 21
