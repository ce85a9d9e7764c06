"""Horizontal flips: decided once for the whole run, told at the start, and left out where left and right differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import hvfreeze
from hvfreeze.errors import Preempted
from hvfreeze.training import build, loop, parts
from hvfreeze.training.job import Job
from hvfreeze.training.parts import Factory, Opened, Part
from tests.program import Outcome, call, digest_of, succeed, summary_of

SMALL = ["--model", "tests.kept.small_model:small", "--batch-size", "8", "--threads", "1"]


Draw = Callable[[np.random.Generator], NDArray[np.uint8]]


def save_images(root: Path, classes: Mapping[str, Draw], test: int) -> Path:
    """Save 20 training and `test` test images of each class, each drawn by the function of its class."""
    random = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", test)):
        for name, draw in classes.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(draw(random)).save(root / part / name / f"{number}.png")
    return root


def noise(most: int) -> Draw:
    return lambda random: random.integers(0, most, (32, 32, 3)).astype(np.uint8)


def bar(first: int) -> Draw:
    def draw(random: np.random.Generator) -> NDArray[np.uint8]:
        pixels = noise(60)(random)
        start = first + random.integers(0, 9)
        pixels[:, start : start + 4] = 220
        return pixels

    return draw


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with a bright bar on the left, or on the right, which alone tells their classes apart."""
    return save_images(tmp_path_factory.mktemp("sides"), {"left": bar(1), "right": bar(18)}, 15)


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images whose classes are shades, and the same in a mirror."""
    return save_images(tmp_path_factory.mktemp("shades"), {"dark": noise(120), "light": noise(240)}, 5)


def command(name: str, folder: Path, run: Path, *flags: str) -> list[str]:
    """Return the words of a small `auto` or `train` on a folder of images."""
    data = [str(folder)] if name == "auto" else ["--data", "imagefolder", "--data-dir", str(folder)]
    return [name, *data, *SMALL, "--run-dir", str(run), *flags]


def train(folder: Path, run: Path, *flags: str) -> Outcome:
    return succeed(*command("train", folder, run, *flags))


def auto(folder: Path, run: Path, *flags: str) -> Outcome:
    return succeed(*command("auto", folder, run, *flags))


def stop_after_a_step(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Train until the first step of fine-tuning is made, and leave as if that was asked for."""
    make_step = loop.train_step

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = True
        return make_step(job, batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", step)
        assert call(*words).returncode == Preempted.exit_code


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


def test_a_fitted_head_leaves_them_out_where_left_and_right_differ_and_says_so(sides: Path, tmp_path: Path) -> None:
    flags = ["--head", "multi-level", "--head-fit", "exact", "--augment", "none"]
    told = train(sides, tmp_path / "auto", *flags)
    assert "note: horizontal flips: off (leave-one-out loss of 40 samples" in told.stdout, str(told)
    found = summary_of(tmp_path / "auto")
    assert found["test_accuracy"] > 0.9 and found["head"]["rows"] == 40
    assert found["mirror"]["accuracy_without"] > found["mirror"]["accuracy_with"] + 0.2
    asked = train(sides, tmp_path / "on", *flags, "--flips", "on")
    assert "horizontal flips: on; use --flips off" in asked.stdout, str(asked)
    assert summary_of(tmp_path / "on")["head"]["rows"] == 80
    assert summary_of(tmp_path / "on")["test_accuracy"] < 0.8


def test_what_was_found_out_holds_for_every_verb_also_when_the_run_is_resumed(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--epochs", "4"]
    straight = auto(sides, tmp_path / "straight", *flags)
    # The first is opened before the recipe begins, so that settings that do not fit are refused early.
    assert opened == [(True, False, 1), (False, False, 0), (True, False, 1)]
    assert straight.stdout.count("horizontal flips: off") == 1, "it is found out once"
    stop_after_a_step(monkeypatch, *command("auto", sides, tmp_path / "stopped", *flags))
    opened.clear()
    auto(sides, tmp_path / "stopped", *flags, "--resume")
    assert opened == [(True, False, 1), (False, False, 0), (True, False, 1)]
    assert digest_of(tmp_path / "stopped") == digest_of(tmp_path / "straight")


STEPS = ["--epochs", "3", "--lr", "0.02"]


def test_training_by_steps_leaves_them_out_where_left_and_right_differ_and_says_so(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]]
) -> None:
    told = train(sides, tmp_path / "auto", *STEPS)
    assert "note: horizontal flips: off (leave-one-out loss of 40 samples" in told.stdout
    assert "pixels averaged to 8 x 8" in told.stdout
    found = summary_of(tmp_path / "auto")
    assert found["mirror"]["taken"] is False and found["mirror"]["accuracy_without"] > 0.9
    # Exactly as if that had been asked for: looking costs no draw of anybody's random numbers.
    off = train(sides, tmp_path / "off", *STEPS, "--flips", "off")
    assert "flips" not in off.stdout, str(off)
    on = train(sides, tmp_path / "on", *STEPS, "--flips", "on")
    assert "note: horizontal flips: on; use --flips off" in on.stdout, str(on)
    assert opened == [(False, False, 0), (False, False, 0), (False, True, 0)]
    summaries = {name: summary_of(tmp_path / name) for name in ("auto", "off", "on")}
    assert ["mirror" in each for each in summaries.values()] == [True, False, False]
    digests = [each["parameter_digest"] for each in summaries.values()]
    assert digests[0] == digests[1] != digests[2]


