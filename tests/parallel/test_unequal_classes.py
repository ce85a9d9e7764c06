"""Balanced accuracy and pictures in two classes, where ranks have different samples: as one rank finds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.parallel.standing import hvfreeze
from tests.program import call
from tests.single.training.test_overlap import TRAIN
from tests.single.training.test_unequal_classes import save_images

pytestmark = [pytest.mark.mpi, pytest.mark.standing]


@pytest.mark.parametrize("size", [3])
def test_ranks_count_classes_and_twins_together(size: int, tmp_path: Path) -> None:
    folder, run, out = save_images(tmp_path / "images", rare=6), tmp_path / "run", tmp_path / "out"
    shutil.copy(folder / "train" / "rare" / "5.png", folder / "train" / "common" / "copy.png")
    command = [*TRAIN, "--batch-size", "2", "--data", "imagefolder", "--data-dir", str(folder), "--run-dir", str(run)]
    command += ["--class-weights", "balanced", "--metric", "auroc"]
    result = hvfreeze(size, *command)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("of 25 training images, 2 have a duplicate in another class") == 1
    assert result.stdout.count("classes are imbalanced: 76.0 % of the training samples have class common") == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["trained_in_two_classes"] == {"found": 2, "compared": 25}
    evaluated = call("evaluate", str(run), "--out", str(out))
    assert evaluated.returncode == 0, str(evaluated)
    found = json.loads((out / "evaluation.json").read_text())
    for key in ("accuracy", "balanced_accuracy", "majority_share", "macro_f1", "auroc"):
        assert summary[f"test_{key}"] == pytest.approx(found[key]), key
