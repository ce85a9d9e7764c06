"""Images are normalised as the weights were trained, whoever says how that was, and every run says what it does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hvfreeze.config.tree import from_dict
from hvfreeze.inference import normalisation
from hvfreeze.inference.card import read_card, write_card
from hvfreeze.inference.normalisation import Normalisation, normalisation_of
from hvfreeze.samples import opening as samples
from tests.program import call

HALF, IMAGENET = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DATA: Any = SimpleNamespace(name="imagefolder", mean=IMAGENET[0], std=IMAGENET[1])


def found(module: nn.Module | None = None, /, **settings: Any) -> Normalisation:
    return normalisation_of(from_dict(settings), DATA, module or nn.Identity())


def configured(**more: Any) -> nn.Module:
    model = nn.Identity()
    model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), **more}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("weights", ["DEFAULT", "lite0.pt", "https://some.org/lite0.pt"])
def test_weights_of_timm_have_the_statistics_that_it_says(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    monkeypatch.setattr(normalisation, "timm_statistics", lambda name: HALF)
    there = found(model="timm:tf_efficientnet_lite0", weights=weights)
    assert there == Normalisation(HALF, "timm's for tf_efficientnet_lite0")
    assert found(model="timm:tf_efficientnet_lite0").statistics == IMAGENET, "weights that start at random"
    told = found(model="timm:tf_efficientnet_lite0", weights=weights, mean="0.1", std="0.2")
    assert told == Normalisation(((0.1,) * 3, (0.2,) * 3), "--mean and --std")


def test_the_configuration_beside_a_file_comes_before_that_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalisation, "timm_statistics", lambda name: HALF)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    for text, expected in (
        (json.dumps({"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}}), (0.1, 0.2, 0.3)),
        (json.dumps({"pretrained_cfg": {"mean": ["x"], "std": [1, 2, 3]}}), HALF[0]),
        (json.dumps({"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0, 0, 0]}}), HALF[0]),
        ("[]", HALF[0]),
        ("no json", HALF[0]),
    ):
        settings.write_text(text)
        assert found(model="timm:vit", weights=str(file)).statistics[0] == expected


def test_a_file_of_torchvisions_is_read_as_its_default_weights_are(tmp_path: Path) -> None:
    there = found(model="resnet18", weights=str(tmp_path / "resnet18-f37072fd.pth"), data="cifar10")
    assert there == Normalisation(IMAGENET, "torchvision's for ResNet18_Weights.IMAGENET1K_V1")
    assert found(model="resnet18", weights="IMAGENET1K_V1") == there
    assert found(model="resnet18", weights=str(tmp_path / "mine.pth")).source.startswith("ImageNet's, as default")


def test_weights_of_a_run_bring_the_normalisation_that_they_were_trained_with(copy: Path) -> None:
    card = read_card(copy / "model.yaml")
    write_card(copy / "model.yaml", replace(card, image=replace(card.image, mean=HALF[0], std=HALF[1])))
    weights = copy / "model.pt"
    there = found(model="shufflenet_v2_x0_5", weights=str(weights))
    assert there == Normalisation(HALF, f"those of the run that made {weights}")
    write_card(copy / "model.yaml", replace(card, sha256="0" * 64))
    assert found(model="shufflenet_v2_x0_5", weights=str(weights)).statistics == IMAGENET, "the card of another file"


def test_a_model_of_ones_own_may_say_it_itself() -> None:
    settings = {"model": "mine:make", "weights": "file.pt"}
    assert found(configured(), **settings) == Normalisation(HALF, "those in the configuration of mine:make")
    assert found(configured(std=(1,)), **settings).statistics == IMAGENET
    # Whether it loaded weights is unknown.
    told = found(configured(), model="mine:make")
    assert (
        told.statistics == IMAGENET
        and "the values of the model's configuration: --mean 0.5,0.5,0.5 --std 0.5," in told.advice
    )


def test_every_run_says_how_images_are_normalised_and_its_card_from_which_weights_it_started(tmp_path: Path) -> None:
    flags = "--model mlp-16x16 --train-samples 60 --batch-size 8 --epochs 1 --threads 1"
    outcome = call("train", *flags.split(), "--run-dir", str(tmp_path / "first"))
    assert (
        "mean 0.3053, 0.3053, 0.3053 and standard deviation 0.3759, 0.3759, 0.3759 (those of digits)"
        in (tmp_path / "first" / "log.txt").read_text()
    )
    weights = tmp_path / "first" / "model.pt"
    more = ("--weights", str(weights), "--validation-fraction", "0.2", "--precision", "bfloat16")
    outcome = call("train", *flags.split(), *more, "--run-dir", str(tmp_path / "second"))
    log = (tmp_path / "second" / "log.txt").read_text()
    assert f"those of the run that made {weights}" in log and "normalised" not in outcome.stdout
    card = read_card(tmp_path / "second" / "model.yaml")
    assert (card.weights, card.precision, card.accuracy_on) == (str(weights), "bfloat16", "held-out")
    assert card.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_a_run_looks_once_for_how_its_weights_were_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked: list[Normalisation] = []

    def look(*given: Any) -> Normalisation:
        looked.append(normalisation_of(*given))
        return looked[-1]

    monkeypatch.setattr(samples, "normalisation_of", look)
    flags = "--model mlp-16x16 --train-samples 32 --batch-size 16 --epochs 1 --threads 1".split()
    outcome = call("train", *flags, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 0 and [each.describe() for each in looked] == [
        line.partition("note: ")[2]
        for line in (tmp_path / "run" / "log.txt").read_text().splitlines()
        if "are normalised with" in line
    ], str(outcome)
