"""Own model and own data from the command line: trained, cached, applied; their code is run where it is trusted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import hvfreeze
from hvfreeze.config.model import ModelConfig
from hvfreeze.errors import RefusedError
from hvfreeze.training.blueprint import Blueprint
from tests.program import call
from tests.single.refusing import refused

CODE = """
import numpy as np
import torch
from torch import nn
from hvfreeze.torchvision_shim import torchvision

class Spots(torch.utils.data.Dataset):
    classes = ("few", "many")
    def __init__(self, count, seed):
        self.count, self.seed = count, seed
    def __len__(self):
        return self.count
    def __getitem__(self, row):
        noise, label = np.random.default_rng([self.seed, row]), row % 2
        pixels = np.zeros((3, 16, 16), np.uint8)
        pixels[:, noise.integers(0, 16, 5 + 60 * label), noise.integers(0, 16, 5 + 60 * label)] = 255
        return torch.from_numpy(pixels), self.targets[row] if hasattr(self, "targets") else label

def spots(split):
    return Spots(40 if split == "train" else 12, split == "train")

def transformer(num_classes, image_size):
    return torchvision.models.VisionTransformer(image_size=image_size, patch_size=4, num_layers=2, num_heads=2,
                                                hidden_dim=16, mlp_dim=32, num_classes=num_classes)

def five():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 5))

def maps(num_classes):
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, num_classes, 1))

