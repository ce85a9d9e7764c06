"""The log of a run reads as a story: model and data, progress, decisions, next command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.model.weight_names import has_published
from hvfreeze.runs import progress
from hvfreeze.training import loop
from hvfreeze.training.job import Job
from tests.program import call, succeed

SMALL = "digits --model mlp-16x16 --image-size 8 --train-samples 100 --batch-size 16 --threads 1".split()


def test_an_auto_run_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    flags = "--model tests.kept.small_model:small --train-samples 60 --batch-size 16 --epochs 4 --threads 1".split()
    outcome = succeed("auto", "digits", *flags, "--run-dir", str(tmp_path / "run"))
    lines = outcome.stdout.splitlines()
    assert lines[0] == "loading digits and tests.kept.small_model:small", "at once: the rest may take a minute"
    assert lines[2].startswith("data: digits, 60 training images (6 of them held out), 359 test images, ")
    assert lines[3] == "note: no --weights: training from scratch; --weights FILE starts from pretrained weights"
    steps = [
        re.match(r"step (\d+) of (\d+), epoch (\d+) of (\d+): loss [\d.]+, 0 of 3 blocks frozen", line)
        for line in lines
    ]
    first, *_, last = [found for found in steps if found]
    assert (first[1], first[3]) == ("1", "1") and (last[1], last[3]) == (last[2], last[4]) == (first[2], first[4])
    assert f"fine-tuned: {last[2]} steps (adamw, lr 0.0003, batch size 16): held-out loss " in outcome.stdout
    assert not any("normalised" in line for line in lines)


def test_a_head_that_is_fitted_to_random_features_is_noted(tmp_path: Path) -> None:
    outcome = call("auto", *SMALL, "--run-dir", str(tmp_path / "run"))
    note = "note: no --weights: fitting a head to a network with random weights; --weights FILE starts from"
    assert outcome.returncode == 0 and note in outcome.stdout, str(outcome)
    why = "mlp-16x16 does not end in a linear layer with a bias"
    assert f"note: no fine-tuning: {why}" in outcome.stdout
    given = call("auto", *SMALL, "--epochs", "30", "--run-dir", str(tmp_path / "given")).stdout
    assert f"note: --epochs (30) has limited effect: {why}" in given and "note: no fine-tuning" not in given


def test_a_budget_of_time_makes_the_number_of_steps_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    make_step = loop.train_step

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = job.step == 2
        return make_step(job, batches)

    monkeypatch.setattr(loop, "train_step", step)
    outcome = call("train", "--data", *SMALL, "--time-budget", "60s", "--run-dir", str(tmp_path / "run"))
    assert re.search(r"^step 1 of about \d+, epoch 1: loss ", outcome.stdout, re.MULTILINE), str(outcome)


def test_a_folder_without_a_checkpoint_is_noted_where_a_run_was_to_be_resumed(tmp_path: Path) -> None:
    flags = ["--data", *SMALL, "--epochs", "1", "--run-dir", str(tmp_path / "nope")]
    outcome = call("train", *flags, "--resume")
    note = f"note: {tmp_path / 'nope'} holds no checkpoint; starting from scratch"
    assert outcome.returncode == 0 and note in outcome.stdout, str(outcome)
    assert note not in call("train", *flags[:-1], str(tmp_path / "other")).stdout


@pytest.mark.parametrize(
    ("model", "has"),
    [("resnet18", True), ("timm:anything", True), ("mlp-16x16", False), ("resnet20", False), ("mine:make", False)],
)
def test_default_weights_are_recommended_where_there_may_be_some(model: str, has: bool) -> None:
    assert has_published(model) is has
