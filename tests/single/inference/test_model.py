"""A run's model as a library's user gets it: the pixels and the logits of the run's own evaluation, or a refusal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import hvfreeze
from hvfreeze.data.batches import rows_at_once
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.views import parse_augment, transform_for
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference.card import read_card, write_card
from hvfreeze.inference.evaluate import measure, own_samples
from hvfreeze.inference.exits import Answering
from tests.program import call
from tests.single.inference.conftest import CLASSES, Finished


def rewritten(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a card's entries."""
    path = run / "model.yaml"
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))


def test_the_card_says_what_the_run_was(finished: Finished) -> None:
    card = hvfreeze.load_model(finished.run).card
    assert card.classes == tuple(CLASSES) and card.model == "shufflenet_v2_x0_5" and card.blocks == "stage"
    assert (card.image.height, card.image.width, card.image.enlarged_to) == (36, 36, 48)
    assert card.accuracy == finished.summary["test_accuracy"] and card.accuracy_on == "test"
    assert card.parameter_digest == finished.summary["parameter_digest"]
    assert (card.epochs, card.steps, card.batch_size, card.weights_sha256) == (
        6,
        36,
        rows_at_once(8, (3, 48, 48)),
        None,
    )
    assert card.versions["hvfreeze"] == hvfreeze.__version__ and card.versions["torch"] == torch.__version__
    assert (finished.run / "model.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("names", [("blåbær", "猫"), ("a\x85b", "猫"), ("\x85", "\u2028"), ("a: b", "- #\t")])
def test_names_of_classes_come_back_and_stay_readable(
    finished: Finished, tmp_path: Path, names: tuple[str, ...]
) -> None:
    card = replace(hvfreeze.load_model(finished.run).card, classes=names)
    write_card(tmp_path / "model.yaml", card)
    assert read_card(tmp_path / "model.yaml") == card
    readable = "\x85" not in "".join(names)
    assert all(name in (tmp_path / "model.yaml").read_text() for name in names if name.isalpha() and readable)


def test_a_card_of_large_images_and_many_classes_comes_back(finished: Finished, tmp_path: Path) -> None:
    card, path = hvfreeze.load_model(finished.run).card, tmp_path / "model.yaml"
    assert card.image is not None
    # The name of one class is as long as those of many.
    large = replace(card, classes=("a" * 2**17, "b"), image=replace(card.image, height=30_000, width=5_000))
    write_card(path, large)
    assert read_card(path) == large and path.stat().st_size > 2**17
    path.write_bytes(b"a" * (2**24 + 1))
    with pytest.raises(RefusedError, match=r"model.yaml is damaged: it is longer than 16777216 bytes"):
        read_card(path)


def test_the_transform_gives_the_pixels_of_the_evaluation(finished: Finished) -> None:
    applied = hvfreeze.load_model(finished.run)
    test = open_data("imagefolder", finished.images, image_size=48).test
    theirs = transform_for(test, augment=parse_augment("none"), data_seed=0, image_size=48)
    for row in (0, 1, 20):
        expected = theirs.clean(torch.from_numpy(test.decode(row))[None])[0]
        with Image.open(test.source.root / test.source.paths[row]) as image:  # type: ignore[union-attr]
            assert torch.equal(applied.transform(image), expected)
    decoded = torch.from_numpy(test.decode(0))
    assert torch.equal(applied.transform(decoded), applied.transform(torch.stack([decoded] * 2))[1])
    grey = torch.arange(36 * 36, dtype=torch.int64).remainder(256).to(torch.uint8).view(36, 36)
    assert torch.equal(applied.transform(grey), applied.transform(grey.expand(3, 36, 36)))


def test_what_is_no_image_is_refused(finished: Finished) -> None:
    transform = hvfreeze.load_model(finished.run).transform
    for odd in (torch.zeros(3, 4, 4), torch.zeros(5, 4, 4, dtype=torch.uint8), Image.new("F", (4, 4))):
        with pytest.raises(UsageError, match=r"the image cannot be used"):
            transform(odd)


def test_a_loaded_model_is_ready_and_leaves_random_state_alone(finished: Finished, copy: Path) -> None:
    for name in ("config.yaml", "summary.json", "metrics.jsonl"):
        (copy / name).unlink()  # the two files of the model are enough
    before = torch.get_rng_state()
    applied, again = hvfreeze.load_model(copy), hvfreeze.load_model(str(finished.run))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in applied.model.modules())
    images = torch.stack([applied.transform(Image.new("RGB", (50, 30), colour)) for colour in CLASSES.values()])
    assert torch.equal(applied.logits(images), again.logits(images)) and images.shape == (3, 3, 48, 48)
    assert applied.logits(images).shape == (3, 3) and not applied.logits(images).requires_grad
    convolution = next(p for p in applied.model.parameters() if p.ndim == 4 and p.shape[2] > 1 and p.shape[1] > 1)
    assert convolution.is_contiguous(memory_format=torch.channels_last)


