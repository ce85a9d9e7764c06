"""Weights of single samples: in the loss from the first step, in fitted heads, with caches, resumed and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hvfreeze.config.registry import STRATEGIES
from hvfreeze.optim import Mixture, Objective
from hvfreeze.row_weights import class_weights, scaled_weights
from hvfreeze.tasks import Classes, MultiLabel, Numbers, Task
from tests.program import call, digest_of, succeed, summary_of
from tests.single.refusing import refused
from tests.single.training.test_unequal_classes import FLAGS, save_images

LABELS = torch.tensor([0] * 12 + [1] * 3 + [2])
LOGITS = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
GIVEN = torch.arange(16).double() % 4
SAMPLES = GIVEN.nonzero().flatten()


def test_weights_have_mean_1_over_the_training_samples() -> None:
    found = scaled_weights(GIVEN, SAMPLES)
    assert float(found[SAMPLES].mean()) == pytest.approx(1)
    assert float(found[3] / found[1]) == pytest.approx(3)
    assert torch.equal(scaled_weights(1e-9 * GIVEN, SAMPLES)[SAMPLES], found[SAMPLES])


@pytest.mark.parametrize("task", [Classes(3), MultiLabel(3), Numbers(3)], ids=lambda task: task.kind)
def test_a_loss_is_the_mean_of_weighted_ones_and_rows_know_their_samples(task: Task) -> None:
    weights = scaled_weights(GIVEN, SAMPLES)
    labels = LABELS if task.kind == "classes" else functional.one_hot(LABELS, 3).float()
    each = task.training_losses(LOGITS, labels, smoothing=0.0)
    objective = Objective(task=replace(task, sample_weights=weights), mixup=0.5, seed=3)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    rows = Mixture(LOGITS[order], labels[order], order.numpy())
    torch.testing.assert_close(objective.loss(LOGITS[order], rows), (each * weights).mean())
    torch.testing.assert_close(objective.each(LOGITS[order], labels[order], order), (each * weights)[order])
    # A sample that is mixed in brings its own weight.
    mixed = objective.mix(LOGITS, labels, SAMPLES.new_tensor(range(16)), step=1)
    assert mixed.partners is not None and mixed.part < 1
    others = task.training_losses(LOGITS, labels[mixed.partners], smoothing=0.0) * weights[mixed.partners]
    wanted = mixed.part * (each * weights).mean() + (1 - mixed.part) * others.mean()
    torch.testing.assert_close(objective.loss(LOGITS, mixed), wanted)


def test_sample_weights_count_while_class_weights_are_deferred() -> None:
    weights = scaled_weights(GIVEN, SAMPLES)
    balanced = class_weights(torch.bincount(LABELS[SAMPLES], weights[SAMPLES], minlength=3), "balanced")
    task = Classes(3, weights=balanced, sample_weights=weights)
    product = torch.tensor(balanced)[LABELS] * weights
    assert float(product[SAMPLES].mean()) == pytest.approx(1)
    torch.testing.assert_close(task.weights_of(LABELS, torch.arange(16)), product)
    for deferred, expected in ((True, weights), (False, product)):
        task.defer_weights(deferred)
        torch.testing.assert_close(task.weights_of(LABELS, torch.arange(16), training=True), expected)
        each = functional.cross_entropy(LOGITS, LABELS, reduction="none")
        torch.testing.assert_close(task.training_loss(LOGITS, LABELS, torch.arange(16)), (each * expected).mean())


def table(folder: Path, weights: dict[str, float], name: str = "labels.csv", *, scale: float = 1.0) -> str:
    """Save a table of noise, 18 common and 4 rare training images, with weights by class or file, 1 for others."""
    if not (folder / "train").exists():
        save_images(folder, rare=4)
    lines = ["image,label,split,sample_weight"]
    for image in sorted(folder.rglob("*.png")):
        split, kind, file = image.relative_to(folder).parts
        weight = weights.get(file, weights.get(kind, 1.0)) if split == "train" else 1.0
        lines.append(f"{image.relative_to(folder)},{kind},{split},{weight * scale}")
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def digest(run: Path, words: str, data: str, *more: str) -> str:
    """Run a command on a table, and return the digest of its parameters."""
    command, *flags = words.split()
    given = [data] if command == "auto" else ["--data", data]
    succeed(command, *given, *flags, *FLAGS.split(), "--run-dir", str(run), *more)
    return digest_of(run)


TRAIN = "train --epochs 1"
COMMANDS = [TRAIN, "auto --epochs 1", "train --head-fit exact --head multi-level"]
PARTS = {"local-critics": " --parts 2"}
COMMANDS += [
    f"{TRAIN} --strategy {name}{PARTS.get(name, '')}" for name, kind in STRATEGIES.items() if kind.takes_weights
]


@pytest.mark.parametrize("words", COMMANDS)
def test_weights_make_another_model_and_those_of_weight_0_are_left_out(words: str, tmp_path: Path) -> None:
    folder, weights = tmp_path / "images", {"rare": 4.5, "7.png": 3.0}
    weighted = digest(tmp_path / "weighted", words, table(folder, weights))
    assert digest(tmp_path / "equal", words, table(folder, {})) != weighted
    if "--strategy" in words:
        return
    some = digest(tmp_path / "some", words, table(folder, {**weights, "0.png": 0.0}))
    # Only how weights compare counts; images that cannot be read are left out too.
    for kind in ("common", "rare"):
        (folder / "train" / kind / "0.png").write_bytes(b"")
    damaged = table(folder, {**weights, "0.png": 1.0}, scale=2.0)
    assert digest(tmp_path / "fewer", words, damaged, "--skip-bad") == some


def test_a_weight_of_a_class_in_each_row_is_its_class_weight_in_a_fitted_head(tmp_path: Path) -> None:
    fitted = "train --head-fit exact --head multi-level"
    by_row = digest(tmp_path / "rows", fitted, table(tmp_path / "images", {"rare": 4.5}))
    equal = table(tmp_path / "images", {}, "equal.csv")
    assert digest(tmp_path / "class", fitted, equal, "--class-weights", "rare=4.5") == by_row


def test_weights_are_those_of_the_samples_with_a_cache_and_after_a_resumption(tmp_path: Path) -> None:
    data = table(tmp_path / "images", {"rare": 4.5, "7.png": 3.0})
    words = "train --freeze static --cut 1 --epochs"
    cache = ["--cache", "on", "--cache-dir", str(tmp_path / "rows")]
    digests = [digest(tmp_path / "cached", f"{words} 2", data, *cache), digest(tmp_path / "plain", f"{words} 2", data)]
    # Other weights can use the rows that are there.
    digest(tmp_path / "other", f"{words} 2", table(tmp_path / "images", {}), *cache)
    written = [summary_of(tmp_path / run)["cache"]["rows_written"] for run in ("cached", "other")]
    assert written[0] > 0 and written[1] == 0, written
    data = table(tmp_path / "images", {"rare": 4.5, "7.png": 3.0})
    digest(tmp_path / "resumed", f"{words} 1", data, *cache)
    succeed("train", "--resume", "--run-dir", str(tmp_path / "resumed"), "--epochs", "2")
    digests.append(digest_of(tmp_path / "resumed"))
    assert len(set(digests)) == 1, digests
    table(tmp_path / "images", {"rare": 4.0})
    again = call("train", "--resume", "--run-dir", str(tmp_path / "resumed"), "--epochs", "3")
    refused(again, 3, "was trained on other data (train)")


def test_a_strategy_with_a_loss_of_its_own_refuses_weights(tmp_path: Path) -> None:
    data = table(tmp_path / "images", {})
    words = ["train", "--data", data, "--strategy", "shared-trunk", *FLAGS.split(), "--run-dir", str(tmp_path / "run")]
    refused(call(*words), 2, "--strategy (shared-trunk) does not fit the dataset, which has sample weights", "none")
    succeed(*words, "--weight-column", "none")
