"""Data sets: the samples and ids of each split, and errors with their way out."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvfreeze.data.data_sets import ImageSet, default_directory, open_data
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError

SHARED_ZIP = Path(__file__).parents[3].parent / "shared" / "data" / "cifar10-webp.zip"
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_images(root: Path, *, num: int = 3, side: int = 8, classes: str = "ab") -> None:
    """Writes root/CLASS/NUMBER.png, every image of another colour."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            Image.new("RGB", (side, side), (label, number, side)).save(root / name / f"{number}.png")


def folder(root: Path) -> Path:
    """A sound data set to break: two classes of three 8x8 images for training, one each for test."""
    write_images(root / "train")
    write_images(root / "test", num=1)
    return root


def images_of(image_set: ImageSet) -> set[bytes]:
    return {image_set.decode(sample_id).tobytes() for sample_id in range(len(image_set))}


def test_digits_are_a_fixed_stratified_split_of_32_pixel_rgb_without_flips() -> None:
    splits = open_data("digits")
    assert (len(splits.train), len(splits.test)) == (1438, 359)
    assert splits.train.image_shape == (3, 32, 32) == splits.train.decode(0).shape
    pixels = np.stack([splits.train.decode(sample_id) for sample_id in range(100)])
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert (pixels[:, 0] == pixels[:, 2]).all()
    assert not splits.train.flips
    everywhere, held = (np.bincount(labels.numpy()) for labels in (splits.train.labels, splits.test.labels))
    assert np.abs(held - (everywhere + held) * 0.2).max() < 1
    assert not images_of(splits.train) & images_of(splits.test)
    assert open_data("digits").train.identity() == splits.train.identity() != splits.test.identity()


def test_digits_are_the_same_with_and_without_the_file_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = open_data("digits")
    monkeypatch.setattr("hvfreeze.data.data_sets.find_spec", lambda name: None)
    loaded = open_data("digits")
    assert from_file.train.identity() == loaded.train.identity()
    assert from_file.test.identity() == loaded.test.identity()


@pytest.mark.parametrize(("image_size", "stored"), [(None, 32), (16, 16), (32, 32), (64, 32)])
def test_stored_pixels_are_never_larger_than_native(tmp_path: Path, image_size: int | None, stored: int) -> None:
    write_images(tmp_path / "train", side=32)
    write_images(tmp_path / "test", side=32)
    for splits in (
        open_data("digits", image_size=image_size),
        open_data("imagefolder", tmp_path, image_size=image_size),
    ):
        for image_set in (splits.train, splits.test):
            assert image_set.image_shape == (3, stored, stored) == image_set.decode(1).shape