def test_one_of_several_models_is_loaded_by_its_name(finished: Finished, copy: Path) -> None:
    for suffix in ("pt", "yaml"):
        (copy / f"model.{suffix}").rename(copy / f"model-a.{suffix}")
    images = torch.zeros(1, 3, 48, 48)
    expected = hvfreeze.load_model(finished.run).logits(images)
    assert torch.equal(hvfreeze.load_model(copy, name="model-a").logits(images), expected)
    with pytest.raises(RefusedError, match=r"holds no model.pt, but model-a"):
        hvfreeze.load_model(copy)


CARDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown head": (lambda card: card.update(head="many"), r"head \(many\) is unknown"),
    "another format": (lambda card: card.update(card=2), "format 2, and this version of hvfreeze reads 1"),
    "another head": (lambda card: card.update(head="multi-level:2"), r"does not fit model.pt: body.conv1.0.weight"),
    "no classes": (lambda card: card.pop("classes"), "it lacks classes"),
    "another model": (lambda card: card.update(model="resnet18"), "does not fit model.pt: conv1.weight"),
    "no such model": (lambda card: card.update(model="os.system"), "os.system"),
    "a huge size": (lambda card: card["image"].update(enlarged_to=10**6), r"image.enlarged_to \(1000000\)"),
    "a crop that is larger": (lambda card: card["image"].update(cropped_to=37), r"image.cropped_to \(37\) must fit"),
    "a zero deviation": (lambda card: card["image"].update(std=[0, 1, 1]), "image.std .* must be three positive"),
    "no number": (lambda card: card["image"].update(mean=[0, 1, float("nan")]), "image.mean .* three numbers"),
    "another file": (lambda card: card.update(sha256="0" * 64), "does not match model.yaml"),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_that_does_not_fit_is_refused_by_name(copy: Path, case: str) -> None:
    change, message = CARDS[case]
    rewritten(copy, change)
    with pytest.raises(RefusedError, match=message) as refused:
        hvfreeze.load_model(copy)
    assert str(copy / "model.yaml") in str(refused.value) or "match model.yaml" in str(refused.value)


def test_a_card_that_is_none_is_refused_and_runs_no_code(copy: Path) -> None:
    probe = copy / "probe"
    for text in ("card: [", "- 1", f"card: !!python/object/apply:os.mkdir [{probe}]", "a: &a 1\ncard: *a", "[" * 9999):
        (copy / "model.yaml").write_text(text)
        with pytest.raises(RefusedError, match=r"model.yaml is damaged"):
            hvfreeze.load_model(copy)
    assert not probe.exists()


