"""A model whose output is not finite has no answers: none is right by chance, and none is told as a class."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from hvfreeze.inference.card import sha256_of
from hvfreeze.inference.model import Applied
from hvfreeze.tasks import NO_ANSWER, classes_of
from hvfreeze.training.evaluation import Totals
from tests.program import call
from tests.single.inference.conftest import Finished
from tests.single.inference.test_predicting import rows_of

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def overflowing(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the run whose model overflows for the first class."""
    run = tmp_path / "overflowing"
    shutil.copytree(finished.run, run)
    state = torch.load(run / "model.pt", weights_only=True)
    state["fc.weight"][0] = 3e38
    torch.save(state, run / "model.pt")
    card = yaml.safe_load((run / "model.yaml").read_text())
    (run / "model.yaml").write_text(yaml.safe_dump(card | {"sha256": sha256_of(run / "model.pt")}))
    return run


def test_what_is_not_finite_is_no_class() -> None:
    logits = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [INF, 0.0], [-INF, 0.0], [-INF, -INF]])
    assert classes_of(logits).tolist() == [1, *[NO_ANSWER] * 3, 1, NO_ANSWER]
    totals = Totals()
    totals.add(logits, torch.zeros(6, dtype=torch.int64), 1.0)
    assert (totals.correct, totals.count) == (0, 6)


def test_evaluate_counts_them_as_wrong_and_writes_json_that_others_read(overflowing: Path, tmp_path: Path) -> None:
    outcome = call("evaluate", str(overflowing), "--out", str(tmp_path / "out"))
    assert outcome.returncode == 0 and "top-1 0.00 % (0 of 21), loss nan" in outcome.stdout, str(outcome)
    assert "note: 21 of 21 samples have no prediction, because the model's output" in outcome.stdout

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=refuse)
    assert found["loss"] is None and found["correct"] == found["top5_accuracy"] == 0


def test_predict_names_no_class_and_ends_with_the_code_of_numbers(overflowing: Path, finished: Finished) -> None:
    outcome = call("predict", str(overflowing), str(finished.images / "test"), "--top", "2")
    assert outcome.returncode == 5 and "21 of 21 samples have no prediction" in outcome.messages[0], str(outcome)
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    assert len(rows) == 21
    assert {tuple(row.values())[1:] for row in rows} == {("", "", "", "")}


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
    assert outcome.returncode == 0 and "have no prediction" in outcome.stdout, str(outcome)
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert found["correct"] <= 21 - 8 and found["samples"] == 21
