"""A data set of Hugging Face's library through the program: trained on, resumed, cached, evaluated, refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.program import call
from tests.single.refusing import refused

datasets = pytest.importorskip("datasets")
SMALL = ["--model", "mlp-16x16", "--threads", "1"]


def saved(folder: Path) -> str:
    """Two shades, and a test image that is in the training set."""
    parts = {}
    for part, numbers in (("train", range(32)), ("test", [*range(32, 40), 0])):
        rows = {"image": list[Image.Image](), "label": [number % 2 for number in numbers]}
        for number in numbers:
            kind = 100 * (number % 2)
            pixels = np.random.default_rng(number).integers(kind, kind + 100, (16, 16, 3), dtype=np.uint8)
            rows["image"].append(Image.fromarray(pixels))  # type: ignore[arg-type]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
        parts[part] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(str(folder / "saved"))
    return f"hf:{folder / 'saved'}"


def test_a_run_on_a_saved_data_set_trains_resumes_and_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, run = saved(tmp_path), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    flags = [*SMALL, "--epochs", "1", "--batch-size", "8", "--augment", "views:2", "--freeze", "static", "--cut", "1"]
    made = call("train", *flags, "--data", "hf:saved", "--cache", "on", "--run-dir", str(run))
    assert made.returncode == 0, str(made)
    assert "32 training images, 9 test images, 2 classes" in made.stdout
    assert "of 9 evaluation images, 1 is also in the training set" in made.stdout
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = call("train", "--run-dir", str(run), "--resume", "--epochs", "2")
    assert again.returncode == 0 and "resumed after step 4" in again.stdout, str(again)
    judged, other = call("evaluate", str(run)), call("evaluate", str(run), "--data-dir", name)
    assert judged.returncode == 0 and "as the run reported" in judged.stdout, str(judged)
    assert other.returncode == 0 and f"on 9 images of {name}" in other.stdout, str(other)
    assert judged.stdout.splitlines()[-1] == other.stdout.splitlines()[-1]
    told = call("predict", str(run), name, "--out", str(tmp_path / "classes.csv"))
    assert told.returncode == 0, str(told)
    lines = (tmp_path / "classes.csv").read_text().splitlines()
    assert len(lines) == 10 and lines[1].startswith(f"{name} 0,")


def test_auto_takes_a_saved_data_set(tmp_path: Path) -> None:
    made = call("auto", saved(tmp_path), *SMALL, "--epochs", "1", "--run-dir", str(tmp_path / "run"))
    assert made.returncode == 0 and "images from column image, labels from label" in made.stdout, str(made)


def test_what_cannot_be_used_is_refused_in_one_line(run_dir: Path, tmp_path: Path) -> None:
    refused(call("auto", f"hf:{tmp_path / 'gone'}", *SMALL, "--run-dir", str(run_dir)), 3, "gone does not exist")
    name = saved(tmp_path)
    outcome = call("train", "--data", name, "--label-column", "kind", *SMALL, "--run-dir", str(run_dir))
    refused(outcome, 2, "--label-column (kind) is not a column of", "which has image, label")
    refused(call("train", "--data", name, "--split-column", "part"), 2, "--split-column needs ")
    refused(call("train", "--data", "hf:"), 2, "--data (hf:) must be one of")
