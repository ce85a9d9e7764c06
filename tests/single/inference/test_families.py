"""Swin and ConvNeXt fine-tune with AdamW from weights, frozen by vote, cached and applied."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.program import call

CODE = """
from functools import partial
from hvfreeze.torchvision_shim import torchvision

models = torchvision.models

def swin(num_classes):
    return models.SwinTransformer(patch_size=[4, 4], embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4],
                                  num_classes=num_classes)

def convnext(num_classes):
    config = models.convnext.CNBlockConfig
    return models.ConvNeXt([config(8, 16, 1), config(16, None, 1)], num_classes=num_classes)
"""
ADAMW = ("--optimizer", "adamw", "--lr", "0.003", "--no-decay-norms", "--clip-grad", "1", "--label-smoothing", "0.1")
FROZEN = ("--freeze", "linear", "--shadow", "gradient-norm", "--freeze-warmup", "0", "--interval", "3", "--epochs", "3")
FLAGS = ("--train-samples", "40", "--batch-size", "8", "--augment", "none", "--image-size", "32", "--threads", "1")


@pytest.mark.parametrize("family", ["swin", pytest.param("convnext", marks=pytest.mark.seldom)])
def test_a_family_fine_tunes_from_weights_frozen_and_cached(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(entry for entry in sys.path if entry)])
    monkeypatch.delitem(sys.modules, "families_of_mine", raising=False)
    (tmp_path / "families_of_mine.py").write_text(CODE)
    model = ("--model", f"families_of_mine:{family}", "--quiet", "--validation-fraction", "0.2")
    whole: nn.Module = getattr(importlib.import_module("families_of_mine"), family)(10)
    torch.save({k: v for k, v in whole.state_dict().items() if not k.startswith(("head", "classifier.2"))}, "body.pt")
    found = {}
    for cache in ("off", "on"):
        flags = (*model, *ADAMW, *FLAGS, *FROZEN, "--weights", "body.pt", "--cache", cache, "--run-dir", cache)
        outcome = call("train", *flags)
        assert outcome.returncode == 0, str(outcome)
        found[cache] = json.loads((tmp_path / cache / "summary.json").read_text())
    assert found["on"]["parameter_digest"] == found["off"]["parameter_digest"]
    assert found["on"]["final_cut"] > 0, "no block was frozen, so nothing was shown"
    assert found["on"]["cache"]["rows_read"] > 0
    assert "as the run reported" in call("evaluate", "on", "--trust-code").stdout
