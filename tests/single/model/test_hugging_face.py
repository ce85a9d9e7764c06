"""Models of the transformers library: in blocks, with their weights, saved again, and refused in one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference.card import Preparation
from hvfreeze.inference.model import load_model
from hvfreeze.model.blocks import Chain
from hvfreeze.model.hugging_face import (
    FAMILIES,
    LAYOUTS,
    find_folder,
    processor_of,
    read_preparation,
    read_statistics,
    save,
)
from hvfreeze.model.model_sources import BuiltModel, build_model, set_memory_formats
from hvfreeze.model.weights import head_layers
from hvfreeze.prefix.operations import operations_digest
from tests.hub_models import KINDS, save_small
from tests.program import call, save_photos
from tests.single.refusing import refused

transformers = pytest.importorskip("transformers")


def built(folder: Path, *, classes: int = 7, size: int = 32, weights: str = "DEFAULT", **more: Any) -> BuiltModel:
    torch.manual_seed(1)
    model = build_model(f"hf:{folder}", num_classes=classes, image_size=size, weights=weights, **more)
    return set_memory_formats(model, (3, size, size))


def chain_of(model: BuiltModel, scheme: str, images: Tensor) -> Chain:
    return model.in_blocks(scheme=scheme, example=images)


EVERYDAY = {"convnext", "dinov2", "resnet", "vit"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERYDAY else pytest.mark.seldom) for kind in KINDS]
)
def test_blocks_are_found_and_run_as_the_model_does(kind: str, tmp_path: Path) -> None:
    """`in_blocks` compares them with the model's own forward pass, bit for bit, in both modes."""
    whole = save_small(kind, tmp_path)
    model = built(tmp_path)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for scheme in ("stage", "residual"):
        chain = chain_of(model, scheme, images)
        names = [block.name for block in chain.blocks]
        assert len(names) >= 5 and (names[0], names[-1]) == ("stem", "head")
        model.model.eval()
        with torch.no_grad():
            for cut in range(len(names)):
                halves = chain.suffix(cut)(chain.prefix(cut)(images))
                assert torch.equal(halves, model.model(images)), f"{kind}, {scheme}, cut {cut}"
    with torch.no_grad():
        # Its weights are in another memory format.
        torch.testing.assert_close(model.model(images), whole(images).logits)
    assert head_layers(model.model)[-1] in ("classifier", "classifier.1") and "is kept" in model.notes[0]


def test_every_architecture_is_tried_here() -> None:
    assert FAMILIES.keys() == KINDS.keys()
    for name in LAYOUTS:
        module, _, kind = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=[kind]), kind)


def test_another_number_of_classes_starts_the_head_afresh_and_keeps_the_rest(tmp_path: Path) -> None:
    whole = save_small("vit", tmp_path).state_dict()
    model = built(tmp_path, classes=3)
    assert "is initialised at random: the weights have 7 classes, the model 3" in model.notes[0]
    own = model.model.state_dict()
    assert own["classifier.weight"].shape == (3, 16)
    assert all(torch.equal(own[key], whole[key]) for key in own if not key.startswith("classifier"))
    random = built(tmp_path, weights="none").model.state_dict()
    assert not torch.equal(own["vit.layers.0.mlp.fc1.weight"], random["vit.layers.0.mlp.fc1.weight"])


def test_a_backbone_has_a_new_head_also_where_its_size_would_fit(tmp_path: Path) -> None:
    save_small("dinov2", tmp_path / "whole", classes=2)
    library: Any = transformers
    library.AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "backbone")
    model = built(tmp_path / "backbone", classes=2, size=56)
    assert "no head classifier; it is initialised" in model.notes[0]
    assert "mask_token" not in str(model.model.state_dict().keys()), "a parameter that no forward pass uses"


def test_a_vit_of_another_image_size_has_its_positions_interpolated(tmp_path: Path) -> None:
    save_small("vit", tmp_path)
    model = built(tmp_path, size=64)
    assert "position_embeddings is interpolated from 4x4 to 8x8 patches" in str(model.notes)
    assert model.model(torch.rand(2, 3, 64, 64)).shape == (2, 7)


