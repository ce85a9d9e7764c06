"""hvfreeze export: files that run without hvfreeze, for trained and fitted heads, checked against the model."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference import export as exporting
from hvfreeze.inference.model import Applied, load_model
from hvfreeze.model.weights import read_weights
from hvfreeze.runs import files
from tests.program import call
from tests.single.heads.test_multilevel import save_fitted
from tests.single.refusing import refused

SMALL = ["--model", "mlp-16x16", "--train-samples", "64", "--batch-size", "16", "--epochs", "1", "--threads", "1"]
FITTED = ["--model", "mlp-16x16", "--train-samples", "64", "--epochs", "1", "--threads", "1", "--flips", "mean"]


READER = """
import sys
sys.modules["hvfreeze"] = None  # any import of it fails
import torch
images, logits = torch.load("pair.pt", weights_only=True)
program = torch.export.load("classifier.pt2").module()
torch.testing.assert_close(program(images), logits, atol=1e-6, rtol=0)
assert len(program(images[:1])) == 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the model's own head."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    made = call("train", *SMALL, "--run-dir", str(folder))
    assert made.returncode == 0, str(made)
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose fitted head reads the features of all blocks, of each image and its flip."""
    folder = tmp_path_factory.mktemp("fitted") / "run"
    made = call("auto", "digits", *FITTED, "--run-dir", str(folder))
    assert made.returncode == 0, str(made)
    return folder


def some_pixels(applied: Applied, count: int) -> Tensor:
    size = applied.preparation.height, applied.preparation.width
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, 3, *size), dtype=np.uint8))


def answers(applied: Applied, pixels: Tensor) -> Tensor:
    return applied.logits(applied.preparation.normalised(pixels))


def test_an_onnx_file_gives_the_models_answers_in_onnxruntime(fitted: Path, tmp_path: Path) -> None:
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    file = tmp_path / "model.onnx"
    made = call("export", str(fitted), "--out", str(file))
    assert made.returncode == 0 and "checked on 16 images of the run: largest difference" in made.stdout, str(made)
    session, applied = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), load_model(fitted)
    assert session.get_inputs()[0].shape[0] == "batch"
    for count in (1, 3):
        pixels = some_pixels(applied, count)
        [found] = session.run(None, {"pixels": pixels.numpy()})
        np.testing.assert_allclose(found, answers(applied, pixels).numpy(), atol=2e-4, rtol=1e-3)
    onnx.checker.check_model(str(file))
    facts = {each.key: each.value for each in onnx.load(str(file)).metadata_props}
    assert json.loads(facts["classes"]) == list(applied.classes)
    assert json.loads(facts["preparation"])["height"] == applied.preparation.height


def test_a_torch_file_gives_the_models_answers(fitted: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "model.pt2"
    made = call("export", str(fitted), "--format", "torch", "--out", str(file))
    assert made.returncode == 0, str(made)
    applied = load_model(fitted)
    pixels, extra = some_pixels(applied, 3), {"facts.json": ""}
    program: Any = torch.export.load(file, extra_files=extra)
    torch.testing.assert_close(program.module()(pixels), answers(applied, pixels))
    assert json.loads(json.loads(extra["facts.json"])["classes"]) == list(applied.classes)


@pytest.mark.seldom
def test_a_fitted_classifier_runs_from_a_file_without_hvfreeze(tmp_path: Path) -> None:
    classifier, images, logits = save_fitted(tmp_path, kernel=True)
    torch.save((images, logits), tmp_path / "pair.pt")
    exporting.write_torch(classifier, tmp_path / "classifier.pt2", images, {})
    reader = subprocess.run([sys.executable, "-c", READER], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert reader.returncode == 0, reader.stderr


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_file_of_before_and_no_part_of_a_new_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.pt2"
    file.write_text("of before")
    monkeypatch.setattr(files, "replace_file", full_disk)
    outcome = call("export", str(trained), "--format", "torch", "--out", str(file))
    refused(outcome, 3, "cannot be written (No space left on device)", "choose another --out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"] and file.read_text() == "of before"
    message = r"model cannot be written \(No space .* choose another --out"
    with pytest.raises(RefusedError, match=message), exporting.new_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
        full_disk()
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_what_the_library_cannot_do_is_refused() -> None:
    for words, message in (({"task": "numbers"}, "units of numbers"), ({"fit": "pad"}, "cannot pad images")):
        prepared = {"cropped_to": 0, "fit": "crop", **words}
        facts = {"task": "classes", "classes": "[]", "preparation": json.dumps(prepared), **words}
        with pytest.raises(UsageError, match=message):
            exporting.write_transformers(Mock(), Path("here"), torch.zeros(1), facts)


def test_safetensors_have_the_models_state(trained: Path) -> None:
    made = call("export", str(trained), "--format", "safetensors")
    assert made.returncode == 0 and str(trained / "model.safetensors") in made.stdout, str(made)
    found, wanted = read_weights(str(trained / "model.safetensors")), load_model(trained).model.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    (trained / "model.safetensors").unlink()


def test_a_file_that_answers_otherwise_is_removed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exporting.FORMATS["torch"]
    other = write._replace(write=lambda *given: lambda pixels: write.write(*given)(pixels) + 5)
    monkeypatch.setitem(exporting.FORMATS, "torch", other)
    outcome = call("export", str(trained), "--format", "torch", "--out", str(tmp_path / "model.pt2"))
    refused(outcome, 3, "was removed: on 16 images of the run its outputs differ by up to 5")
    assert not (tmp_path / "model.pt2").exists()


def test_without_the_runs_images_random_ones_are_taken(trained: Path, tmp_path: Path) -> None:
    for name in ("model.pt", "model.yaml"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    made = call("export", str(tmp_path), "--format", "torch")
    assert made.returncode == 0 and "16 random images, because the run's images cannot be read" in made.stdout, str(
        made
    )


def test_what_cannot_be_exported_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(call("export", str(tmp_path / "gone")), 3, "does not exist")
    refused(
        call("export", str(trained), "--out", str(tmp_path / "model.pt")), 2, "must end in .onnx with --format onnx"
    )
    refused(call("export", str(trained), "--format", "tf"), 2, "--format (tf) must be one of")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused(call("export", str(trained)), 2, "--format (onnx) needs", "pip install onnx onnxscript onnxruntime")


class Undecided(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images if images.sum().item() > 0 else -images


def test_a_module_that_torch_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="Undecided cannot be exported"):
        exporting.write_torch(Undecided(), tmp_path / "classifier.pt2", torch.randn(2, 3), {})
    assert not (tmp_path / "classifier.pt2").exists()
