"""A run's model as a library's user gets it: the pixels and the logits of the run's own evaluation, or a refusal."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import hvfreeze
from hvfreeze.data.sets.opening import open_data
from hvfreeze.data.views.augment import parse_augment
from hvfreeze.data.views.transform import transform_for
from hvfreeze.errors import RefusedError, UsageError
from tests.program import call
from tests.single.applying.conftest import CLASSES, Finished


def rewritten(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a card's entries."""
    path = run / "model.yaml"
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))


def resave(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a model, and its card accordingly."""
    path = run / "model.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    rewritten(run, lambda card: card.update(sha256=hashlib.sha256(path.read_bytes()).hexdigest()))


def test_the_card_says_what_the_run_was(finished: Finished) -> None:
    card = hvfreeze.load(finished.run).card
    assert card.classes == tuple(CLASSES) and card.model == "shufflenet_v2_x0_5" and card.blocks == "stage"
    assert (card.image.height, card.image.width, card.image.enlarged_to) == (36, 36, 48)
    assert card.accuracy == finished.summary["test_accuracy"] and card.accuracy_on == "test"
    assert card.parameter_digest == finished.summary["parameter_digest"]
    assert (card.epochs, card.steps, card.batch_size, card.weights_sha256) == (6, 36, 8, None)
    assert card.versions["hvfreeze"] == hvfreeze.__version__ and card.versions["torch"] == torch.__version__
    assert (finished.run / "model.yaml").stat().st_mode & 0o777 == 0o600


def test_the_card_names_the_weights_that_training_started_from(finished: Finished, tmp_path: Path) -> None:
    weights = finished.run / "model.pt"
    flags = ["--model", "shufflenet_v2_x0_5", "--data", "imagefolder", "--data-dir", str(finished.images)]
    flags += ["--image-size", "36", "--batch-size", "16", "--epochs", "1", "--threads", "1", "--lr", "0.001", "--quiet"]
    flags += ["--validation-fraction", "0.2", "--weights", str(weights), "--precision", "bfloat16"]
    assert call("train", *flags, "--run-dir", str(tmp_path / "run")).returncode == 0
    applied = hvfreeze.load(tmp_path / "run")
    assert applied.card.weights == str(weights) and applied.card.precision == "bfloat16"
    assert applied.card.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert applied.card.accuracy_on == "held-out" and applied.card.image.enlarged_to is None


def test_the_transform_gives_the_pixels_of_the_evaluation(finished: Finished) -> None:
    applied = hvfreeze.load(finished.run)
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
    transform = hvfreeze.load(finished.run).transform
    for odd in (torch.zeros(3, 4, 4), torch.zeros(5, 4, 4, dtype=torch.uint8), Image.new("F", (4, 4))):
        with pytest.raises(UsageError, match=r"the image cannot be used"):
            transform(odd)


def test_a_loaded_model_is_ready_and_leaves_random_state_alone(finished: Finished, copy: Path) -> None:
    for name in ("config.yaml", "summary.json", "metrics.jsonl"):
        (copy / name).unlink()  # the two files of the model are enough
    before = torch.get_rng_state()
    applied, again = hvfreeze.load(copy), hvfreeze.load(str(finished.run))
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
    expected = hvfreeze.load(finished.run).logits(images)
    assert torch.equal(hvfreeze.load(copy, name="model-a").logits(images), expected)
    with pytest.raises(RefusedError, match=r"several models and no model.pt; name one of model-a"):
        hvfreeze.load(copy)


CARDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown head": (lambda card: card.update(head="many"), r"head \(many\) is not known"),
    "another format": (lambda card: card.update(card=2), "format 2, and this version reads 1"),
    "another head": (lambda card: card.update(head="multi-level:2"), r"does not fit model.pt: body.conv1.0.weight"),
    "no classes": (lambda card: card.pop("classes"), "it lacks classes"),
    "a class twice": (lambda card: card.update(classes=["red", "red"]), r"classes .* must be a list of different"),
    "a class more": (lambda card: card["classes"].append("white"), "does not fit model.pt: fc.weight"),
    "another model": (lambda card: card.update(model="resnet18"), "does not fit model.pt: conv1.weight"),
    "no such model": (lambda card: card.update(model="os.system"), "os.system"),
    "no size": (lambda card: card["image"].update(height="36"), r"image.height \(36\) must be a whole number"),
    "a huge size": (lambda card: card["image"].update(enlarged_to=10**6), r"image.enlarged_to \(1000000\)"),
    "a crop that is larger": (lambda card: card["image"].update(cropped_to=37), r"image.cropped_to \(37\) must fit"),
    "a zero deviation": (lambda card: card["image"].update(std=[0, 1, 1]), "image.std .* must be three positive"),
    "no number": (lambda card: card["image"].update(mean=[0, 1, float("nan")]), "image.mean .* three numbers"),
    "no image": (lambda card: card.update(image=3), r"image \(3\) must be"),
    "another file": (lambda card: card.update(sha256="0" * 64), "is not the file that model.yaml tells of"),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_that_does_not_fit_is_refused_by_name(copy: Path, case: str) -> None:
    change, message = CARDS[case]
    rewritten(copy, change)
    with pytest.raises(RefusedError, match=message) as refused:
        hvfreeze.load(copy)
    assert str(copy / "model.yaml") in str(refused.value) or "model.yaml tells of" in str(refused.value)


def test_a_card_that_is_none_is_refused_and_runs_no_code(copy: Path) -> None:
    probe = copy / "probe"
    for text in ("card: [", "- 1", f"card: !!python/object/apply:os.mkdir [{probe}]", "a: &a 1\ncard: *a", "[" * 9999):
        (copy / "model.yaml").write_text(text)
        with pytest.raises(RefusedError, match=r"model.yaml is damaged"):
            hvfreeze.load(copy)
    assert not probe.exists()


def test_a_directory_without_a_finished_model_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"nowhere does not exist"):
        hvfreeze.load(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match=r"holds no finished model.*name the directory of a run that has ended"):
        hvfreeze.load(tmp_path)
    whole = (copy / "model.pt").read_bytes()
    (copy / "model.pt").write_bytes(whole[:-100])
    with pytest.raises(RefusedError, match=r"model.pt is not the file that model.yaml tells of"):
        hvfreeze.load(copy)
    (copy / "model.pt").unlink()
    with pytest.raises(RefusedError, match=r"there is no model.pt; go on with: hvfreeze train --config .* --resume"):
        hvfreeze.load(copy)
    (copy / "model.pt").write_bytes(whole)
    (copy / "model.yaml").unlink()
    with pytest.raises(RefusedError, match=r"model.yaml is missing"):
        hvfreeze.load(copy)


def test_weights_that_are_not_the_models_are_refused_although_the_card_was_told(copy: Path) -> None:
    whole = (copy / "model.pt").read_bytes()
    resave(copy, lambda state: state.pop("fc.bias"))
    with pytest.raises(RefusedError, match=r"does not fit model.pt: fc.bias"):
        hvfreeze.load(copy)
    state = torch.load(io.BytesIO(whole), weights_only=True)
    resave(copy, lambda found: found.update(state, extra=torch.zeros(1)))
    with pytest.raises(RefusedError, match=r"does not fit model.pt: extra"):
        hvfreeze.load(copy)
    resave(copy, lambda found: (found.pop("extra"), found["fc.bias"].fill_(float("nan"))))
    with pytest.raises(RefusedError, match=r"NaN or infinite numbers in fc.bias"):
        hvfreeze.load(copy)


@pytest.mark.parametrize("head", ["last", "multi-level"])
def test_a_run_whose_head_was_solved_is_applied_like_any_other(finished: Finished, tmp_path: Path, head: str) -> None:
    flags = ["--model", "shufflenet_v2_x0_5", "--data", "imagefolder", "--data-dir", str(finished.images)]
    flags += ["--image-size", "36", "--batch-size", "8", "--threads", "1", "--augment", "none", "--quiet"]
    flags += ["--head", head, "--head-fit", "exact", "--pool", "2", "--weights", str(finished.run / "model.pt")]
    run = tmp_path / "run"
    trained = call("train", *flags, "--run-dir", str(run))
    assert trained.returncode == 0, str(trained)
    applied = hvfreeze.load(run)
    assert applied.card.head == ("last" if head == "last" else "multi-level:2")
    told = call("evaluate", str(run), "--out", str(tmp_path / "out"))
    assert told.returncode == 0 and "as the run reported" in told.stdout, str(told)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(last["test_loss"], rel=1e-12)