def test_a_model_is_saved_as_the_library_reads_it(tmp_path: Path) -> None:
    save_small("swin", tmp_path / "there")
    model = built(tmp_path / "there", classes=2).model.eval()
    save(model, tmp_path / "here", classes=("cat", "dog"), processor={"do_resize": True})
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "here")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again.eval()(images).logits, model(images))
    assert again.config.id2label == {0: "cat", 1: "dog"}
    assert json.loads((tmp_path / "here" / "preprocessor_config.json").read_text()) == {"do_resize": True}
    with pytest.raises(UsageError, match="Sequential is not an architecture of transformers; train with --head last"):
        save(nn.Sequential(), tmp_path, classes=(), processor={})


SMALL = "--train-samples 60 --validation-fraction 0.2 --epochs 1 --threads 1 --image-size 32".split()


MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
USUAL = {"image_mean": MEAN, "image_std": STD, "do_convert_rgb": True}
VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "resample": 3, **USUAL}
EDGE = {"size": {"shortest_edge": 40}, "resample": 3, **USUAL}
BIT = {"image_processor_type": "BitImageProcessor", "do_center_crop": True, "crop_size": 32, **EDGE}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875, **EDGE, "size": {"shortest_edge": 35}}


@pytest.mark.parametrize(
    ("processor", "settings"),
    [
        (VIT, {"image_size": 32, "fit": "squash", "resample": "bicubic"}),
        (
            {**VIT, "size": 40, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
            {"image_size": 32, "resize": 40, "fit": "squash", "resample": "bicubic"},
        ),
        (BIT, {"image_size": 32, "resize": 40, "fit": "crop", "resample": "bicubic"}),
        ({**BIT, "do_center_crop": False}, {"image_size": 40, "fit": "crop", "resample": "bicubic"}),
        (CONVNEXT, {"image_size": 35, "resize": 40, "fit": "crop", "resample": "bicubic"}),
        ({**VIT, "do_resize": False, "resample": None}, {}),
        ({**VIT, "size": {"height": 32, "width": 48}}, {"resample": "bicubic"}),
    ],
)
def test_images_are_prepared_as_the_image_processor_does_it(
    tmp_path: Path, processor: dict[str, Any], settings: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert read_preparation(f"hf:{tmp_path}") == settings
    assert read_statistics(f"hf:{tmp_path}") == (tuple(MEAN), tuple(STD))
    if not {"image_size", "fit"} <= settings.keys():
        return
    stored, side = settings.get("resize", settings["image_size"]), settings["image_size"]
    ours = Preparation(
        height=stored,
        width=stored,
        cropped_to=side if stored > side else None,
        enlarged_to=None,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.4),
        fit=settings["fit"],
        resample=settings["resample"],
    )
    pixels = torch.rand(3, 8, 10, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.interpolate(pixels[None], size=(96, 120), mode="bilinear")[0]
    image = Image.fromarray((255 * smooth).byte().permute(1, 2, 0).numpy())
    kind = getattr(transformers, f"{processor['image_processor_type']}Pil")
    theirs = kind.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"][0]
    if theirs.shape[1] != theirs.shape[2]:
        return
    # The centre of an oblong image may lie half a pixel elsewhere.
    assert (ours(image) - theirs).abs().mean() < (1e-6 if settings["fit"] == "squash" else 0.05)


def test_statistics_are_of_pixels_from_0_to_1_whatever_the_processor_scales_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_statistics(f"hf:{tmp_path}") is None and read_preparation(f"hf:{tmp_path}") == {}
    for processor, expected in (
        ({"rescale_factor": 2 / 255, "image_mean": [1, 1, 1], "image_std": 0.5}, ((0.5,) * 3, (0.25,) * 3)),
        ({"do_normalize": False}, ((0.0,) * 3, (1.0,) * 3)),
        ({"do_rescale": False, "image_mean": [51] * 3, "image_std": [255] * 3}, ((0.2,) * 3, (1.0,) * 3)),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
        for found, wanted in zip(read_statistics(f"hf:{tmp_path}") or (), expected, strict=True):
            assert found == pytest.approx(wanted)


def test_auto_prepares_images_so_and_ends_in_a_model_that_answers_without_the_folder(tmp_path: Path) -> None:
    save_small("vit", tmp_path / "hub", hidden_dropout_prob=0.0)
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(BIT))
    photos, run = save_photos(tmp_path / "photos", sides=(48, 60), training=6), tmp_path / "run"
    flags = ("--model", f"hf:{tmp_path / 'hub'}", "--epochs", "1", "--threads", "1", "--flips", "off")
    outcome = call("auto", str(photos), *flags, "--run-dir", str(run))
    assert outcome.returncode == 0 and "weights DEFAULT" in outcome.stdout, str(outcome)
    assert "does: --resample bicubic --image-size 32 --fit crop --resize 40" in outcome.stdout
    log = (run / "log.txt").read_text()
    assert "mean 0.5, 0.4, 0.3 and standard deviation 0.2, 0.3, 0.4 (the image processor's of hf:" in log
    (tmp_path / "hub").rename(tmp_path / "gone")
    evaluated = call("evaluate", str(run))
    assert evaluated.returncode == 0 and "as the run reported" in evaluated.stdout, str(evaluated)
    predicted = call("predict", str(run), str(photos / "test" / "a"))
    assert predicted.returncode == 0 and "03.png" in predicted.stdout, str(predicted)
    card = load_model(run).card
    assert card.architecture is not None and card.architecture["model_type"] == "vit"
    assert card.weights_sha256 is not None and "transformers" in card.versions
    image = card.image
    assert image is not None and (image.height, image.cropped_to, image.resample) == (40, 32, "bicubic")
    assert (image.mean, image.std) == (tuple(MEAN), tuple(STD))
    # Of the forms of tokens, the one with the least loss is taken.
    [line] = [line for line in outcome.stdout.splitlines() if "tokens: " in line]
    losses = {form: float(loss) for loss, form in re.findall(r"([0-9.]+) (mean|class|grid)", line)}
    best = re.search(r"tokens: (\w+)", line)
    assert best is not None and losses.keys() == {"mean", "class", "grid"}
    assert losses[best[1]] == min(losses.values()) and card.tokens == best[1]


def test_what_the_command_line_says_comes_before_the_image_processor(tmp_path: Path) -> None:
    described = processor_of(side=32, resize=40, fit="crop", resample="bicubic", mean=(0.5,) * 3, std=(0.2,) * 3)
    save_small("vit", tmp_path / "hub")
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(described))
    expected = {"resample": "bicubic", "image_size": 32, "fit": "crop", "resize": 40}
    assert read_preparation(f"hf:{tmp_path / 'hub'}") == expected
    given = ("--image-size", "24", "--resample", "box", "--mean", "0", "--std", "1", "--weights", "none")
    flags = ("--model", f"hf:{tmp_path / 'hub'}", "--epochs", "1", "--threads", "1", "--data", "imagefolder")
    photos = save_photos(tmp_path / "photos", training=4)
    outcome = call(
        "train", "--data", "imagefolder", "--data-dir", str(photos), *flags, *given, "--run-dir", str(tmp_path / "run")
    )
    assert outcome.returncode == 0 and "does: --fit crop\n" in outcome.stdout, str(outcome)


def model_named(name: str) -> None:
    build_model(name, num_classes=2, image_size=32)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json; give a folder that save_pretrained wrote"),
        ({"config.json": "{"}, "config.json cannot be read: Expecting property name"),
        ({"config.json": "[]"}, "config.json holds no JSON object"),
        ({"config.json": '{"model_type": "bert"}'}, "has the architecture bert; the supported architectures"),
        ({"config.json": '{"architecture": "resnet18"}'}, "pass --model timm:resnet18"),
        ({"config.json": '{"model_type": "vit", "hidden_size": 7}'}, "cannot build a vit for images of 32 pixels"),
    ],
)  # fmt: skip
def test_a_folder_that_holds_no_such_model_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    refused(call("train", "--model", f"hf:{tmp_path}", *SMALL), 2)
    with pytest.raises(UsageError, match=message) as refusal:
        model_named(f"hf:{tmp_path}")
    assert "\n" not in str(refusal.value)


