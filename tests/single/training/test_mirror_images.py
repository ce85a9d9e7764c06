"""Horizontal flips: decided once for the whole run, told at the start, and left out where left and right differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hvfreeze
from hvfreeze.errors import Preempted
from hvfreeze.training import build, loop, parts
from hvfreeze.training.job import Job
from hvfreeze.training.parts import Factory, Opened, Part
from tests.program import Outcome, call, digest_of, succeed, summary_of

SMALL = ["--model", "tests.kept.small_model:small", "--batch-size", "8", "--threads", "1"]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with a bright bar on the left, or on the right, which alone tells their classes apart."""
    root, random = tmp_path_factory.mktemp("sides"), np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 15)):
        for name, first in (("left", 1), ("right", 18)):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 60, (32, 32, 3)).astype(np.uint8)
                start = first + random.integers(0, 9)
                pixels[:, start : start + 4] = 220
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def train(sides: Path, run: Path, *flags: str) -> Outcome:
    return call("train", *SMALL, "--data", "imagefolder", "--data-dir", str(sides), "--run-dir", str(run), *flags)


def auto(sides: Path, run: Path, *flags: str) -> Outcome:
    return call("auto", str(sides), *SMALL, "--run-dir", str(run), *flags)


def stop_after_a_step(
    monkeypatch: pytest.MonkeyPatch, sides: Path, run: Path, *flags: str, make: Callable[..., Outcome] = train
) -> None:
    """Train until the first step of tuning is made, and leave as if that was asked for."""
    make_step = loop.train_step

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = True
        return make_step(job, batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", step)
        assert make(sides, run, *flags).returncode == Preempted.exit_code


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, int]]:
    """Of each part that is opened whether it fits a head, whether its views are flipped, and how many there are."""
    seen, open_part = [], Factory.open

    def watched(self: Factory, part: Part) -> Opened:
        found = open_part(self, part)
        transform = found.feed.images.transform
        seen.append((part.fits_head, transform.flips, transform.augment.num_views))
        return found

    monkeypatch.setattr(Factory, "open", watched)
    return seen


@pytest.mark.parametrize("head_fit", ["kernel", "exact"])
def test_a_fitted_head_leaves_them_out_where_left_and_right_differ_and_says_so(
    sides: Path, tmp_path: Path, head_fit: str
) -> None:
    flags = ["--head", "multi-level", "--head-fit", head_fit, "--augment", "none"]
    told = train(sides, tmp_path / "auto", *flags)
    assert told.returncode == 0, str(told)
    assert "note: horizontal flips: off (leave-one-out loss of 40 samples" in told.stdout, str(told)
    found = summary_of(tmp_path / "auto")
    assert found["test_accuracy"] > 0.9 and found["head"]["rows"] == 40
    assert found["mirror"]["accuracy_without"] > found["mirror"]["accuracy_with"] + 0.2
    asked = train(sides, tmp_path / "on", *flags, "--flips", "on")
    assert asked.returncode == 0 and "horizontal flips: on; use --flips off" in asked.stdout, str(asked)
    assert summary_of(tmp_path / "on")["head"]["rows"] == 80
    assert summary_of(tmp_path / "on")["test_accuracy"] < 0.8


def test_what_was_found_out_holds_for_every_verb_also_when_the_run_is_resumed(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--epochs", "4"]
    straight = auto(sides, tmp_path / "straight", *flags)
    assert straight.returncode == 0, str(straight)
    # The first is opened before the recipe begins, so that settings that do not fit are refused early.
    assert opened == [(True, False, 1), (False, False, 0), (True, False, 1)]
    assert straight.stdout.count("horizontal flips: off") == 1, "it is found out once"
    stop_after_a_step(monkeypatch, sides, tmp_path / "stopped", *flags, make=auto)
    opened.clear()
    resumed = auto(sides, tmp_path / "stopped", *flags, "--resume")
    assert resumed.returncode == 0, str(resumed)
    assert opened == [(True, False, 1), (False, False, 0), (True, False, 1)]
    digests = [digest_of(tmp_path / name) for name in ("straight", "stopped")]
    assert digests[0] == digests[1]


STEPS = ["--epochs", "3", "--lr", "0.02"]


def test_training_by_steps_leaves_them_out_where_left_and_right_differ_and_says_so(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]]
) -> None:
    told = train(sides, tmp_path / "auto", *STEPS)
    assert told.returncode == 0, str(told)
    assert "note: horizontal flips: off (leave-one-out loss of 40 samples" in told.stdout
    assert "pixels averaged to 8 x 8" in told.stdout
    found = summary_of(tmp_path / "auto")
    assert found["mirror"]["taken"] is False and found["mirror"]["accuracy_without"] > 0.9
    # Exactly as if that had been asked for: looking costs no draw of anybody's random numbers.
    off = train(sides, tmp_path / "off", *STEPS, "--flips", "off")
    assert off.returncode == 0 and "flips" not in off.stdout, str(off)
    on = train(sides, tmp_path / "on", *STEPS, "--flips", "on")
    assert "note: horizontal flips: on; use --flips off" in on.stdout, str(on)
    assert opened == [(False, False, 0), (False, False, 0), (False, True, 0)]
    summaries = {name: summary_of(tmp_path / name) for name in ("auto", "off", "on")}
    assert ["mirror" in each for each in summaries.values()] == [True, False, False]
    digests = [each["parameter_digest"] for each in summaries.values()]
    assert digests[0] == digests[1] != digests[2]


