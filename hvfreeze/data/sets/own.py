"""A data set of the user's own: any map-style Dataset of (image, label), made by a function that a setting names.

    def photos(split, data_dir=None):           # --data my_package.data:photos
        return MyDataset(data_dir, split)       # split: train or test

An image is a PIL image or a tensor, (H, W) or (C, H, W) with C of 1 or 3: uint8, or float of 0 to 1. Labels are whole
numbers from 0. Where the data set has `targets` it is not read for its labels; `classes` are their names; `flips` of
False says that a mirrored image no longer shows its class; a `version` tells apart what nothing else does.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hvfreeze.data.sources import PixelArray, picture_of, sized_pixels, to_rgb
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.named_code import call, code_sha256, told

PROBES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetSource:
    """The images of a map-style Dataset, asked for one at a time: nothing says that it may be read by two threads."""

    name: str
    dataset: Any
    image_shape: tuple[int, int, int]
    """(C, H, W) of every decoded image."""
    side: int | None
    """The centre square is resized to this side; None accepts images of `image_shape` only."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image.

        Raises:
            RefusedError: the data set fails, or gives no image.
            UsageError: the image has another size than the others and no --image-size was given.
        """
        with self._lock:
            rgb = picture(self.name, self.dataset, row)
        place = f"--data ({self.name}): sample {row}"
        return sized_pixels(rgb, side=self.side, image_shape=self.image_shape, place=place)

    def identity(self, *, local: bool) -> str:
        """Return a digest of the code, of `PROBES` images that lie evenly in the set, and of its `version`."""
        digest = hashlib.sha256(f"{self.name} {code_sha256('data', self.name)} {self.image_shape} {self.side}".encode())
        digest.update(f"{len(self.dataset)} {getattr(self.dataset, 'version', '')}".encode())
        for row in np.unique(np.linspace(0, len(self.dataset) - 1, PROBES).astype(int)).tolist():
            digest.update(self.decode(row).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class OwnSplit:
    """One split of a data set of the user's own."""

    source: DatasetSource
    labels: list[int]
    classes: tuple[str, ...] | None
    flips: bool


def open_own(name: str, directory: str | None, *, image_size: int | None) -> dict[str, OwnSplit]:
    """Return the splits `train` and `test` that the function `name` makes.

    Raises:
        UsageError: there is no such function, or it fails.
        RefusedError: what it makes is no data set of images with labels.
    """
    return {split: open_split(name, directory, split, image_size) for split in ("train", "test")}


def open_split(name: str, directory: str | None, split: str, image_size: int | None) -> OwnSplit:
    """Return one split; see `open_own`."""
    dataset = call("data", name, split=split, **({} if directory is None else {"data_dir": directory}))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or len(dataset) == 0:
        raise RefusedError(f"--data ({name}) must return a Dataset with a length above 0, not {type(dataset).__name__}")
    first = picture(name, dataset, 0)
    side = None if image_size is None else min(image_size, first.height, first.width)
    shape = (3, side or first.height, side or first.width)
    classes = getattr(dataset, "classes", None)
    return OwnSplit(
        source=DatasetSource(name=name, dataset=dataset, image_shape=shape, side=side),
        labels=labels_of(name, dataset),
        classes=None if classes is None else tuple(map(str, classes)),
        flips=bool(getattr(dataset, "flips", True)),
    )


def labels_of(name: str, dataset: Any) -> list[int]:
    """Return every sample's label.

    Raises:
        RefusedError: one is no whole number from 0.
    """
    targets = getattr(dataset, "targets", None)
    known = targets if targets is not None and len(targets) == len(dataset) else None
    labels = []
    for row in range(len(dataset)):
        label = known[row] if known is not None else sample(name, dataset, row)[1]
        whole = label.item() if isinstance(label, (Tensor, np.generic)) else label
        if type(whole) is not int or whole < 0:
            raise RefusedError(f"--data ({name}): the label of sample {row} ({label!r}) must be a whole number from 0")
        labels.append(whole)
    return labels


def sample(name: str, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return the image and the label of a sample.

    Raises:
        RefusedError: the data set fails, or gives something else.
    """
    try:
        image, label = dataset[row][:2]
    except HvfreezeError:
        raise
    except Exception as error:  # the user's data set may fail in any way
        raise RefusedError(f"--data ({name}): sample {row} cannot be read as (image, label): {told(error)}") from error
    return image, label


def picture(name: str, dataset: Any, row: int) -> Image.Image:
    """Return a sample's image in RGB.

    Raises:
        RefusedError: it is none, or its numbers have no known range.
    """
    image = sample(name, dataset, row)[0]
    try:
        if isinstance(image, Tensor) and image.is_floating_point():
            if not (float(image.min()) >= 0 and float(image.max()) <= 1):
                raise ValueError("its numbers are not in 0..1; give images that are not normalised yet")
            image = image.mul(255).round().to(torch.uint8)
        return to_rgb(image if isinstance(image, Image.Image) else picture_of(image))
    except ValueError as error:
        raise RefusedError(f"--data ({name}): the image of sample {row} cannot be used: {error}") from error
