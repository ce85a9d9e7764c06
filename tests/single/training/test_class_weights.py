"""--class-weights: in the loss of every strategy, in solved heads and in the held-out loss; scikit-learn's meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight, compute_sample_weight
from torch.nn import functional

from hvfreeze import train
from hvfreeze.config.tree import from_dict
from hvfreeze.optim import Mixture, Objective
from hvfreeze.row_weights import class_weights
from hvfreeze.tasks import Classes
from tests.program import call, digest_of, succeed
from tests.single.training.test_unequal_classes import FLAGS, save_images

LABELS = torch.tensor([0] * 12 + [1] * 3 + [2])
LOGITS = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))


def test_balanced_is_what_scikit_learn_calls_balanced() -> None:
    labels, counts = LABELS.numpy(), torch.bincount(LABELS)
    assert class_weights(counts, "balanced") == pytest.approx(
        compute_class_weight("balanced", classes=np.arange(3), y=labels)
    )
    # The mean over samples is 1, whatever weights are given: only how they compare counts.
    once, twice = (torch.tensor(class_weights(counts, given))[LABELS] for given in ({2: 5.0}, [3.0, 3.0, 15.0]))
    assert torch.equal(once, twice) and float(once.double().mean()) == pytest.approx(1)
    assert float(once[-1] / once[0]) == pytest.approx(5)


def test_a_class_without_samples_divides_nothing_by_zero() -> None:
    found = class_weights(torch.tensor([12, 4, 0]), "balanced")
    assert np.isfinite(found).all() and found[:2] == pytest.approx(
        compute_class_weight("balanced", classes=np.arange(2), y=[0] * 12 + [1] * 4)
    )


def test_a_loss_is_the_mean_of_weighted_ones_also_of_parts_and_of_pairs() -> None:
    weights = torch.tensor(compute_sample_weight("balanced", LABELS.numpy())).float()
    each = functional.cross_entropy(LOGITS, LABELS, reduction="none", label_smoothing=0.1) * weights
    task = Classes(3, weights=class_weights(torch.bincount(LABELS), "balanced"))
    objective = Objective(task=task, smoothing=0.1)
    samples = torch.arange(16)
    whole = objective.loss(LOGITS, Mixture(LOGITS, LABELS, samples))
    torch.testing.assert_close(whole, each.mean())
    torch.testing.assert_close(objective.each(LOGITS, LABELS, samples), each)
    # Micro-batches, ranks and accumulated batches add up to it.
    parts = [(each[::2], each[1::2]) for each in (LOGITS, LABELS, samples)]
    halves = [objective.loss(logits, Mixture(logits, labels, ids)) for logits, labels, ids in zip(*parts)]
    torch.testing.assert_close(sum(halves) / 2, whole)
    partners = samples.flip(0)
    mixed = objective.loss(LOGITS, Mixture(LOGITS, LABELS, samples, partners, 0.75))
    theirs = functional.cross_entropy(LOGITS, LABELS[partners], reduction="none", label_smoothing=0.1) * weights.flip(0)
    torch.testing.assert_close(mixed, 0.75 * each.mean() + 0.25 * theirs.mean())


def test_the_last_fifth_of_the_steps_weights_classes(tmp_path: Path) -> None:
    folder, counted = save_images(tmp_path / "images", rare=4), []

    def training_loss(task: Classes, *args: Any, **rest: Any) -> torch.Tensor:
        counted.append(task.reweighting.is_on)
        return loss(task, *args, **rest)

    loss = Classes.training_loss
    settings = {"data": "imagefolder", "data_dir": str(folder), "model": "mlp-8", "epochs": 5, "batch_size": 8}
    with patch.object(Classes, "training_loss", training_loss):
        train(from_dict({**settings, "class_weights": "balanced", "threads": 1, "run_dir": str(tmp_path / "run")}))
    assert len(counted) >= 5 and counted == [False] * (len(counted) * 4 // 5) + [True] * -(-len(counted) // 5)
    task = Classes(3, weights=class_weights(torch.bincount(LABELS), "balanced"))
    task.reweighting.is_on = False
    found = task.training_loss(LOGITS, LABELS, torch.arange(16))
    torch.testing.assert_close(found, functional.cross_entropy(LOGITS, LABELS))


def test_early_stopping_waits_until_the_weights_count(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=4)
    epochs = {}
    for given in ("none", "balanced"):
        # Nothing is learned, so no evaluation after the first is better.
        settings = {"data": "imagefolder", "data_dir": str(folder), "model": "mlp-8", "epochs": 10, "lr": 1e-12}
        settings |= {"validation_fraction": 0.3, "early_stop": 1, "statistics": "kept", "batch_size": 4, "threads": 1}
        train(from_dict({**settings, "class_weights": given, "run_dir": str(tmp_path / given)}))
        epochs[given] = len((tmp_path / given / "metrics.jsonl").read_text().splitlines())
    assert epochs == {"none": 2, "balanced": 9}


@pytest.mark.parametrize(
    "words", ["auto", "train", "train --head-fit exact --head multi-level", "train --strategy grid"]
)
def test_weights_make_another_model_and_are_counted_among_training_samples(words: str, tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=4)
    command, *flags = words.split()
    data = [str(folder)] if command == "auto" else ["--data", "imagefolder", "--data-dir", str(folder)]
    digests = {}
    for given in ("none", "balanced", "rare=4.5") if "exact" in words else ("none", "balanced"):
        run = tmp_path / given
        epochs = [] if "exact" in words else ["--epochs", "1"]
        outcome = succeed(
            command, *data, *flags, *FLAGS.split(), *epochs, "--run-dir", str(run), "--class-weights", given
        )
        assert ("--class-weights balanced" in outcome.stdout) == (given == "none")
        digests[given] = digest_of(run)
    # 18 common ones and 4 rare ones.
    assert digests.get("rare=4.5", digests["balanced"]) == digests["balanced"] != digests["none"]


def test_a_class_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=4)
    outcome = call("auto", str(folder), *FLAGS.split(), "--class-weights", "rair=3", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and "did you mean 'rare'" in outcome.stderr, str(outcome)


def test_an_unknown_class_is_refused_with_the_classes_that_there_are(tmp_path: Path) -> None:
    flags = [*FLAGS.split()[2:], "--class-weights", "cat=2", "--run-dir", str(tmp_path / "run")]
    outcome = call("train", "--data", "digits", *flags)
    wanted = "--class-weights (cat) must be one of the 10 classes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert outcome.returncode == 2 and wanted in outcome.stderr, str(outcome)
