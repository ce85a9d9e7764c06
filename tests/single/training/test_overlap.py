"""Train/test duplicates are reported, whatever their names and the kind of their data set."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from hvfreeze.comm.world import SoloWorld
from hvfreeze.data import overlap
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.decoding import MemoryPixels
from hvfreeze.data.images import ArraySource
from hvfreeze.samples.duplicates import duplicates_in_memory
from tests.program import succeed, summary_of

TRAIN = ["train", "--model", "mlp-16x16", "--batch-size", "8", "--epochs", "1", "--threads", "1"]
TRAIN += ["--augment", "none", "--image-size", "16"]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3)).astype(np.uint8))


def save_noise(folder: Path, *, training: int = 8, tested: int = 4) -> Path:
    """No two images are alike, and files differ in size as photographs do."""
    for part, count, first in (("train", training, 0), ("test", tested, 100)):
        for name in "ab":
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                seed = first + number + 1000 * (name == "b")
                noise(seed).save(folder / part / name / f"{number}.webp", lossless=seed % 2 == 0)
    return folder


Found = tuple[list[str], dict[str, int] | None]
"""The notes of a run, and what summary.json says of them."""


def duplicates(run: Path, *flags: str) -> Found:
    """Train; return what was found of images in both splits."""
    return found_in(run, flags, "also in the training set", "evaluated_in_training")


def conflicts(run: Path, *flags: str) -> Found:
    """Train; return what was found of training images in two classes."""
    return found_in(run, flags, "have a duplicate in another class", "trained_in_two_classes")


def found_in(run: Path, flags: Sequence[str], words: str, key: str) -> Found:
    lines = succeed(*TRAIN, *flags, "--run-dir", str(run)).stdout.splitlines()
    return [line for line in lines if words in line], summary_of(run).get(key)


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no image be kept in memory."""
    monkeypatch.setattr("hvfreeze.samples.opening.memory_budget", lambda local_size: 0)


def of(folder: Path) -> list[str]:
    return ["--data", "imagefolder", "--data-dir", str(folder)]


def copied(folder: Path) -> None:
    shutil.copy(folder / "train" / "b" / "3.webp", folder / "test" / "b" / "another name.webp")


def test_a_copy_under_another_name_is_told(tmp_path: Path) -> None:
    folder = save_noise(tmp_path / "data")
    # For lossy formats the pixels are those of the decoded file.
    noise(1003).save(folder / "train" / "b" / "3.webp", lossless=True)
    noise(1003).save(folder / "test" / "b" / "another name.png")
    [note], found = duplicates(tmp_path / "run", *of(folder))
    assert "of 9 evaluation images, 1 is also in the training set" in note
    assert "another name" in note and "train/b/3.webp" in note and found == {"found": 1, "compared": 9}


def test_held_out_samples_are_what_is_compared_where_accuracy_is_on_them(tmp_path: Path) -> None:
    folder = save_noise(tmp_path / "data")
    copied(folder)
    for number in range(8):
        shutil.copy(folder / "train" / "a" / f"{number}.webp", folder / "train" / "a" / f"again {number}.webp")
    [note], _ = duplicates(tmp_path / "run", *of(folder), "--validation-fraction", "0.5")
    assert "of 12 evaluation images" in note and "/train/a/" in note and "/test/" not in note


def test_of_streamed_images_a_few_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch)
    monkeypatch.setattr(overlap, "MOST_FILES", 5)
    folder = save_noise(tmp_path / "data")
    for number in range(4):
        shutil.copy(folder / "train" / "a" / f"{number}.webp", folder / "test" / "a" / f"copy {number}.webp")
    read = []
    digests = overlap.digests_of_files

    def counted(source: overlap.FileSource, ids: overlap.Ids) -> overlap.Digests:
        read.append([source.paths[row] for row in ids])
        return digests(source, ids)

    monkeypatch.setattr("hvfreeze.samples.duplicates.digests_of_files", counted)
    [note], found = duplicates(tmp_path / "run", *of(folder))
    tested, trained, _ = read
    assert len(tested) == 5 and len(trained) < 16
    copies = sum("copy" in path for path in tested)
    assert f"of 5 compared of 12 evaluation images, {copies} " in note
    assert found == {"found": copies, "compared": 5}


def test_many_images_in_memory_are_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_IMAGES", 3)
    folder = save_noise(tmp_path / "data")
    shutil.rmtree(folder / "test")
    shutil.copytree(folder / "train", folder / "test")
    [note], found = duplicates(tmp_path / "run", *of(folder))
    assert "of 3 compared of 16 evaluation images" in note and "3 are also in the training set" in note
    assert found == {"found": 3, "compared": 3}


def copied_elsewhere(*, split: str) -> Dataset[Any]:
    """Copies in another order, whose place in training nothing tells but their pixels."""
    return Noise(range(16) if split == "train" else [3, 100, 101, 9])


def divided_twice(*, split: str) -> Dataset[Any]:
    """By random_split, as with another seed for each split."""
    return Subset(WHOLE, range(12) if split == "train" else [20, 10, 30, 11])


def divided_folder(data_dir: str, *, split: str) -> Dataset[Any]:
    """Two objects over one folder."""
    return Subset(Folder(Path(data_dir)), range(12) if split == "train" else [14, 15, 10, 11])