def test_a_folder_without_weights_is_refused_unless_none_are_asked_for(tmp_path: Path) -> None:
    save_small("vit", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="holds none; use --weights none for random weights"):
        built(tmp_path)
    assert built(tmp_path, weights="none").notes == []
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RefusedError, match=r"weights \(DEFAULT\) of .* cannot be read: .*; download them again"):
        built(tmp_path)


def test_names_that_are_nowhere_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    with pytest.raises(UsageError, match=r"must be hf:FOLDER or hf:ORGANISATION/NAME; there is no such folder"):
        find_folder("hf:./nowhere")
    here = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: here(*a, cache_dir=tmp_path, **k))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    outcome = call("train", "--model", "hf:someone/some-model", *SMALL)
    refused(outcome, 2)
    assert "is neither a folder nor in the Hugging Face cache" in outcome.messages[0], str(outcome)
    assert "run hf download someone/some-model on a machine with a network" in outcome.messages[0]


def test_a_name_in_the_cache_is_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123"
    save_small("vit", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    here = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: here(*a, cache_dir=tmp_path, **k))
    assert find_folder("hf:someone/model") == snapshot


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small("vit", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in (f"hf:{tmp_path}", "hf:someone/model"):
        with pytest.raises(UsageError, match=r"needs the transformers library .*: pip install transformers"):
            model_named(name)
    refused(call("train", "--model", f"hf:{tmp_path}", *SMALL), 2)


def test_another_configuration_has_other_operations(tmp_path: Path) -> None:
    digests = set()
    for name, eps in (("a", 1e-12), ("b", 1e-12), ("c", 1e-6)):
        save_small("vit", tmp_path / name, layer_norm_eps=eps)
        digests.add(operations_digest(chain_of(built(tmp_path / name), "stage", torch.rand(2, 3, 32, 32)), 3))
    assert len(digests) == 2


def test_a_head_reads_the_tokens_that_were_chosen_in_training_and_after(tmp_path: Path) -> None:
    save_small("dinov2_with_registers", tmp_path / "hub")
    run, given = tmp_path / "run", ("--head", "multi-level", "--head-fit", "kernel", "--augment", "none")
    train = ("train", *SMALL[:4], *SMALL[6:], *given, "--pool", "2", "--tokens", "grid", "--run-dir", str(run))
    outcome = call(*train, "--model", f"hf:{tmp_path / 'hub'}")
    assert outcome.returncode == 0 and "tokens:" not in outcome.stdout, str(outcome)
    assert load_model(run).card.head.startswith("kernel:2:grid")
    outcome = call("evaluate", str(run))
    assert outcome.returncode == 0 and "as the run reported" in outcome.stdout, str(outcome)


def test_a_run_is_exported_for_the_library_and_for_torch(tmp_path: Path) -> None:
    save_small("vit", tmp_path / "hub")
    run, train = tmp_path / "run", ("train", *SMALL, "--model", f"hf:{tmp_path / 'hub'}")
    outcome = call(*train, "--batch-size", "16", "--run-dir", str(run))
    assert outcome.returncode == 0, str(outcome)
    for form in ("transformers", "torch"):
        outcome = call("export", str(run), "--format", form)
        assert outcome.returncode == 0 and "largest difference" in outcome.stdout, str(outcome)
    applied, folder = load_model(run), run / "transformers"
    again = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    images = torch.rand(3, *applied.preparation.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(images).logits, applied.logits(images))
    assert again.config.problem_type == "single_label_classification" and again.config.id2label[9] == "9"
    assert read_preparation(f"hf:{folder}")["image_size"] == 32
    assert "library_name: transformers" in (folder / "README.md").read_text()
    refused(call("export", str(run), "--format", "transformers"), 2, "must be a new or an empty folder")
