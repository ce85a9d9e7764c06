from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis import backbone
from analysis.sweeps.experiment import RESULTS
from hvfreeze.chain.origins.weights import read_weights
from hvfreeze.data.sets.image_set import DataSplits, ImageSet
from hvfreeze.data.sets.opening import open_data
from hvfreeze.data.sources import ArraySource


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of four classes that differ in their brightness, in place of CIFAR-100."""

    def split(count: int) -> ImageSet:
        labels = torch.arange(count) % 4
        noise = np.random.default_rng(count).integers(0, 30, (count, 3, 32, 32))
        pixels = (60 * labels.numpy()[:, None, None, None] + noise).astype(np.uint8)
        digits = open_data("digits").train
        return dataclasses.replace(
            digits, name="cifar100", classes=tuple("abcd"), labels=labels, source=ArraySource(pixels=pixels, side=None)
        )

    monkeypatch.setattr(backbone, "prepare_data", lambda name, directory: None)
    splits = DataSplits(train=split(96), validation=None, test=split(24))
    monkeypatch.setattr(backbone, "open_data", lambda name, directory: splits)
    monkeypatch.setattr(backbone, "BATCH", 16)


def made(folder: Path, name: str, recipe: str, *more: str) -> Path:
    out = folder / name
    small = ["--model", "shufflenet_v2_x0_5", "--threads", "1"]
    assert backbone.main([recipe, "--out", str(out), *small, *more]) == 0
    return out


def test_both_recipes_train_and_say_the_digest_of_what_they_wrote(
    made_up: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(tmp_path, "a.pt", "32px", "--epochs", "3")
    said = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert f"SHA-256 {backbone.hashlib.sha256(first.read_bytes()).hexdigest()}" in said
    state = read_weights(str(first))
    assert {tensor.dtype for name, tensor in state.items() if "num_batches" not in name} == {torch.float16}
    assert backbone.RECIPES["32px"].sha256 in said
    assert made(tmp_path, "b.pt", "32px", "--epochs", "3").read_bytes() == first.read_bytes()
    second = made(tmp_path, "c.pt", "64px", "--epochs", "1", "--start", str(first))
    assert second.read_bytes() != first.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c.pt"]


def test_the_second_recipe_needs_the_first_ones_file(
    made_up: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backbone.main(["64px", "--out", str(tmp_path / "a.pt")]) == 2
    assert "name it with --start" in capsys.readouterr().err


def test_the_digests_are_those_that_the_kept_results_name() -> None:
    known = {recipe.file: recipe.sha256 for recipe in backbone.RECIPES.values()}
    named = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*/preset.json"))]
    assert len(named) == 16
    # Another family's, which its experiment trains itself.
    named = [told for told in named if told["flags"]["weights"] != "model.pt"]
    assert len(named) == 15
    assert {told["flags"]["weights"] for told in named} == set(known)
    for told in named:
        assert told["weights_sha256"] == known[told["flags"]["weights"]]