def test_real_cifar10_folders_give_known_images_under_byte_sorted_ids(tmp_path: Path) -> None:
    if not SHARED_ZIP.exists():
        pytest.skip(f"no {SHARED_ZIP.name} beside this checkout")
    with zipfile.ZipFile(SHARED_ZIP) as archive:
        names = archive.namelist()
        for split in ("train", "test"):
            for name in CIFAR_CLASSES:
                members = sorted(member for member in names if member.startswith(f"{split}/{name}/"))
                archive.extractall(tmp_path, members[:: len(members) // 12][:12])
    splits = open_data("cifar10", tmp_path)
    assert splits.train.classes == splits.test.classes == CIFAR_CLASSES
    assert splits.train.labels.tolist() == [label for label in range(10) for _ in range(12)]
    paths = sorted((path for path in (tmp_path / "train").rglob("*.webp")), key=lambda path: bytes(path))
    for sample_id in (0, 57, 119):
        with Image.open(paths[sample_id]) as image:
            expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(splits.train.decode(sample_id), expected)
    everything = np.stack([splits.train.decode(i) for i in range(120)]) / 255
    np.testing.assert_allclose(everything.mean(axis=(0, 2, 3)), splits.train.mean, atol=0.05)
    np.testing.assert_allclose(everything.std(axis=(0, 2, 3)), splits.train.std, atol=0.05)
    assert not images_of(splits.train) & images_of(splits.test)


def test_class_folders_only_hold_out_a_fixed_tenth_of_each_class_and_say_so(tmp_path: Path) -> None:
    write_images(tmp_path, num=30, classes="abc")
    splits = open_data("imagefolder", tmp_path)
    assert np.bincount(splits.test.labels.numpy()).tolist() == [3, 3, 3]
    assert len(splits.train) == 81
    assert not images_of(splits.train) & images_of(splits.test)
    assert images_of(splits.test) == images_of(open_data("imagefolder", tmp_path).test)
    assert "a fixed 10% of each class is the test set, 9 of 90 images" in splits.notes[0]


def test_the_folder_of_training_images_alone_is_told_of_the_test_images_beside_it(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_images(tmp_path / part, num=30, classes="abc")
    note = open_data("imagefolder", tmp_path / "train").notes[0]
    assert f"(to use the test images in test, give {tmp_path})" in note
    assert "to use" not in open_data("imagefolder", tmp_path / "test").notes[0]


def test_images_of_many_sizes_become_one_with_an_image_size(tmp_path: Path) -> None:
    folder(tmp_path)
    Image.new("RGB", (30, 20)).save(tmp_path / "train" / "a" / "0.png")
    assert open_data("imagefolder", tmp_path, image_size=16).train.image_shape == (3, 16, 16)
    splits = open_data("imagefolder", tmp_path, image_size=64)
    assert splits.train.image_shape == splits.test.image_shape == (3, 20, 20)
    assert {splits.train.decode(row).shape for row in range(6)} == {(3, 20, 20)}
    Image.new("RGB", (300, 200)).save(tmp_path / "test" / "a" / "9.png")
    assert open_data("imagefolder", tmp_path).train.image_shape == (3, 128, 128)


def test_labels_and_classes_are_part_of_the_identity_that_ranks_and_caches_compare(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "1"), tmp_path / "2"
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    one, two = open_data("imagefolder", first), open_data("imagefolder", second)
    assert one.train.identity(local=False) == two.train.identity(local=False)
    assert one.train.identity() != two.train.identity()
    for change in ({"labels": one.train.labels.flip(0)}, {"classes": ("b", "a")}):
        assert replace(one.train, **change).identity() != one.train.identity()


def test_the_default_directory_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVFREEZE_DATA", str(folder(tmp_path)))
    assert default_directory() == tmp_path
    assert len(open_data("imagefolder").train) == 6
    monkeypatch.delenv("HVFREEZE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "hvfreeze" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "hvfreeze" / "data"


def put_a_file_in_its_place(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("not a folder")


def empty(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def leave_two_images(root: Path) -> None:
    empty(root)
    write_images(root, num=1)


@pytest.mark.parametrize(
    ("damage", "name", "kind", "words"),
    [
        (shutil.rmtree, "imagefolder", RefusedError, ["does not exist; name an existing folder of images"]),
        (put_a_file_in_its_place, "imagefolder", RefusedError, ["is not a folder; name an existing folder of images"]),
        (empty, "cifar10", RefusedError, ["cifar-10-batches-py/", "train/ and test/", "--data-dir"]),
        (leave_two_images, "imagefolder", RefusedError, ["2 images are too few to hold out"]),
        (lambda root: None, "cifar10", RefusedError, ["2 classes where cifar10 has 10", "--data imagefolder"]),
        (lambda root: None, "cifar100", RefusedError, ["2 classes where cifar100 has 100"]),
        (lambda root: None, "mnist", UsageError, ["--data (mnist)", "digits, cifar10, cifar100, imagefolder"]),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_name_with_the_way_out(
    tmp_path: Path, damage: Any, name: str, kind: type[HvfreezeError], words: list[str]
) -> None:
    root = folder(tmp_path / "data")
    damage(root)
    with pytest.raises(HvfreezeError) as refusal:
        open_data(name, root)
    assert type(refusal.value) is kind
    for word in ["" if name == "mnist" else str(root), *words]:
        assert word in str(refusal.value)
