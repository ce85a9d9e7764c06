"""A table of labels on several ranks: the run that folders give, and one message where it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel import standing
from tests.parallel.test_bad_input_ranks import refused
from tests.program import save_photos

SMALL = ["--model", "tests.kept.small_model:small", "--batch-size", "4", "--epochs", "1", "--threads", "1"]

pytestmark = [pytest.mark.mpi, pytest.mark.standing]


def table_of(photos: Path) -> Path:
    """A table of the images in folders, in their order."""
    lines = ["image,label,split"]
    for image in sorted(photos.rglob("*.png")):
        split, name, _ = image.relative_to(photos).parts
        lines.append(f"{image.relative_to(photos)},{name},{split}")
    (photos / "labels.csv").write_text("\n".join(lines))
    return photos / "labels.csv"


@pytest.mark.parametrize("size", [2])
def test_a_table_trains_as_folders_do(size: int, tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos", training=4)
    digests = []
    for name, data in (("table", [str(table_of(photos))]), ("folders", ["imagefolder", "--data-dir", str(photos)])):
        result = standing.hvfreeze(size, "train", *SMALL, "--data", *data, "--run-dir", str(tmp_path / name))
        assert result.returncode == 0, str(result)
        digests.append(json.loads((tmp_path / name / "summary.json").read_text())["parameter_digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("size", [2])
def test_a_data_set_of_hugging_face_trains_and_its_errors_are_said_once(
    size: int, run_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    photos = save_photos(tmp_path / "photos", training=4)
    train, home = ["train", *SMALL, "--run-dir"], str(tmp_path / "home")
    kind = ["--data", f"hf:{photos}", "--label-column", "kind"]
    result = standing.hvfreeze(size, *train, str(run_dir), *kind, HF_HOME=home)
    refused(result, 2, "--label-column (kind) is not a column")
    result = standing.hvfreeze(size, *train, str(run_dir), "--data", "hf:/gone", HF_HOME=home)
    refused(result, 3, "/gone does not exist")
    result = standing.hvfreeze(size, *train, str(tmp_path / "good"), "--data", f"hf:{photos}", HF_HOME=home)
    assert result.returncode == 0 and "8 training images, 8 test images, 2 classes" in result.stdout, str(result)


@pytest.mark.parametrize("size", [2])
def test_a_table_that_cannot_be_used_is_refused_once(size: int, run_dir: Path, tmp_path: Path) -> None:
    table = table_of(save_photos(tmp_path / "photos", training=4))
    train = ["train", *SMALL, "--data", str(table), "--run-dir", str(run_dir)]
    refused(standing.hvfreeze(size, *train, "--label-column", "kind"), 2, "--label-column (kind) is not a column of")
    table.write_text(table.read_text().replace("03.png,b", "03.png,", 1))
    refused(standing.hvfreeze(size, *train), 3, f"{table}, line", "column label: no label; fill it in")
