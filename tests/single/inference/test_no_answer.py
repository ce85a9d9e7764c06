"""A model whose output overflows for some images only has no answer for these, and answers for the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvfreeze.inference.model import Applied
from tests.program import call
from tests.single.inference.conftest import Finished
from tests.single.inference.test_predicting import rows_of


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Applied.logits

    def some_overflow(self: Applied, batch: Tensor) -> Tensor:
        found = logits(self, batch)
        found[::2] = torch.nan
        return found

    monkeypatch.setattr(Applied, "logits", some_overflow)


@pytest.mark.usefixtures("overflowing")
def test_images_without_an_answer_get_no_class_and_end_in_an_error(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    words = ["predict", str(finished.run), str(finished.images / "test"), "--out", str(out), "--batch-size", "4"]
    outcome = call(*words)
    assert outcome.returncode == 5 and "11 of 21 samples have no answer" in outcome.stderr, str(outcome)
    rows = rows_of(out.read_text())
    assert len(rows) == 21 and sum(row["class"] == row["probability"] == "" for row in rows) == 11


@pytest.mark.usefixtures("overflowing")
def test_images_without_an_answer_are_wrong_and_told(finished: Finished, tmp_path: Path) -> None:
    outcome = call("evaluate", str(finished.run), "--out", str(tmp_path / "out"))
    assert outcome.returncode == 0 and "have no answer" in outcome.stdout, str(outcome)
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert found["correct"] <= 21 - 8 and found["samples"] == 21
