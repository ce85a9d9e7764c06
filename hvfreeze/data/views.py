"""Views of samples: which ones an epoch shows, and each view's pixels as a function of data seed, sample and view."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.settings import parse_views
from hvfreeze.data.shards import Bits, Ids, draw, two_below
from hvfreeze.torchvision_shim import torchvision


@dataclass(frozen=True)
class Augment:
    """Which views of a sample the epochs of a run show."""

    kind: str
    """`none`, `fresh`, `views`, or `mirrored`: the sample is view 0 and its mirror image view 1."""
    num_views: int
    """Distinct views of a sample; 0 means a new one every epoch, which no cache can hold."""

    def __str__(self) -> str:
        return f"views:{self.num_views}" if self.kind == "views" else self.kind

    def view_of(self, ids: Ids, *, epoch: int, data_seed: int) -> Ids:
        """Return the (B,) int64 views that `epoch` shows of the (B,) samples `ids`.

        `none`: always 0. `fresh`: the epoch. `views:K`, and `mirrored` as 2 views: (offset(data seed, sample) + epoch)
        mod K, so that K epochs show every view once and each epoch mixes all views.
        """
        if self.kind == "none":
            return np.zeros(len(ids), dtype=np.int64)
        if self.kind == "fresh":
            return np.full(len(ids), epoch, dtype=np.int64)
        offset, _ = two_below(draw("offset", data_seed, ids), self.num_views)
        return (offset + epoch) % self.num_views


MIRRORED = Augment("mirrored", 2)


def parse_augment(text: str) -> Augment:
    """Return the meaning of an --augment value.

    Raises UsageError where it is not `none`, `fresh` or `views:K` with K from 1 to 65536.
    """
    return Augment(*parse_views(text))


JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
"""The usual strengths, as in SimCLR and torchvision's own examples."""
COLOURS = ("trivial-augment", "color-jitter")
"""What is done to the pixels of a crop, in this order."""

TRANSFORMS = "torchvision.transforms.v2"
"""Imported where a recipe needs it: it loads torch's compiler, which takes longer than to import torch."""


def version() -> str:
    """Return torchvision's version, on which the pixels of these transforms depend."""
    return str(torchvision.__version__)


def resized_crops(pixels: Tensor, *, seeds: Bits, height: int, width: int) -> Tensor:
    """Return for each of (B, C, H, W) uint8 a part of 8 % to 100 % of its area in another size, (B, C, height, width).

    Proportions vary between 3:4 and 4:3. Row i depends on `pixels[i]` and `seeds[i]` alone.
    """
    v2 = importlib.import_module(TRANSFORMS)
    return each(v2.RandomResizedCrop((height, width), antialias=True), pixels, seeds)


def recoloured(pixels: Tensor, names: tuple[str, ...], *, seeds: Bits) -> Tensor:
    """Return (B, C, H, W) uint8 after the transforms of `COLOURS` that `names` has; row i depends on its seed alone."""
    if not set(names) & set(COLOURS):
        return pixels
    v2 = importlib.import_module(TRANSFORMS)
    known = {"trivial-augment": v2.TrivialAugmentWide, "color-jitter": lambda: v2.ColorJitter(**JITTER)}
    return each(v2.Compose([known[name]() for name in COLOURS if name in names]), pixels, seeds)


def each(transform: Callable[[Tensor], Any], pixels: Tensor, seeds: Bits) -> Tensor:
    """Return every row transformed with a generator that starts at its own seed; the run's generator stays as it is."""
    rows = []
    with torch.random.fork_rng(devices=[]):
        for row, seed in zip(pixels, seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed >> 1)
            rows.append(transform(row))
    return torch.stack(rows) if rows else pixels


