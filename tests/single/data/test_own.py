"""Custom datasets: images and labels are unchanged, and an invalid sample is refused by its index."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hvfreeze.data.data_sets import DataSplits, open_data
from hvfreeze.data.decoding import find_broken
from hvfreeze.data.images import TURNED, BrokenImagesError
from hvfreeze.data.reading import ORIENTATION, TooLargeError
from hvfreeze.data.sizes import MOST_PROBED
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.user_code import is_named_code

PIXELS = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Listed:
    """(image, label) by number."""

    def __init__(self, images: Any, labels: Any, **more: Any) -> None:
        self.images, self.labels, self.read = images, labels, 0
        self.__dict__.update(more)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        self.read += 1
        return self.images[row], self.labels[row]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataSplits]:
    """Opens what a function makes."""

    def open_it(function: Callable[..., Any], **settings: Any) -> DataSplits:
        module: Any = types.ModuleType("data_of_mine")
        module.make = function
        monkeypatch.setitem(sys.modules, "data_of_mine", module)
        return open_data("data_of_mine:make", **settings)

    return open_it


def test_images_and_labels_are_those_of_the_data_set(opened: Callable[..., DataSplits]) -> None:
    pictures = [Image.fromarray(pixels.permute(1, 2, 0).numpy()) for pixels in PIXELS]
    for images in (pictures, PIXELS, PIXELS.float() / 255):
        found = opened(lambda split, images=images: Listed(images, [0, 1, 2, 0, 1, 2]))
        assert found.train.labels.tolist() == [0, 1, 2, 0, 1, 2] and found.train.classes == ("0", "1", "2")
        assert all(np.array_equal(found.test.decode(row), PIXELS[row].numpy()) for row in range(6))
        assert found.train.flips and found.train.image_shape == (3, 8, 8)
    grey = opened(lambda split: Listed(PIXELS[:, 0], [0, 1] * 3, classes=["x", "y"], flips=False))
    assert grey.train.classes == ("x", "y") and not grey.train.flips
    assert opened(lambda split: Listed(PIXELS, [0, 1] * 3), image_size=4).train.decode(0).shape == (3, 4, 4)


def test_a_data_set_with_targets_is_not_read_for_its_labels(opened: Callable[..., DataSplits]) -> None:
    made: list[Listed] = []

    def make(split: str) -> Listed:
        made.append(Listed(PIXELS.repeat(50, 1, 1, 1), [None] * 300, targets=torch.tensor([0, 1] * 150)))
        return made[-1]

    assert opened(make).train.labels.tolist() == [0, 1] * 150 and made[0].read == MOST_PROBED


@pytest.mark.parametrize(
    ("labels", "targets", "equal"),
    [
        ([0, 1] * 3, [0.0, 1.0] * 3, True),
        (torch.tensor([0.1, 1.0] * 3), [0.1, 1.0] * 3, True),
        ([[0], [1]] * 3, [0, 1] * 3, True),
        ([[0, 1], [1, 0]] * 3, torch.tensor([[0, 1], [1, 0]] * 3), True),
        (["owl", "cat"] * 3, [0, 1] * 3, True),
        ([0, 1, 0, 2, 0, 1], [0, 1] * 3, False),
        ([[0, 1], [1, 0]] * 3, [0, 1] * 3, True),
        (torch.tensor([0.3, 1.7] * 3, dtype=torch.bfloat16), [0.3, 1.7] * 3, True),
        ([200, 0] * 3, [201, 0] * 3, False),
        ([0.5, 1.5] * 3, [0.5, 1.25] * 3, False),
    ],
)
def test_targets_that_differ_from_the_labels_of_samples_are_refused(
    opened: Callable[..., DataSplits], labels: Any, targets: Any, equal: bool
) -> None:
    def make(split: str) -> Listed:
        return Listed(PIXELS, labels, targets=targets)

    if equal:
        assert len(opened(make).train) == 6
        return
    told = r"make\): sample \d of train has the label .*, but .* targets has .*; make them equal"
    with pytest.raises(UsageError, match=told):
        opened(make, skip_bad=True)


def test_an_attribute_has_sample_weights(opened: Callable[..., DataSplits]) -> None:
    for given in ([2, 1, 0, 1, 1, 1], torch.tensor([2.0, 1, 0, 1, 1, 1]), np.array([2, 1, 0, 1, 1, 1])):
        found = opened(lambda split, given=given: Listed(PIXELS, [0, 1] * 3, sample_weight=given))
        assert found.train.weights is not None and found.train.weights.tolist() == [2, 1, 0, 1, 1, 1]
        assert found.test.weights is None and found.train.ids.tolist() == [0, 1, 3, 4, 5]
    for bad, message in (
        ([1, 2], r"has the shape \(2,\)"),
        ([1, 1, -1, 1, 1, 1], r"-1.0 of sample 2 must be a number of at least 0"),
        ([1, 1, float("inf"), 1, 1, 1], r"inf of sample 2 must be a number"),
        (["a"] * 6, r"must be numbers"),
        ([0] * 6, r"must not be 0 for all samples"),
    ):
        with pytest.raises(HvfreezeError, match=rf"--data \(data_of_mine:make\): sample_weight of .* {message}"):
            opened(lambda split, bad=bad: Listed(PIXELS, [0, 1] * 3, sample_weight=bad))


def test_labels_may_be_several_a_sample_or_numbers(opened: Callable[..., DataSplits]) -> None:
    several = [torch.tensor([1, 0, 1]), np.array([True, False, False]), [0, 0, 0]] * 2
    found = opened(lambda split: Listed(PIXELS, several, classes="xyz")).train
    assert found.kind == "labels" and found.classes == ("x", "y", "z") and found.labels.dtype == torch.float32
    assert found.labels[:3].tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
    # The rarest label of each, or none.
    assert found.strata.tolist() == [2, 0, 3] * 2
    assert opened(lambda split: Listed(PIXELS, [0.5, 1, 2] * 2)).train.labels.tolist() == [[0.5], [1], [2]] * 2
    pairs = opened(lambda split: Listed(PIXELS, [[1, 2], [3, 4]] * 3)).train
    assert pairs.kind == "numbers" and pairs.labels.shape == (6, 2)
    # Whole numbers are classes, unless somebody says otherwise.
    assert opened(lambda split: Listed(PIXELS, [0, 1] * 3)).train.kind == "classes"
    assert opened(lambda split: Listed(PIXELS, [0, 1] * 3), task="numbers").train.kind == "numbers"
    assert opened(lambda split: Listed(PIXELS, [0, 1] * 3, task="labels")).train.labels.shape == (6, 1)


def test_the_folder_comes_to_a_function_that_asks_for_one(opened: Callable[..., DataSplits]) -> None:
    asked = []

    def make(split: str, data_dir: str = "none") -> Listed:
        asked.append((split, data_dir))
        return Listed(PIXELS, [0, 1] * 3)

    opened(make, directory="/some/where")
    opened(make)
    assert asked == [("train", "/some/where"), ("test", "/some/where"), ("train", "none"), ("test", "none")]


def test_other_pixels_labels_or_a_version_give_another_identity(opened: Callable[..., DataSplits]) -> None:
    def identity(**more: Any) -> str:
        images = more.pop("images", PIXELS)
        return opened(lambda split: Listed(images, more.pop("labels", [0, 1] * 3), **more)).train.identity()

    first = identity()
    assert first == identity()
    assert len({first, identity(version=2), identity(labels=[1, 0] * 3), identity(images=PIXELS.flip(0))}) == 4


def test_a_picture_is_turned_as_its_exif_orientation_says(opened: Callable[..., DataSplits], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for row, pixels in enumerate(PIXELS):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(tmp_path / f"{row}.png", **({"exif": exif} if row == 2 else {}))
    pictures = [Image.open(tmp_path / f"{row}.png").convert("RGB") for row in range(6)]
    train = opened(lambda split: Listed(pictures, [0, 1] * 3)).train
    assert np.array_equal(train.decode(1), PIXELS[1].numpy())
    assert np.array_equal(train.decode(2), np.rot90(PIXELS[2].numpy(), 3, axes=(1, 2)))
    splits = opened(lambda split: Listed(pictures, [0, 1] * 3))
    assert splits.notes == [f"of 6 {part} images probed, 1 {TURNED}" for part in ("train", "test")]
    # Any picture may be read otherwise than before, a tensor cannot.
    assert train.identity() != train.identity(local=False)
    tensors = opened(lambda split: Listed(PIXELS, [0, 1] * 3)).train
    assert tensors.identity() == tensors.identity(local=False)


ODD: dict[str, tuple[Any, str]] = {
    "no data set": (lambda split: 3, "must return a Dataset with a length"),
    "an empty one": (lambda split: Listed([], []), "a length above 0"),
    "no pair": (lambda split: [1, 2, 3], r"sample 0 cannot be read as \(image, label\): TypeError"),
    "a failing one": (lambda split: Listed(PIXELS[:3], [0]), "sample 1 cannot be read .*IndexError"),
    "a label in words": (lambda split: Listed(PIXELS, ["a"] * 6), r"label of sample 0 \('a'\) must be a whole number"),
    "labels of several lengths": (
        lambda split: Listed(PIXELS, [[0, 1]] * 5 + [[0, 1, 1]]),
        r"label of sample 0 of train \(\[0.0, 1.0\]\) must be 0 or 1, 3 times",
    ),
    "a label that is no number": (
        lambda split: Listed(PIXELS, [0.5, float("nan")] * 3),
        "sample 1 .nan. must be finite",
    ),
    "other labels in test": (
        lambda split: Listed(PIXELS, [[0, 1, 1] if split == "train" else [0, 1]] * 6),
        "labels have 3 entries in train and 2 entries in test",
    ),
    "names that do not suffice": (
        lambda split: Listed(PIXELS, [[0, 1, 1]] * 6, classes="ab"),
        "must be 3 different names, one for each entry of a label",
    ),
    "an unknown task": (lambda split: Listed(PIXELS, [0, 1] * 3, task="detection"), "the dataset's task .detection."),
    "a label below 0": (lambda split: Listed(PIXELS, [0, -1] * 3), "label of sample 1 of train .-1."),
    "one class": (lambda split: Listed(PIXELS, [0] * 6), "at least two classes"),
    "more labels than classes": (lambda split: Listed(PIXELS, [0, 2] * 3, classes="ab"), "labels go up to 2"),
    "an empty name": (lambda split: Listed(PIXELS, [0, 1] * 3, classes=["x", ""]), "different names, none empty"),
    "normalised images": (lambda split: Listed(PIXELS - 300.0, [0, 1] * 3), "not in 0..1"),
    "an error": (lambda split: 1 / 0, r"failed: ZeroDivisionError: division by zero \(test_own.py"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_data_set_is_refused_in_one_line(opened: Callable[..., DataSplits], case: str) -> None:
    function, message = ODD[case]
    with pytest.raises(HvfreezeError, match=message) as refusal:
        opened(function)
    assert "\n" not in str(refusal.value) and "data_of_mine:make" in str(refusal.value)


def test_images_of_other_sizes_ask_for_one_size(opened: Callable[..., DataSplits]) -> None:
    odd = [*PIXELS[:5], PIXELS[5, :, :4]]
    for images in ({"train": odd, "test": PIXELS}, {"train": PIXELS, "test": PIXELS[..., :4, :]}):
        with pytest.raises(HvfreezeError, match=r"differ in size: .*\(8x8\) and .*\(8x4\); use --image-size"):
            opened(lambda split, images=images: Listed(images[split], [0, 1] * 3))
    # One that is not among those looked at is refused when it is met.
    found = opened(lambda split: Listed([*PIXELS.repeat(50, 1, 1, 1)[:298], odd[5], odd[0]], [0, 1] * 150))
    with pytest.raises(HvfreezeError, match="sample 298 has 8x4 pixels, others have 8x8; use --image-size"):
        found.train.decode(298)


@pytest.mark.parametrize("small", [{"train": 0, "test": 0}, {"train": 3}])
def test_no_single_image_decides_the_size_of_all(opened: Callable[..., DataSplits], small: dict[str, int]) -> None:
    def make(split: str) -> Listed:
        return Listed(
            [torch.zeros(3, *((8, 8) if small.get(split) == row else (64, 80)), dtype=torch.uint8) for row in range(6)],
            [0, 1] * 3,
        )

    for wanted, side in ((64, 64), (32, 32), (96, 64)):
        found = opened(make, image_size=wanted)
        assert found.train.image_shape == found.test.image_shape == (3, side, side)
        assert {part.decode(row).shape for part in (found.train, found.test) for row in range(6)} == {(3, side, side)}


class Broken(Listed):
    """Some samples cannot be read: not at all, or when the image is decoded."""

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        if row in (0, 7):
            raise OSError("the file is gone")
        image, label = super().__getitem__(row)
        return (Image.open(io.BytesIO(self.truncated)) if row == 3 else image), label


@pytest.mark.parametrize("known", [True, False])
def test_broken_samples_are_named_or_left_out(opened: Callable[..., DataSplits], known: bool) -> None:
    file = io.BytesIO()
    Image.fromarray(PIXELS[0].permute(1, 2, 0).numpy()).save(file, "png")
    more: dict[str, Any] = {"truncated": file.getvalue()[:150]} | ({"targets": [0, 1] * 6} if known else {})

    def make(split: str) -> Listed:
        return Broken(PIXELS.repeat(2, 1, 1, 1), [0, 1] * 6, **more)

    if not known:
        with pytest.raises(BrokenImagesError, match=r"sample 0 cannot.*gone.*sample 7 cannot.*--skip-bad") as refusal:
            opened(make)
        assert len(refusal.value.reasons) == 4, "two of each split"
    train = opened(make, skip_bad=True).train
    found = find_broken(train)
    assert sorted(found) == [0, 3, 7] and "the image of sample 3 cannot be used" in found[3]
    assert sorted(train.broken) == ([] if known else [0, 7])
    assert replace(train, broken=found).ids.tolist() == [1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert train.labels[train.ids].tolist() == train.ids.__mod__(2).tolist()
    assert train.identity() == opened(make, skip_bad=True).train.identity()


UNLEARNT = "no training sample has a class that the test set has"
NUMBERED: list[tuple[Any, Any, str, str, list[str]]] = [
    ([17, 4000, 20000, 60000] * 2, None, "", "17 4000 20000 60000", ["labels are 17, 4000, "]),
    ([1, 2, 3, 4] * 2, None, "", "1 2 3 4", ["labels are 1, 2, 3, 4: the 4 classes are"]),
    ([10**18, 3] * 4, None, "", f"3 {10**18}", ["labels are 3, "]),
    ([np.array(2), 1] * 4, None, "", "1 2", ["labels are 1, 2: "]),
    ([1, 2] * 4, [9, 1, 2, 1] * 2, "", "1 2 9", ["labels are 1, 2, 9: ", f"{UNLEARNT}: 9"]),
    ([0, 1] * 4, [0, 3, 2, 1] * 2, "abcd", "a b c d", [f"{UNLEARNT}: c, d"]),
    ([1, 2] * 4, None, "xab", "x a b", ["no sample has one of 1 class that are named: x"]),
    ([[1, 0], [0, 0]] * 4, [[0, 1], [1, 1]] * 4, "", "0 1", ["no training sample has label 1"]),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("trained", "tested", "named", "classes", "notes"), NUMBERED)
def test_labels_are_numbered_and_what_is_odd_in_them_is_told(
    opened: Callable[..., DataSplits],
    trained: Any,
    tested: Any,
    named: str,
    classes: str,
    notes: list[str],
    known: bool,
) -> None:
    labels, images = {"train": trained, "test": tested or trained}, PIXELS[[*range(6), 0, 1]]

    def make(split: str) -> Listed:
        more = ({"classes": named} if named else {}) | ({"targets": labels[split]} if known else {})
        return Listed(images, labels[split], **more)

    found = opened(make)
    for part, image_set in (("train", found.train), ("test", found.test)):
        assert image_set.classes == tuple(classes.split())
        renumbered = image_set.kind == "classes" and not named
        wanted = [classes.split().index(str(label)) for label in labels[part]] if renumbered else labels[part]
        assert image_set.labels.tolist() == wanted
    assert len(found.notes) == len(notes) and all(map(str.startswith, found.notes, notes)), found.notes


def test_a_number_for_each_sample_is_no_class(opened: Callable[..., DataSplits]) -> None:
    images = torch.zeros(1500, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(
        HvfreezeError, match=r"1500 training samples have 1500 different labels, such as 0, 1, .*; a class needs"
    ):
        opened(lambda split: Listed(images, list(range(1500)), targets=list(range(1500))))


class Keyed(Listed):
    """Samples as dictionaries."""

    def __getitem__(self, row: int) -> Any:
        image, label = super().__getitem__(row)
        return {self.keys[0]: image, self.keys[1]: label, "path": "x"}


@pytest.mark.parametrize("keys", [("image", "label"), ("img", "labels"), ("pixel_values", "target")])
def test_samples_may_be_dictionaries(opened: Callable[..., DataSplits], keys: tuple[str, str]) -> None:
    found = opened(lambda split: Keyed(PIXELS, [0, 1] * 3, keys=keys))
    assert found.train.labels.tolist() == [0, 1] * 3
    np.testing.assert_array_equal(found.train.decode(4), PIXELS[4].numpy())


@pytest.mark.parametrize("skip_bad", [True, False])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda split: Keyed(PIXELS, [0, 1] * 3, keys=("photo", "label")),
            "with the keys photo, label, path; one of image",
        ),
        (
            lambda split: Keyed(PIXELS, [0, 1] * 3, keys=("image", "fine")),
            "with the keys image, fine, path; one of image",
        ),
        (lambda split: [3.5] * 6, "it is a float, and must be a pair"),
        (lambda split: [{1, 2}] * 6, "it is a set, and must be a pair"),
    ],
)
def test_samples_of_another_form_have_one_line_for_all(
    opened: Callable[..., DataSplits], make: Callable[..., Any], message: str, skip_bad: bool
) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        opened(make, skip_bad=skip_bad)
    assert str(refusal.value).count("sample ") == 1


def test_samples_that_are_none_are_broken_ones(opened: Callable[..., DataSplits]) -> None:
    def make(split: str) -> Any:
        return [None, *((pixels, row % 2) for row, pixels in enumerate(PIXELS))]

    with pytest.raises(BrokenImagesError, match=r"sample 0 cannot be read .*it is None.*--skip-bad"):
        opened(make)
    assert opened(make, skip_bad=True).train.ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_image_that_is_too_large_is_no_broken_one(opened: Callable[..., DataSplits]) -> None:
    class Large(Listed):
        def __getitem__(self, row: int) -> Any:
            if row == 3:
                raise Image.DecompressionBombError("Image size (182000000 pixels) exceeds limit of 178956970 pixels")
            return super().__getitem__(row)

    for more in ({}, {"targets": [0, 1] * 3}):
        with pytest.raises(TooLargeError, match=r"sample 3 is too large: 183 megapixels, and the limit is 178; .*=183"):
            find_broken(opened(lambda split, more=more: Large(PIXELS, [0, 1] * 3, **more), skip_bad=True).train)


def test_a_path_with_a_colon_is_no_code() -> None:
    assert is_named_code("my_package.parts:make")
    assert not is_named_code("/runs/2026-01-01T12:00/labels.csv") and not is_named_code("photos/10:30")
