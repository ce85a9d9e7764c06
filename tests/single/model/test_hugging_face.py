"""Models of the transformers library: in blocks, with their weights, saved again, and refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference.blocks_table import show_blocks
from hvfreeze.inference.model import load_model
from hvfreeze.model.blocks import Chain
from hvfreeze.model.hugging_face import FAMILIES, LAYOUTS, find_folder, save
from hvfreeze.model.model_sources import BuiltModel, build_model, set_memory_formats
from hvfreeze.model.weights import head_layers, weights_path
from hvfreeze.prefix.operations import operations_digest
from tests.hub_models import KINDS, save_small
from tests.program import OFFLINE, call, spawn
from tests.single.refusing import refused

transformers = pytest.importorskip("transformers")


def built(folder: Path, *, classes: int = 7, size: int = 32, weights: str = "DEFAULT", **more: Any) -> BuiltModel:
    torch.manual_seed(1)
    model = build_model(f"hf:{folder}", num_classes=classes, image_size=size, weights=weights, **more)
    return set_memory_formats(model, (3, size, size))


def chain_of(model: BuiltModel, scheme: str, images: Tensor) -> Chain:
    return model.in_blocks(scheme=scheme, example=images)


@pytest.mark.parametrize("kind", KINDS)
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
    assert "has 7 classes there and 3 here; it is re-initialised" in model.notes[0]
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
    assert "there is no head classifier; it is initialised" in model.notes[0]
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
    with pytest.raises(UsageError, match="Sequential is no architecture of transformers; train with --head last"):
        save(nn.Sequential(), tmp_path, classes=(), processor={})


def test_a_file_of_weights_is_named_by_its_folder(tmp_path: Path) -> None:
    save_small("resnet", tmp_path)
    assert weights_path(f"hf:{tmp_path}", "DEFAULT") == tmp_path / "model.safetensors"
    assert weights_path(f"hf:{tmp_path}", "none") is None


SMALL = ("--train-samples", "60", "--epochs", "1", "--threads", "1", "--image-size", "32")


@pytest.mark.parametrize("kind", ["vit", "convnext"])
def test_auto_ends_in_a_model_that_answers_without_the_folder(kind: str, tmp_path: Path) -> None:
    save_small(kind, tmp_path / "hub")
    run = tmp_path / "run"
    outcome = call("auto", "digits", *SMALL, "--model", f"hf:{tmp_path / 'hub'}", "--run-dir", str(run))
    assert outcome.returncode == 0 and "weights DEFAULT" in outcome.stdout, str(outcome)
    (tmp_path / "hub").rename(tmp_path / "gone")
    outcome = call("evaluate", str(run))
    assert outcome.returncode == 0 and "as the run reported" in outcome.stdout, str(outcome)
    model = load_model(run)
    assert model.card.architecture is not None and model.card.architecture["model_type"] == kind
    assert model.card.weights_sha256 is not None and "transformers" in model.card.versions


def test_its_blocks_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("dinov2", tmp_path)
    assert show_blocks(f"hf:{tmp_path}", scheme="stage", image_size=32, classes=3, batch_size=2) == 0
    assert "dinov2.encoder.layer.2" in capsys.readouterr().out


def model_named(name: str) -> None:
    build_model(name, num_classes=2, image_size=32)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json; give a folder that save_pretrained wrote"),
        ({"config.json": "{"}, "config.json cannot be read: Expecting property name"),
        ({"config.json": "[]"}, "config.json holds no JSON object"),
        ({"config.json": '{"model_type": "bert"}'}, "is of the architecture bert, and those that can be cut"),
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
    with pytest.raises(RefusedError, match="holds none; pass --weights none to start at random"):
        built(tmp_path)
    assert built(tmp_path, weights="none").notes == []
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RefusedError, match=r"weights \(DEFAULT\) of .* cannot be read: .*; fetch them again"):
        built(tmp_path)


def test_names_that_are_nowhere_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be hf:FOLDER or hf:ORGANISATION/NAME; there is no such folder"):
        find_folder("hf:./nowhere")
    variables = {**OFFLINE, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    outcome = spawn("train", "--model", "hf:someone/some-model", *SMALL, env=variables)
    refused(outcome, 2)
    assert "is neither a folder nor in the Hugging Face cache" in outcome.messages[0], str(outcome)
    assert "run hf download someone/some-model where there is a network" in outcome.messages[0]


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


def digest_of(folder: str) -> str:
    model = built(Path(folder))
    return operations_digest(model.in_blocks(scheme="stage", example=torch.rand(2, 3, 32, 32)), 3)


def test_another_process_finds_the_same_operations_and_another_configuration_has_others(tmp_path: Path) -> None:
    for name, eps in (("a", 1e-12), ("b", 1e-6)):
        save_small("vit", tmp_path / name, layer_norm_eps=eps)
    program = f"from {__name__} import digest_of; print(digest_of({str(tmp_path / 'a')!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    here = digest_of(str(tmp_path / "a"))
    assert done.stdout.strip() == here and here != digest_of(str(tmp_path / "b"))