def test_a_directory_without_a_finished_model_is_refused(copy: Path, tmp_path: Path) -> None:
    def refused(place: Path, message: str) -> None:
        with pytest.raises(RefusedError, match=message):
            hvfreeze.load_model(place)

    refused(tmp_path / "nowhere", "nowhere does not exist")
    refused(tmp_path, "holds no finished model.*name the directory of a finished run")
    whole = (copy / "model.pt").read_bytes()
    (copy / "model.pt").write_bytes(whole[:-100])
    refused(copy, "model.pt does not match model.yaml.*; restore both files of one run")
    ended = (copy / "summary.json").read_bytes()
    (copy / "summary.json").unlink()
    refused(copy, "model.pt does not match model.yaml.*; continue the run with: hvfreeze train --run-dir .* --resume")
    (copy / "summary.json").write_bytes(ended)
    (copy / "model.pt").unlink()
    refused(copy, r"\(model.pt is missing\); continue the run with: hvfreeze train --run-dir .* --resume")
    (copy / "environment.json").write_text('{"size": 3}')
    refused(copy, "continue the run with: mpirun -np 3 --bind-to none hvfreeze train --run-dir .* --resume")
    (copy / "environment.json").write_text("{")
    spaced = copy.rename(tmp_path / "a run")
    refused(spaced, "continue the run with: hvfreeze train --run-dir '.*a run' --resume")
    spaced.rename(copy)
    (copy / "model.pt").write_bytes(whole)
    (copy / "model.yaml").unlink()
    refused(copy, "model.yaml is missing; copy it with model.pt")
    (copy / "summary.json").unlink()
    refused(copy, "model.yaml is missing; continue the run with: hvfreeze train --run-dir .* --resume")


def test_weights_that_are_not_the_models_are_refused_although_the_card_was_told(copy: Path) -> None:
    whole = torch.load(copy / "model.pt", weights_only=True)
    for changed, message in (
        ({k: v for k, v in whole.items() if k != "fc.bias"}, "does not fit model.pt: fc.bias"),
        ({**whole, "extra": torch.zeros(1)}, "does not fit model.pt: extra"),
        ({**whole, "fc.bias": torch.full_like(whole["fc.bias"], float("nan"))}, "NaN or Inf, as float32, in fc.bias"),
    ):
        torch.save(changed, copy / "model.pt")
        sha256 = hashlib.sha256((copy / "model.pt").read_bytes()).hexdigest()
        rewritten(copy, lambda card, sha256=sha256: card.update(sha256=sha256))  # type: ignore[misc]
        with pytest.raises(RefusedError, match=message):
            hvfreeze.load_model(copy)


@pytest.mark.parametrize("head", ["last", "multi-level"])
def test_a_run_whose_head_was_solved_is_applied_like_any_other(tmp_path: Path, head: str) -> None:
    flags = "--model resnet20 --image-size 8 --train-samples 80 --validation-fraction 0.2 --threads 1 --augment none"
    trained = call("train", *flags.split(), "--head", head, "--head-fit", "exact", "--run-dir", str(tmp_path))
    assert trained.returncode == 0, str(trained)
    applied = hvfreeze.load_model(tmp_path)
    assert applied.card.head.startswith(head)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    found = measure(Answering(applied), own_samples(applied, tmp_path))
    assert found.loss == pytest.approx(last["test_loss"], rel=1e-12) and found.accuracy == last["test_accuracy"]


def test_a_kernel_head_of_version_0_1_0_had_no_bias(tmp_path: Path) -> None:
    flags = "--model resnet20 --image-size 8 --train-samples 80 --validation-fraction 0.2 --threads 1 --augment none"
    trained = call("train", *flags.split(), *"--head multi-level --head-fit kernel --run-dir".split(), str(tmp_path))
    assert trained.returncode == 0, str(trained)
    whole, images = torch.load(tmp_path / "model.pt", weights_only=True), torch.rand(4, 3, 8, 8)
    logits = hvfreeze.load_model(tmp_path).logits(images)
    assert not whole.pop("head.bias").any()
    torch.save(whole, tmp_path / "model.pt")
    sha256 = hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
    rewritten(tmp_path, lambda card: card.update(sha256=sha256))
    assert torch.equal(hvfreeze.load_model(tmp_path).logits(images), logits)