Triple = tuple[float, float, float]
Statistics = tuple[Triple, Triple]
"""Mean and standard deviation of each channel, of pixels scaled to 0-1."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """From stored pixels to the float batch that the model sees."""

    data_seed: int
    augment: Augment
    pad: int
    """Pixels of black border from which the crop is drawn, on every side."""
    flips: bool
    mean: tuple[float, float, float]
    """Per channel, of pixels scaled to 0-1."""
    std: tuple[float, float, float]
    image_size: int | None
    """Side to which smaller stored pixels are enlarged after normalisation; None keeps theirs."""
    cropped_to: int | None = None
    """Side of the square that is cut out of the stored pixels, from their centre where nothing is augmented."""
    recipe: tuple[str, ...] = ("crop",)
    """What a view is made by; see `data.settings.parse_recipe`."""

    def __call__(self, pixels: Tensor, *, ids: Ids, views: Ids) -> Tensor:
        """Return the given views: cropped as the recipe says, flipped, recoloured, normalised, enlarged.

        Consecutive views of a sample alternate between flipped and not, so that two views cover both sides exactly.

        Args:
            pixels: (B, C, H, W) uint8.
            ids: (B,) int64; row i of `pixels` is sample ids[i].
            views: (B,) int64 from `Augment.view_of`.

        Returns:
            (B, C, S, S) float32, or (B, C, H, W) when `image_size` is None. Row i depends on nothing but `pixels[i]`,
            `ids[i]` and `views[i]`.
        """
        if self.augment.kind == "none":
            return self.clean(pixels)
        if self.augment.kind == "mirrored":
            other = torch.from_numpy(self.mirrored(ids, views))[:, None, None, None]
            return self.clean(torch.where(other, pixels.flip(3), pixels))
        seeds = draw("resize", self.data_seed, ids, views)
        cropped = self._cropped(pixels, ids=ids, views=views, seeds=seeds)
        flipped = np.flatnonzero(self.mirrored(ids, views))
        cropped[flipped] = cropped[flipped][..., ::-1]
        shown = recoloured(torch.from_numpy(cropped), self.recipe, seeds=draw("colour", self.data_seed, ids, views))
        return self._normalised(shown)

    def mirrored(self, ids: Ids, views: Ids) -> NDArray[np.bool_]:
        """Return (B,), for each view of a sample whether it shows the mirror image."""
        sides = np.zeros(len(ids), dtype=np.int64)
        if self.augment.kind != "mirrored":
            if self.augment.kind == "none" or not self.flips:
                return sides.astype(np.bool_)
            sides = (draw("flip", self.data_seed, ids) & np.uint64(1)).astype(np.int64)
        return ((sides + views) % 2).astype(np.bool_)

    def clean(self, pixels: Tensor) -> Tensor:
        """Return the (B, C, H, W) uint8 pixels, their centre where that is cut out, normalised and enlarged.

        The result is float32, without augmentation.
        """
        side = self.cropped_to
        if side is not None:
            top, left = ((length - side) // 2 for length in pixels.shape[2:])
            pixels = pixels[:, :, top : top + side, left : left + side]
        return self._normalised(pixels)

    def _cropped(self, pixels: Tensor, *, ids: Ids, views: Ids, seeds: Bits) -> np.ndarray:
        height, width = (self.cropped_to or length for length in pixels.shape[2:])
        if "random-resized-crop" in self.recipe:
            return resized_crops(pixels, seeds=seeds, height=height, width=width).numpy()
        down, across = (length - side + 2 * self.pad for length, side in zip(pixels.shape[2:], (height, width)))
        assert down == across, "the crops of a square, or of pixels in a border"
        rows, columns = two_below(draw("crop", self.data_seed, ids, views), down + 1)
        return _crop(pixels.numpy(), pad=self.pad, height=height, width=width, rows=rows, columns=columns)

    def _normalised(self, pixels: Tensor) -> Tensor:
        scale = torch.tensor([1 / (255 * std) for std in self.std]).view(-1, 1, 1)
        shift = torch.tensor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)]).view(-1, 1, 1)
        batch = pixels.to(torch.float32).mul_(scale).add_(shift)
        if self.image_size is None or batch.shape[-2:] == (self.image_size, self.image_size):
            return batch
        return functional.interpolate(batch, size=(self.image_size, self.image_size), mode="bilinear")

    def identity(self) -> str:
        """Return everything that, beside the stored pixels, determines a view: equal texts mean equal bits."""
        library = version() if self.recipe != ("crop",) else ""
        return json.dumps({"version": 2, "torchvision": library, **asdict(self)}, sort_keys=True)


def seen_shape(image_shape: tuple[int, ...], image_size: int | None) -> tuple[int, ...]:
    """Return (C, H, W) of an image as a model sees it, resized to `image_size` where that is given.

    A window of a text, (T,), is seen as it is.
    """
    if len(image_shape) == 1:
        return image_shape
    channels, height, width = image_shape
    return channels, image_size or height, image_size or width


def blank(shape: tuple[int, ...], *, rows: int) -> Tensor:
    """Return a batch of black images of (C, H, W), or of windows of T times the first character, as a model sees it."""
    if len(shape) == 1:
        return torch.zeros(rows, *shape, dtype=torch.int64)
    return torch.zeros(rows, *shape).contiguous(memory_format=torch.channels_last)


def transform_for(
    image_set: ImageSet,
    *,
    augment: Augment,
    data_seed: int,
    image_size: int | None,
    recipe: tuple[str, ...] = ("crop",),
    statistics: Statistics | None = None,
    mirrors: bool | None = None,
) -> Transform:
    """Return a data set's transform, half of whose views are flipped where `mirrors` says so, or by default the data.

    Crops are taken from a black border of an eighth of the side, or where stored pixels are larger than the images from
    these. `statistics` are mean and standard deviation to normalise with; None is the data set's own.
    """
    _, height, width = image_set.image_shape
    larger = image_size is not None and min(height, width) > image_size
    if recipe != ("crop",):
        # Here, and not in a step whose time is measured.
        importlib.import_module(TRANSFORMS)
    mean, std = statistics or (image_set.mean, image_set.std)
    return Transform(
        data_seed=data_seed,
        augment=augment,
        pad=0 if larger else min(height, width) // 8,
        flips=image_set.flips if mirrors is None else mirrors,
        mean=mean,
        std=std,
        image_size=image_size,
        cropped_to=image_size if larger else None,
        recipe=recipe,
    )


def _crop(pixels: np.ndarray, *, pad: int, height: int, width: int, rows: Ids, columns: Ids) -> np.ndarray:
    batch, channels, tall, wide = pixels.shape
    padded = np.zeros((batch, channels, tall + 2 * pad, wide + 2 * pad), dtype=np.uint8)
    padded[:, :, pad : pad + tall, pad : pad + wide] = pixels
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    return np.ascontiguousarray(windows[np.arange(batch), :, rows, columns])