class Views(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 16), nn.Linear(16, num_classes)
    def forward(self, x):
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        return self.fc2(self.fc1(x.view(-1, 8 * 2 * 2)).relu())
"""
FLAGS = ("--model", "spotted:transformer", "--data", "spotted:spots", "--batch-size", "8", "--threads", "1", "--quiet")
FROZEN = ("--freeze", "linear", "--freeze-warmup", "0", "--interval", "3", "--epochs", "3", "--augment", "none")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `spotted` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "spotted", raising=False)
    (tmp_path / "spotted.py").write_text(CODE)
    return tmp_path / "spotted.py"


def test_a_transformer_of_ones_own_on_data_of_ones_own_is_frozen_cached_and_applied(code: Path, tmp_path: Path) -> None:
    adamw = ("--optimizer", "adamw", "--lr", "0.003", "--no-decay-norms", "--clip-grad", "1", "--head-lr", "0.01")
    found = {}
    for cache in ("off", "on"):
        run = tmp_path / cache
        outcome = call("train", *FLAGS, *FROZEN, *adamw, "--cache", cache, "--run-dir", str(run))
        assert outcome.returncode == 0, str(outcome)
        found[cache] = json.loads((run / "summary.json").read_text())
    assert found["on"]["parameter_digest"] == found["off"]["parameter_digest"]
    assert found["on"]["final_cut"] > 0 and found["on"]["cache"]["rows_read"] > 0
    outcome = call("evaluate", str(run), "--trust-code")
    assert "as the run reported" in outcome.stdout, str(outcome)
    card = hvfreeze.load_model(run, trust_code=True).card
    assert card.model == "spotted:transformer" and card.code_sha256 and card.classes == ("few", "many")
    (tmp_path / "spotted.py").write_text(CODE + "\n")
    with pytest.warns(UserWarning, match="has changed since the training"):
        hvfreeze.load_model(run, trust_code=True)


def test_a_network_that_views_its_maps_trains_is_cached_resumed_and_applied(code: Path, tmp_path: Path) -> None:
    flags = (*FLAGS[2:], "--model", "spotted:Views", "--freeze", "static", "--cut", "1", "--augment", "none")
    digests = set()
    for name, *more in (("off",), ("on", "--cache", "on"), ("stopped", "--epochs", "1"), ("stopped", "--resume")):
        outcome = call("train", *flags, "--epochs", "2", *more, "--run-dir", str(tmp_path / name))
        assert outcome.returncode == 0, str(outcome)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        digests |= {summary["parameter_digest"]} if "1" not in more else set()
        assert "--cache" not in more or (summary["cache"]["exact"] and summary["cache"]["rows_read"] > 0)
    assert len(digests) == 1
    assert "Views): images and weights are contiguous" in (tmp_path / "on" / "log.txt").read_text()
    outcome = call("evaluate", str(tmp_path / "on"), "--trust-code")
    assert "as the run reported" in outcome.stdout, str(outcome)


def test_broken_samples_of_ones_own_are_left_out_where_that_is_asked_for(code: Path, tmp_path: Path) -> None:
    code.write_text(
        CODE.replace("noise, label =", "if row in (0, 5): raise OSError('gone')\n        noise, label =", 1)
    )
    flags = (*(flag for flag in FLAGS if flag != "--quiet"), "--epochs", "1", "--run-dir", str(tmp_path / "run"))
    refused(call("train", *flags), 3, *(f"sample {row} cannot be read" for row in (0, 5)), "--skip-bad")
    outcome = call("train", *flags, "--skip-bad")
    assert outcome.returncode == 0 and "4 images cannot be decoded and are left out" in outcome.stdout, str(outcome)
    said = call("evaluate", str(tmp_path / "run"), "--trust-code").stdout
    assert "on 10 test samples" in said and "as the run reported" in said


def test_no_code_is_run_that_a_card_or_a_configuration_names_unless_it_is_trusted(code: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("train", *FLAGS, "--epochs", "1", "--run-dir", str(run)).returncode == 0
    sys.modules.pop("spotted")
    for command in (("evaluate", str(run)), ("predict", str(run), str(code))):
        outcome = call(*command)
        assert outcome.returncode == 3 and "spotted:transformer; if you trust its code" in outcome.stderr
    card = yaml.safe_load((run / "model.yaml").read_text())
    (run / "model.yaml").write_text(yaml.safe_dump({**card, "model": "resnet18", "code_sha256": None}))
    with pytest.raises(RefusedError, match="does not fit"):
        hvfreeze.load_model(run)
    assert "spotted" not in sys.modules


def test_a_run_whose_code_has_changed_does_not_go_on_as_if_it_were_the_same(code: Path, tmp_path: Path) -> None:
    digits = ("--data", "digits", "--image-size", "32", "--train-samples", "40")
    flags = (*FLAGS, *digits, "--run-dir", str(tmp_path / "run"))
    assert call("train", *flags, "--epochs", "1").returncode == 0
    code.write_text(CODE + "# another file\n")
    refused(call("train", *flags, "--epochs", "2", "--resume"), 3, "the code of --model: ")
    assert call("train", *flags, "--epochs", "2", "--resume", "--resume-inexact").returncode == 0


@pytest.mark.parametrize(("name", "shape"), [("five", (2, 5)), ("maps", (2, 2, 16, 16))])
def test_a_model_that_gives_no_logit_for_each_class_is_refused(
    code: Path, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    model = f"spotted:{name}"
    outcome = call("train", *FLAGS, "--model", model, "--epochs", "1", "--run-dir", str(tmp_path / "run"))
    told = f"--model ({model}) returns a tensor of shape {shape} for 2 images instead of (2, 2), one logit per class"
    refused(outcome, 2, told, "num_classes outputs")
    # With a multi-level head the model's own logits are not used.
    blueprint = Blueprint(model=ModelConfig(model=model, blocks="stage"), image_shape=(3, 16, 16), classes=2)
    assert len(replace(blueprint, head="multi-level").build(2)[0].blocks) == 2


def test_blocks_shows_each_cut_of_a_model_without_a_run(code: Path, tmp_path: Path) -> None:
    outcome = call("blocks", "spotted:transformer", "--image-size", "8", "--classes", "3", "--batch-size", "2")
    assert outcome.returncode == 0, str(outcome)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in outcome.stdout.splitlines() if line[0] == "|"]
    assert [row[0] for row in rows[2:]] == ["0", "1", "2", "3"] and rows[3][1] == "stem"
    assert int(rows[5][2].replace(",", "")) < 10**5 and rows[2][4] == "0.8 kB"
    assert call("blocks", "resnet99").returncode == 2 and call("blocks", "resnet18", "--classes", "0").returncode == 2


def test_blocks_refuses_a_batch_without_statistics() -> None:
    outcome = call("blocks", "resnet18", "--batch-size", "1", "--image-size", "32")
    assert outcome.returncode == 2 and len(outcome.messages) == 1, str(outcome)
    assert outcome.messages[0].startswith("--batch-size (1) is too small for resnet18 and --image-size (32): ")
    assert outcome.messages[0].endswith("; use a larger one")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--image-size 10000000", "--image-size (10000000) must be in 1..4096"),
        ("--batch-size 1000000000000000000", "--batch-size (1000000000000000000) must be in 1..2147483647"),
        ("--classes 2000000000", "--classes (2000000000) is too large for resnet18 in the memory of this machine"),
    ],
)
def test_blocks_refuses_what_no_memory_holds(flags: str, message: str) -> None:
    refused(call("blocks", "resnet18", *flags.split()), 2, message)


def test_a_model_with_classes_that_no_label_has_is_evaluated_by_their_names(code: Path, tmp_path: Path) -> None:
    numbered = "\n\ndef numbered(split):\n    data = Spots(12, 0)\n"
    numbered += "    data.targets, data.classes = {}, None\n    return data\n"
    run = tmp_path / "run"
    code.write_text(CODE + numbered.format([0, 1, 2] * 4))
    flags = "--model mlp-8 --data spotted:numbered --batch-size 4 --epochs 1 --threads 1"
    outcome = call("train", *flags.split(), "--run-dir", str(run))
    assert outcome.returncode == 0, str(outcome)
    # Of another size: Python takes a source of the same second and size for the one that it has compiled.
    code.write_text(CODE + numbered.format([1, 2] * 6) + "\n")
    sys.modules.pop("spotted")
    evaluated = call("evaluate", str(run), "--trust-code")
    assert evaluated.returncode == 0 and "on 12 test samples" in evaluated.stdout, str(evaluated)
    assert [line.split()[0] for line in evaluated.stdout.splitlines() if line[:1] in "012"] == ["1", "2"]
