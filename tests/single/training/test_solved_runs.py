"""What a run whose head is solved tells: how far it is, and how right the head is on what it was not fitted to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hvfreeze.heads import kernel
from hvfreeze.runs import progress
from hvfreeze.strategies.fitted_head import FittedHead
from tests.program import Outcome, call, succeed, summary_of

SMALL = [
    "--model",
    "tests.kept.small_model:small",
    "--batch-size",
    "16",
    "--threads",
    "1",
    "--epochs",
    "1",
]


def train(folder: Path, *flags: str) -> Outcome:
    return succeed("auto", "digits", *SMALL, "--run-dir", str(folder), *flags)


@pytest.mark.parametrize("head_fit", ["kernel", "exact"])
def test_the_accuracy_that_is_told_is_of_samples_that_were_not_fitted(
    tmp_path: Path, head_fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with many rows: a part of them chooses the penalty.
    monkeypatch.setattr(kernel, "FEW", 100)
    told = train(tmp_path / "run", "--train-samples", "400", "--head-fit", head_fit)
    solve, finish = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    shown = re.search(r"head fitted: held-out loss ([\d.]+), accuracy ([\d.]+) %", told.stdout)
    tested = re.search(r"result: test accuracy ([\d.]+) %", told.stdout)
    assert shown is not None and tested is not None and "train 1" not in told.stdout, str(told)
    held_out = float(shown[2])
    assert held_out == pytest.approx(100 * solve["held_out_accuracy"], abs=0.1)
    assert float(shown[1]) == pytest.approx(solve["held_out_loss"], abs=1e-3)
    assert float(tested[1]) == pytest.approx(100 * finish["test_accuracy"], abs=0.01)
    assert abs(held_out - float(tested[1])) < 12, "40 samples that a fit to the 360 others is judged by"
    summary = summary_of(tmp_path / "run")
    chosen = next(trial for trial in summary["head"]["trials"] if trial["penalty"] == summary["head"]["penalty"])
    assert chosen["whole"], "a fit to a part of the samples says less than what the model can do"


def test_passes_of_a_solution_are_shown_and_no_rest_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(kernel, "FEW", 20)
    told = train(tmp_path / "run", "--train-samples", "60")
    assert "features of 60 of 60 rows" in told.stdout
    shown = [tuple(map(int, each)) for each in re.findall(r"fitting the head: pass (\d+), (\d+) %", told.stdout)]
    assert shown == sorted(set(shown)) and shown[:2] == [(1, 0), (1, 100)], "how far each pass is, is shown as it goes"
    assert re.search(r"error [\d.]+ %, target 5.0 %", told.stdout)
    assert " left" not in told.stdout and "step " not in told.stdout


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for name, colour in (("red", (200, 30, 30)), ("green", (30, 200, 30))):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(20):
                shade = tuple(value + 2 * number for value in colour)
                Image.new("RGB", (32, 32), shade).save(tmp_path / "data" / part / name / f"{number}.png")
    return tmp_path / "data"


@pytest.mark.parametrize(("value", "code"), [(1e6, 0), (float("nan"), 5)])
def test_a_damaged_sample_is_called_by_its_file(
    shapes: Path, tmp_path: Path, value: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = FittedHead.fit

    def damaged(self: FittedHead, *args: Any, **rest: Any) -> Any:
        of = self.training.of
        monkeypatch.setattr(
            type(self.training),
            "of",
            lambda _, batch: of(batch) * torch.where(torch.from_numpy(batch.ids) == 23, value, 1.0)[:, None],
        )
        return solve(self, *args, **rest)

    monkeypatch.setattr(FittedHead, "fit", damaged)
    outcome = call(
        "auto",
        str(shapes),
        *SMALL,
        "--flips",
        "off",
        "--run-dir",
        str(tmp_path / "run"),
    )
    assert outcome.returncode == code, str(outcome)
    name = str(shapes / "train" / "red" / sorted(f"{number}.png" for number in range(20))[3])
    if code:
        assert len(outcome.messages) == 1 and name in outcome.messages[0], str(outcome)
    else:
        assert f"warning: the head ignores 1 sample, whose features are far from all others: {name}" in outcome.stdout
        assert summary_of(tmp_path / "run")["head"]["left_out"] == [23]


def test_a_batch_that_the_smallest_shard_does_not_fill_is_lowered(tmp_path: Path) -> None:
    few = [flag for flag in SMALL if flag not in ("--batch-size", "16")]
    flags = [*few, "--train-samples", "24", "--run-dir", str(tmp_path / "few")]
    told = succeed("auto", "digits", *flags)
    assert "batch size 12 instead of 32: half of the 24 samples" in told.stdout, str(told)
    assert summary_of(tmp_path / "few")["head"]["rows"] == 24
    again = succeed("auto", "digits", *flags, "--resume")
    assert "is complete; nothing to do" in again.stdout, str(again)
    for asked, words in (
        (["auto", "digits", "--batch-size", "25"], "batch size 12 instead of 25: half of the 24 samples"),
        (["train"], ": the 24 samples of the rank with the fewest"),
    ):
        lowered = succeed(*asked, *flags[:-1], str(tmp_path / asked[0]))
        assert words in lowered.stdout, str(lowered)
    assert summary_of(tmp_path / "train")["steps"] > 0
