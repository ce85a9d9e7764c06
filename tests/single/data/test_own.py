"""A Dataset of the user's own: its images and labels as they are, and what is none refused by its sample."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hvfreeze.data.sets.image_set import DataSplits
from hvfreeze.data.sets.opening import open_data
from hvfreeze.errors import HvfreezeError

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
        made.append(Listed(PIXELS, None, targets=torch.tensor([0, 1] * 3)))
        made[-1].labels = [None] * 6
        return made[-1]

    assert opened(make).train.labels.tolist() == [0, 1] * 3 and made[0].read == 1


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


ODD: dict[str, tuple[Any, str]] = {
    "no data set": (lambda split: 3, "must return a Dataset with a length"),
    "an empty one": (lambda split: Listed([], []), "a length above 0"),
    "no pair": (lambda split: [1, 2, 3], r"sample 0 cannot be read as \(image, label\): TypeError"),
    "a failing one": (lambda split: Listed(PIXELS[:3], [0]), "sample 1 cannot be read .*IndexError"),
    "a label in words": (lambda split: Listed(PIXELS, ["a"] * 6), r"label of sample 0 \('a'\) must be a whole number"),
    "a label below 0": (lambda split: Listed(PIXELS, [0, -1] * 3), r"label of sample 1 \(-1\)"),
    "one class": (lambda split: Listed(PIXELS, [0] * 6), "at least two classes"),
    "more labels than classes": (lambda split: Listed(PIXELS, [0, 2] * 3, classes="ab"), "labels go up to 2"),
    "normalised images": (lambda split: Listed(PIXELS - 300.0, [0, 1] * 3), "not in 0..1"),
    "an error": (lambda split: 1 / 0, r"failed: ZeroDivisionError: division by zero \(test_own.py"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_data_set_is_refused_in_one_line(opened: Callable[..., DataSplits], case: str) -> None:
    function, message = ODD[case]
    with pytest.raises(HvfreezeError, match=message) as refusal:
        opened(function)
    assert "\n" not in str(refusal.value) and "data_of_mine:make" in str(refusal.value)


def test_an_image_of_another_size_is_refused_when_it_is_met(opened: Callable[..., DataSplits]) -> None:
    found = opened(lambda split: Listed([*PIXELS[:5], PIXELS[5, :, :4]], [0, 1] * 3))
    with pytest.raises(HvfreezeError, match="sample 5 has 8x4 pixels where others have 8x8; give --image-size"):
        found.train.decode(5)
