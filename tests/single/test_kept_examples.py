"""What version 0.1.0 wrote can be read: runs, checkpoints, caches, and the fingerprints of cached rows."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.model_sources import build_model
from hvfreeze.prefix.operations import operations_digest
from tests.program import ROOT, call

KEPT = ROOT / "tests" / "kept"
OPERATIONS = json.loads((KEPT / "operations.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(KEPT / "run", tmp_path / "run"))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("RUN", str(folder)))
    return folder


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_listed_and_reported(run: Path, tmp_path: Path) -> None:
    listed = call("runs", str(run.parent))
    assert listed.returncode == 0 and "35" in listed.stdout, str(listed)
    assert call("report", str(run), "--out", str(tmp_path / "report")).returncode == 0
    assert (tmp_path / "report" / "data" / "votes.csv").read_text().count("\n") > 1


def test_its_model_answers_as_it_did(run: Path, tmp_path: Path) -> None:
    known = json.loads((run / "summary.json").read_text())["test_accuracy"]
    found = call("evaluate", str(run), "--trust-code", "--out", str(tmp_path / "out"))
    assert found.returncode == 0 and f"{100 * known:.1f}" in found.stdout, str(found)


def test_its_checkpoint_is_gone_on_from(run: Path) -> None:
    config = str(run / "config.yaml")
    done = call("train", "--config", config, "--run-dir", str(run), "--epochs", "4", "--resume", "--resume-inexact")
    assert done.returncode == 0, str(done)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3] and lines[-1]["cut"] >= lines[2]["cut"]


def test_a_cache_is_listed_and_verified(tmp_path: Path) -> None:
    rows = shutil.copytree(KEPT / "rows", tmp_path / "rows")
    listed = call("cache", "ls", str(rows))
    assert listed.returncode == 0 and listed.stdout.count("activations-") == 2, str(listed)
    verified = call("cache", "verify", str(rows))
    assert verified.returncode == 0, str(verified)


@pytest.mark.skipif(
    ".".join(map(str, sys.version_info[:2])) != OPERATIONS["python"], reason="a fingerprint holds Python's own bytecode"
)
@pytest.mark.parametrize("name", OPERATIONS["digests"])
def test_rows_are_filed_under_the_same_fingerprint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Weights are no part of it, and drawing them takes most of the time.
    for draw in ("kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "xavier_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(nn.init, draw, lambda tensor, *args, **more: tensor)
    model, scheme, size = name.split()
    torch.manual_seed(0)
    chain = cut_into_blocks(build_model(model, num_classes=10, image_size=int(size)).model, scheme=scheme)
    assert operations_digest(chain, len(chain.blocks) - 1) == OPERATIONS["digests"][name]