def test_blocks_with_trained_weights_are_asked_themselves(sides: Path, tmp_path: Path) -> None:
    train(sides, tmp_path / "before", *STEPS, "--flips", "off")
    weights = ["--weights", str(tmp_path / "before" / "model.pt")]
    told = train(sides, tmp_path / "after", *STEPS, *weights, "--freeze", "coherence")
    assert "horizontal flips: off" in told.stdout and "the network's blocks" in told.stdout, str(told)


def test_training_by_steps_keeps_them_where_they_show_the_same_classes(
    shades: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]]
) -> None:
    told = train(shades, tmp_path / "auto", *STEPS)
    assert "note: horizontal flips: on (leave-one-out loss of 40 samples" in told.stdout, str(told)
    assert "use --flips off if left and right matter" in told.stdout
    train(shades, tmp_path / "on", *STEPS, "--flips", "on")
    assert opened == [(False, True, 0)] * 2
    assert digest_of(tmp_path / "auto") == digest_of(tmp_path / "on")
    assert summary_of(tmp_path / "auto")["mirror"]["taken"] is True


def test_a_head_on_the_mean_over_them_answers_alike_for_an_image_and_its_mirror_image(
    shades: Path, tmp_path: Path
) -> None:
    told = auto(shades, tmp_path / "run", "--epochs", "1", "--flips", "mean", "--head-fit", "kernel")
    assert "the head averages the features of each image and its flip" in told.stdout, str(told)
    assert summary_of(tmp_path / "run")["head"]["rows"] == 40, "mirror images are no rows"
    applied = hvfreeze.load_model(tmp_path / "run", trust_code=True)
    assert applied.card.head == "kernel:4:mirrored"
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
    assert "so predictions take 2x longer" in told.stdout and "2x longer" not in asked.stdout
    assert "note: horizontal flips: on (leave-one-out" in told.stdout
    assert digest_of(tmp_path / "asked") == digest_of(tmp_path / "told")


def test_a_head_that_guesses_leaves_flips_on(tmp_path: Path) -> None:
    save_images(tmp_path / "data", {"a": noise(255), "b": noise(255)}, 15)
    told = train(tmp_path / "data", tmp_path / "run", *STEPS)
    assert "note: horizontal flips: on (leave-one-out loss of 40 samples" in told.stdout, str(told)


def test_a_resumed_run_goes_on_with_what_was_found_out_at_its_start(
    sides: Path, tmp_path: Path, opened: list[tuple[bool, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(sides, tmp_path / "straight", *STEPS)
    stop_after_a_step(monkeypatch, *command("train", sides, tmp_path / "stopped", *STEPS))
    # As by a version that found out nothing, or on other ranks, whose sums are rounded otherwise.
    opened.clear()
    monkeypatch.setattr(build, "find_out", lambda *args, **options: None)
    train(sides, tmp_path / "stopped", *STEPS, "--resume")
    assert opened == [(False, True, 0), (False, False, 0)]
    assert digest_of(tmp_path / "stopped") == digest_of(tmp_path / "straight")