class Noise(Dataset[tuple[Image.Image, int]]):
    """Images by their seeds."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return noise(self.seeds[row]), row % 2


WHOLE = Noise(range(40))


class Folder(Noise):
    """With a list of its files, as torchvision's has it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(range(40))
        self.samples = [(str(folder / f"{row}.png"), row % 2) for row in range(40)]
        for path, _ in self.samples:
            Path(path).touch()


@pytest.mark.parametrize(
    ("made", "decoded", "first", "second", "count"),
    [
        (copied_elsewhere, 4, 0, 3, 2),
        (divided_twice, 0, 1, 10, 2),
        (divided_folder, 0, 2, 10, 2),
    ],
)
def test_own_images_that_are_streamed_are_looked_at_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[..., Any],
    decoded: int,
    first: int,
    second: int,
    count: int,
) -> None:
    stream(monkeypatch)
    monkeypatch.setattr(overlap, "MOST_DECODED", 4)
    if not decoded:
        monkeypatch.setattr("hvfreeze.samples.duplicates.samples_to_decode", None)
    name = f"{__name__}:{made.__name__}"
    [note], found = duplicates(tmp_path / "run", "--data", name, "--data-dir", str(tmp_path))
    assert found == {"found": count, "compared": 4} and f"such as sample {first} = sample {second}:" in note


def test_images_that_agree_where_they_are_looked_at_first_are_not_confused() -> None:
    """Most of an image may be background: then all of it is compared."""
    dark = np.zeros((4, 3, 64, 64), dtype=np.uint8)
    dark[range(4), 0, 0, range(4)] = 1
    triple = (0.0, 0.0, 0.0)
    every = ImageSet(
        name="dark",
        classes=("a", "b"),
        labels=torch.zeros(4, dtype=torch.int64),
        mean=triple,
        std=triple,
        flips=False,
        source=ArraySource(pixels=dark, side=None),
    )
    pixels = MemoryPixels(every, every.ids, workers=1)
    first, last = np.array([0, 1]), np.array([2, 3])
    assert len(set(overlap.first_pixels(pixels, every.ids).tolist())) == 1
    assert duplicates_in_memory(SoloWorld(), ((pixels, first), (pixels, last))) == {}
    assert duplicates_in_memory(SoloWorld(), ((pixels, first), (pixels, np.array([1, 2])))) == {1: 1}


def test_images_that_differ_where_they_are_looked_at_first_are_not_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested = []
    digests = overlap.digests_in_memory

    def counted(pixels: MemoryPixels, ids: overlap.Ids) -> overlap.Digests:
        digested.extend(ids)
        return digests(pixels, ids)

    monkeypatch.setattr("hvfreeze.samples.duplicates.digests_in_memory", counted)
    folder = save_noise(tmp_path / "data")
    assert duplicates(tmp_path / "different", *of(folder)) == ([], None)
    assert digested == []
    copied(folder)
    assert duplicates(tmp_path / "copied", *of(folder))[1] == {"found": 1, "compared": 9}
    assert len(digested) == 2, "the image and its copy"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_picture_in_two_training_classes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    if streamed:
        stream(monkeypatch)
    folder = save_noise(tmp_path / "data")
    assert conflicts(tmp_path / "before", *of(folder)) == ([], None)
    shutil.copy(folder / "train" / "b" / "3.webp", folder / "train" / "a" / "another name.webp")
    shutil.copy(folder / "train" / "b" / "4.webp", folder / "train" / "b" / "in its own class.webp")
    [note], found = conflicts(tmp_path / "run", *of(folder))
    assert "2 have a duplicate in another class, such as" in note and "of 18 training images" in note
    assert f"{folder}/train/a/another name.webp (a) and {folder}/train/b/3.webp (b)" in note
    assert found is not None and found["found"] == 2 and (found["compared"] == 18) == (not streamed)


def twice(*, split: str) -> Dataset[Any]:
    """A data set of ten pictures, of which one is in both classes."""
    return [(noise(row % 9 if split == "train" else 100 + row), row % 2) for row in range(10)]  # type: ignore[return-value]


def test_of_very_many_equal_pictures_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_noise(tmp_path / "data")
    for number, name in ((1, "a"), (2, "a"), (2, "b"), (3, "b")):
        shutil.copy(folder / "train" / "b" / f"{number}.webp", folder / "train" / name / "again.webp")
    monkeypatch.setattr("hvfreeze.samples.duplicates.MOST_HASHED_BYTES", 0)
    assert conflicts(tmp_path / "run", *of(folder)) == ([], None)
    monkeypatch.setattr("hvfreeze.samples.duplicates.MOST_HASHED_BYTES", 2**20)
    assert conflicts(tmp_path / "other", *of(folder))[1] == {"found": 2, "compared": 18}


@pytest.mark.parametrize("streamed", [True])
def test_a_picture_in_two_classes_of_ones_own_data_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    if streamed:
        stream(monkeypatch)
    [note], _ = conflicts(tmp_path / "run", "--data", f"{__name__}:twice")
    assert "of 10 training images, 2 have a duplicate in another class, such as sample 0 (0) and sample 9 (1)" in note


def test_other_pictures_of_equal_first_pixels_are_no_twins() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (200, overlap.PIXELS_PROBED), dtype=np.uint8)
    first[7] = first[3]
    keys = overlap.keys_of(first.view(f"S{overlap.PIXELS_PROBED}")[:, 0])
    assert keys[7] == keys[3] and len(np.unique(keys)) == 199
    assert overlap.conflicts_in({0: b"x", 1: b"x", 2: b"y", 3: b"x"}, [0, 0, 1, 1]) == [0, 1, 3]
