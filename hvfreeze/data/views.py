"""Augmented views: the view of each epoch, and its pixels as a function of data seed, sample and view."""

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

from hvfreeze.config.data import parse_views
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.shards import Bits, Ids, draw, two_below


@dataclass(frozen=True)
class Augment:
    """The augmentation of a run: the view of a sample in each epoch."""

    kind: str
    """`none`, `fresh`, `views`, or `mirrored`: view 0 is the sample, view 1 its horizontal flip."""
    num_views: int
    """Number of distinct views per sample; 0 is a new view every epoch, which cannot be cached."""

    def __str__(self) -> str:
        return f"views:{self.num_views}" if self.kind == "views" else self.kind

    def view_of(self, ids: Ids, *, epoch: int, data_seed: int) -> Ids:
        """Return the views of the (B,) samples `ids` in `epoch`, (B,) int64.

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
    """Parse an --augment value.

    Raises:
        UsageError: it is not `none`, `fresh` or `views:K` with K from 1 to 65536.
    """
    return Augment(*parse_views(text))


JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
"""Strengths of the colour jitter, as in SimCLR and torchvision's examples."""
COLOURS = ("trivial-augment", "color-jitter")
"""Colour transforms of a crop, in this order."""

TRANSFORMS = "torchvision.transforms.v2"
"""Module of torchvision's transforms."""


def _torchvision() -> Any:
    """Import torchvision, on demand: it takes longer than torch, and `hvfreeze predict` decodes images meanwhile."""
    from hvfreeze.torchvision_shim import torchvision

    return torchvision


def _transforms() -> Any:
    _torchvision()
    return importlib.import_module(TRANSFORMS)


def resized_crops(pixels: Tensor, *, seeds: Bits, height: int, width: int) -> Tensor:
    """Return random crops of (B, C, H, W) uint8, resized to (B, C, height, width).

    Crops have 8 % to 100 % of the area and proportions between 3:4 and 4:3. Row i depends on `pixels[i]` and `seeds[i]`
    alone.
    """
    v2 = _transforms()
    return each(v2.RandomResizedCrop((height, width), antialias=True), pixels, seeds)


def recoloured(pixels: Tensor, names: tuple[str, ...], *, seeds: Bits) -> Tensor:
    """Apply the transforms `names` of `COLOURS` to (B, C, H, W) uint8; row i depends on its seed alone."""
    if not set(names) & set(COLOURS):
        return pixels
    v2 = _transforms()
    known = {"trivial-augment": v2.TrivialAugmentWide, "color-jitter": lambda: v2.ColorJitter(**JITTER)}
    return each(v2.Compose([known[name]() for name in COLOURS if name in names]), pixels, seeds)


def each(transform: Callable[[Tensor], Any], pixels: Tensor, seeds: Bits) -> Tensor:
    """Transform each row with a generator of its own seed; the global generator is unchanged."""
    rows = []
    with torch.random.fork_rng(devices=[]):
        for row, seed in zip(pixels, seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed >> 1)
            rows.append(transform(row))
    return torch.stack(rows) if rows else pixels


Triple = tuple[float, float, float]
Statistics = tuple[Triple, Triple]
"""Mean and standard deviation per channel, for pixels scaled to 0-1."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """The transform from stored pixels to the model's float input."""

    data_seed: int
    augment: Augment
    pad: int
    """Width of the black border around the image for random crops, in pixels."""
    flips: bool
    mean: tuple[float, float, float]
    """Mean per channel, for pixels scaled to 0-1."""
    std: tuple[float, float, float]
    image_size: int | None
    """Side in pixels to which smaller images are enlarged after normalisation; None keeps their size."""
    cropped_to: int | None = None
    """Side of the crop in pixels; without augmentation it is the centre crop."""
    recipe: tuple[str, ...] = ("crop",)
    """Augmentation steps of a view; see `config.data.parse_recipe`."""

    def __call__(self, pixels: Tensor, *, ids: Ids, views: Ids) -> Tensor:
        """Return the given views: cropped by the recipe, flipped, recoloured, normalised and enlarged.

        Consecutive views alternate between original and flipped, so two views cover both.

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
        """Return a mask of the flipped views, (B,)."""
        sides = np.zeros(len(ids), dtype=np.int64)
        if self.augment.kind != "mirrored":
            if self.augment.kind == "none" or not self.flips:
                return sides.astype(np.bool_)
            sides = (draw("flip", self.data_seed, ids) & np.uint64(1)).astype(np.int64)
        return ((sides + views) % 2).astype(np.bool_)

    def clean(self, pixels: Tensor) -> Tensor:
        """Transform (B, C, H, W) uint8 pixels without augmentation: centre crop, normalise and enlarge.

        The result is float32.
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
        assert down == across, "random crops of a square or of a padded image"
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
        """Return a text that determines the views of given pixels: equal texts give equal bits."""
        library = str(_torchvision().__version__) if self.recipe != ("crop",) else ""
        return json.dumps({"version": 2, "torchvision": library, **asdict(self)}, sort_keys=True)


def seen_shape(image_shape: tuple[int, ...], image_size: int | None) -> tuple[int, ...]:
    """Return the shape of a model's input: (C, H, W), resized to `image_size` if that is given.

    The shape of a window of text, (T,), is unchanged.
    """
    if len(image_shape) == 1:
        return image_shape
    channels, height, width = image_shape
    return channels, image_size or height, image_size or width


def blank(shape: tuple[int, ...], *, rows: int) -> Tensor:
    """Return a batch of black images, (C, H, W), or of windows of the first character, as model input."""
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
    """Return a dataset's transform. With `mirrors`, half of the views are flipped; None takes the dataset's `flips`.

    Crops come from the image with a black border of an eighth of its side, or from larger stored pixels. `statistics`
    are the mean and standard deviation for normalisation; None takes the dataset's.
    """
    _, height, width = image_set.image_shape
    larger = image_size is not None and min(height, width) > image_size
    if recipe != ("crop",):
        # Here rather than in a timed step.
        _transforms()
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