def test_blocks_with_trained_weights_are_asked_themselves(sides: Path, tmp_path: Path) -> None:
    assert train(sides, tmp_path / "before", *STEPS, "--flips", "off").returncode == 0
    weights = ["--weights", str(tmp_path / "before" / "model.pt")]
    told = train(sides, tmp_path / "after", *STEPS, *weights, "--freeze", "coherence")
    assert "horizontal flips: off" in told.stdout and "the network's blocks" in told.stdout, str(told)


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images whose classes are shades, and the same in a mirror."""
    root, random = tmp_path_factory.mktemp("shades"), np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 5)):
        for name, lightest in (("dark", 120), ("light", 240)):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, lightest, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def test_training_by_steps_keeps_them_where_they_show_the_same_classes(
    shades: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]]
) -> None:
    told = train(shades, tmp_path / "auto", *STEPS)
    assert "note: horizontal flips: on (leave-one-out loss of 40 samples" in told.stdout, str(told)
    assert "use --flips off if left and right matter" in told.stdout
    assert train(shades, tmp_path / "on", *STEPS, "--flips", "on").returncode == 0
    assert opened == [(False, True, 0)] * 2
    digests = [digest_of(tmp_path / name) for name in ("auto", "on")]
    assert digests[0] == digests[1]
    assert summary_of(tmp_path / "auto")["mirror"]["taken"] is True


@pytest.mark.parametrize("head_fit", ["kernel", "exact"])
def test_a_head_on_the_mean_over_them_answers_alike_for_an_image_and_its_mirror_image(
    shades: Path, tmp_path: Path, head_fit: str
) -> None:
    flags = ["--epochs", "1", "--flips", "mean", "--head-fit", head_fit]
    told = auto(shades, tmp_path / "run", *flags)
    assert told.returncode == 0 and "the head averages the features of each image and its flip" in told.stdout, str(
        told
    )
    assert summary_of(tmp_path / "run")["head"]["rows"] == 40, "mirror images are no rows"
    applied = hvfreeze.load_model(tmp_path / "run", trust_code=True)
    assert applied.card.head == {"kernel": "kernel:4:mirrored", "exact": "multi-level:4:mirrored"}[head_fit]
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(applied.logits(images), applied.logits(images.flip(3)))
    evaluated = succeed("evaluate", str(tmp_path / "run"), "--trust-code", "--out", str(tmp_path / "out"))
    assert "as the run reported" in evaluated.stdout, str(evaluated)


def test_the_mean_over_them_is_planned_and_taken_where_they_show_the_same_classes(
    shades: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = auto(shades, tmp_path / "asked", "--epochs", "1", "--flips", "mean")
    monkeypatch.setattr(parts, "ALL_COMPARED", 40)
    told = auto(shades, tmp_path / "told", "--epochs", "1")
    assert asked.returncode == told.returncode == 0, f"{asked}{told}"
    assert "so predictions take 2x longer" in told.stdout and "2x longer" not in asked.stdout
    assert "note: horizontal flips: on (leave-one-out" in told.stdout
    digests = [digest_of(tmp_path / name) for name in ("asked", "told")]
    assert digests[0] == digests[1]


def test_the_mean_over_them_is_refused_for_a_head_that_is_trained(shades: Path, tmp_path: Path) -> None:
    told = train(shades, tmp_path / "run", "--epochs", "1", "--flips", "mean")
    assert told.returncode == 2 and "flips (mean) must be auto, on or off unless" in told.stderr, str(told)


def test_a_head_that_guesses_leaves_flips_on(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(15):
                pixels = random.integers(0, 255, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{number}.png")
    told = train(tmp_path / "data", tmp_path / "run", *STEPS)
    assert "note: horizontal flips: on (leave-one-out loss of 30 samples" in told.stdout, str(told)


def test_a_resumed_run_goes_on_with_what_was_found_out_at_its_start(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(sides, tmp_path / "straight", *STEPS).returncode == 0
    stop_after_a_step(monkeypatch, sides, tmp_path / "stopped", *STEPS)
    # As by a version that found out nothing, or on other ranks, whose sums are rounded otherwise.
    opened.clear()
    monkeypatch.setattr(build, "find_out", lambda *args, **options: None)
    resumed = train(sides, tmp_path / "stopped", *STEPS, "--resume")
    assert resumed.returncode == 0, str(resumed)
    assert opened == [(False, True, 0), (False, False, 0)]
    digests = [digest_of(tmp_path / name) for name in ("straight", "stopped")]
    assert digests[0] == digests[1]


def test_a_switch_that_changes_nothing_is_told(tmp_path: Path) -> None:
    small = [*SMALL, "--train-samples", "40", "--epochs", "1"]
    digits = call("train", *small, "--flips", "on", "--run-dir", str(tmp_path / "run"))
    assert "--flips (on) has no effect: a flipped image of digits may not" in digits.stdout, str(digits)
