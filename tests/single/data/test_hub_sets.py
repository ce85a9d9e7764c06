"""Data sets of Hugging Face's library: saved ones, image folders and Parquet files, by their features."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvfreeze.data.data_sets import DataSplits, open_data
from hvfreeze.data.sizes import rows_probed
from hvfreeze.data.tables import Columns
from hvfreeze.errors import RefusedError, UsageError
from tests.program import save_photos

datasets = pytest.importorskip("datasets")
F = datasets
Classes = F.ClassLabel(names=["owl", "cat"])


def images(count: int, start: int = 0, side: int = 8) -> list[Image.Image]:
    return [Image.new("RGB", (side, side), (10 * (start + number), 9, 9)) for number in range(count)]


def split(labels: list[Any], feature: Any, *, start: int = 0, column: str = "label", **more: Any) -> Any:
    features = {"picture": F.Image(), column: feature, **{name: F.Value("string") for name in more}}
    rows = {"picture": images(len(labels), start), column: labels, **more}
    return F.Dataset.from_dict(rows, features=F.Features(features))


def saved(folder: Path, **splits: Any) -> str:
    F.DatasetDict(splits).save_to_disk(str(folder / "saved"))
    return f"hf:{folder / 'saved'}"


def opened(name: str, **columns: Any) -> DataSplits:
    given = Columns(**columns)
    return open_data(name, task=given.task, columns=given)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(F.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(F.config, "HF_DATASETS_OFFLINE", True)


def test_a_saved_data_set_is_read_by_its_features(tmp_path: Path) -> None:
    name = saved(tmp_path, train=split([1, 0, 0], Classes), validation=split([0, 1], Classes, start=3))
    splits = opened(name)
    assert splits.train.classes == ("owl", "cat")
    assert splits.train.labels.tolist() == [1, 0, 0] and splits.test.labels.tolist() == [0, 1]
    assert splits.train.decode(1)[0, 0, 0] == 10 and splits.test.decode(1)[0, 0, 0] == 40
    assert "the split validation serves as the test set" in splits.notes
    again = opened(name)
    assert again.train.identity() == splits.train.identity()


def test_a_change_of_any_image_or_file_gives_cached_rows_another_identity(tmp_path: Path) -> None:
    labels = [0, 1] * 50
    unseen = min({*range(100)} - {*rows_probed(100)})
    sources = []
    for changed in (0, 1):
        pictures = [Image.new("RGB", (2, 2), (row, 9, 9 + changed * (row == unseen))) for row in range(100)]
        features = F.Features({"picture": F.Image(), "label": Classes})
        data = F.Dataset.from_dict({"picture": pictures, "label": labels}, features=features)
        name = saved(tmp_path / str(changed), train=data, test=data)
        for path in Path(name.removeprefix("hf:")).rglob("*.arrow"):
            os.utime(path, ns=(0, 0))
        sources.append(opened(name).train.source)
    first, second = sources
    assert first.identity(local=False) == second.identity(local=False)
    assert first.identity(local=True) != second.identity(local=True)
    again = opened(name).train.source
    assert again.identity(local=True) == second.identity(local=True)
    for path in (tmp_path / "1").rglob("*.arrow"):
        os.utime(path, ns=(0, 1))
    saved_again = opened(name).train.source
    assert saved_again.identity(local=True) != second.identity(local=True)
    assert saved_again.identity(local=False) == second.identity(local=False)


def test_without_a_test_split_a_tenth_is_held_out(tmp_path: Path) -> None:
    split([0, 1] * 12, Classes).save_to_disk(str(tmp_path / "saved"))
    splits = opened(f"hf:{tmp_path / 'saved'}")
    assert np.bincount(splits.test.labels.numpy()).tolist() == [1, 1] and len(splits.train) == 22
    assert any(
        "has no test split: a fixed 10% of each class is the test set, 2 of 24 images" in note for note in splits.notes
    )


def test_parquet_with_images_inside_is_read(tmp_path: Path) -> None:
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for part, labels in (("train", [1, 0, 0]), ("test", [0, 1])):
        split(labels, Classes).to_parquet(str(tmp_path / "repository" / "data" / f"{part}-00000-of-00001.parquet"))
    splits = opened(f"hf:{tmp_path / 'repository'}")
    assert splits.train.classes == ("owl", "cat") and splits.train.labels.tolist() == [1, 0, 0]
    assert splits.test.labels.tolist() == [0, 1]
    split([0, 1] * 12, Classes).to_parquet(str(tmp_path / "one.parquet"))
    assert len(opened(f"hf:{tmp_path / 'one.parquet'}").train) == 22


def test_an_image_folder_is_read(tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos", training=3)
    splits = opened(f"hf:{photos}")
    assert splits.train.classes == ("a", "b") and np.bincount(splits.train.labels.numpy()).tolist() == [3, 3]
    assert len(splits.test) == 8


def test_other_labels_are_read_as_those_of_a_table(tmp_path: Path) -> None:
    text = F.Value("string")
    name = saved(tmp_path / "names", train=split(["b", "a"], text), test=split(["a"], text))
    assert opened(name).train.classes == ("a", "b")
    float32 = F.Value("float32")
    name = saved(tmp_path / "numbers", train=split([0.5, 2.0], float32), test=split([1.0], float32))
    splits = opened(name)
    assert splits.train.kind == "numbers" and splits.train.labels.tolist() == [[0.5], [2.0]]
    several = F.Sequence(Classes) if hasattr(F, "Sequence") else F.List(Classes)
    name = saved(tmp_path / "several", train=split([[0, 1], [1], []], several), test=split([[0]], several))
    splits = opened(name)
    assert splits.train.kind == "labels" and splits.train.classes == ("owl", "cat")
    assert splits.train.labels.tolist() == [[1, 1], [0, 1], [0, 0]]
    for task in ("numbers", "classes"):
        with pytest.raises(
            UsageError, match=rf"--task \({task}\): column label has a list per image, which --task lab"
        ):
            opened(name, task=task)


def test_a_column_has_the_weights_of_training_samples(tmp_path: Path) -> None:
    data = split([0, 1, 0], Classes, sample_weight=["2", "0", "0.5"])
    splits = opened(saved(tmp_path / "a", train=data, test=split([0, 1], Classes, start=3)))
    assert splits.train.weights is not None and splits.train.weights.tolist() == [2, 0, 0.5]
    assert splits.test.weights is None and splits.train.ids.tolist() == [0, 2]
    assert "weights from sample_weight" in splits.notes[0]
    whole = split([0, 1] * 12, Classes, trust=[str(row) for row in range(24)])
    held = opened(saved(tmp_path / "b", train=whole), weight="trust").train
    assert held.weights is not None and len(held.weights) == 22
    assert all(held.decode(row)[0, 0, 0] == 10 * weight % 256 for row, weight in enumerate(held.weights.tolist()))
    name = saved(tmp_path / "c", train=split([0, 1], Classes, sample_weight=["1", "-1"]), test=split([0], Classes))
    with pytest.raises(RefusedError, match=r"train, row 2, column sample_weight: '-1' must be a weight"):
        opened(name)
    assert opened(name, weight="none").train.weights is None
    with pytest.raises(UsageError, match=r"--weight-column \(trust\) is not a column of .* train, which has picture"):
        opened(name, weight="trust")


def test_names_are_equal_whatever_the_form_of_their_accents(tmp_path: Path) -> None:
    decomposed = F.ClassLabel(names=["bu\u0308ffel", "cat"])
    name = saved(tmp_path / "a", train=split([1, 0], decomposed), test=split([0], decomposed))
    assert opened(name).train.labels.tolist() == [1, 0]
    twice = F.ClassLabel(names=["bu\u0308ffel", "b\u00fcffel"])
    name = saved(tmp_path / "b", train=split([1, 0], twice), test=split([0], twice))
    told = r"train: the names .bu.u0308ffel. and .b.xfcffel. are the same class: .*; rename one"
    with pytest.raises(RefusedError, match=told):
        opened(name)


def test_images_of_several_sizes_become_squares(tmp_path: Path) -> None:
    features = F.Features({"image": F.Image(), "label": Classes})
    rows = {"image": [*images(1), *images(1, side=200)], "label": [0, 1]}
    data = F.Dataset.from_dict(rows, features=features)
    splits = opened(saved(tmp_path, train=data, test=data))
    assert splits.train.image_shape == (3, 128, 128)
    assert "images differ in size: resizing to 128x128 pixels" in " ".join(splits.notes)


def test_a_damaged_image_counts_as_broken(tmp_path: Path) -> None:
    features = F.Features({"image": F.Image(decode=False), "label": Classes})
    rows = {"image": [{"bytes": b"no image", "path": None}] * 2, "label": [0, 1]}
    bad = F.Dataset.from_dict(rows, features=features).cast_column("image", F.Image())
    good = split([0, 1], Classes).rename_column("picture", "image")
    splits = opened(saved(tmp_path, train=F.concatenate_datasets([good, bad]), test=good))
    with pytest.raises(RefusedError, match=r"--data \(hf:.*\): sample 2 cannot be read"):
        splits.train.decode(2)


def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"gone does not exist; name a local file or folder; hf download"):
        opened(f"hf:{tmp_path / 'gone'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match=r"empty\) cannot be read as a dataset: "):
        opened(f"hf:{tmp_path / 'empty'}")
    text = F.Value("string")
    name = saved(tmp_path / "a", train=split(["b", "a"], text), test=split(["c"], text))
    with pytest.raises(RefusedError, match=r"test, row 1, column label: class 'c' is unknown to the training rows"):
        opened(name)
    name = saved(tmp_path / "b", train=split([0, -1], Classes), test=split([0], Classes))
    with pytest.raises(RefusedError, match=r"train, row 2, column label: no label"):
        opened(name)
    with pytest.raises(UsageError, match=r"--label-column \(kind\) is not a column of .*, which has picture, label"):
        opened(name, label="kind")
    with pytest.raises(UsageError, match=r"--image-column \(label\) of .* holds .*, not images"):
        opened(name, image="label")
    name = saved(tmp_path / "c", train=split([0, 1], Classes, column="species", other=["a", "b"]))
    with pytest.raises(RefusedError, match="no test split: 2 images are too few to hold out a test set"):
        opened(name)
    name = saved(
        tmp_path / "d", train=split(["a", "b"], text, column="species"), test=split(["a"], text, column="species")
    )
    with pytest.raises(
        UsageError, match=r"has no column named label; name the column with --label-column \(columns: picture"
    ):
        opened(name)
    assert opened(name, label="species").train.classes == ("a", "b")
    name = saved(tmp_path / "e", part=split([0, 1], Classes))
    with pytest.raises(RefusedError, match="has no training split, only part"):
        opened(name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"needs datasets .*: pip install datasets$"):
        opened(name)
