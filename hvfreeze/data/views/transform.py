"""From stored pixels to what the model sees: a function of data seed, sample and view, whatever the batch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.nn import functional

from hvfreeze.data.draws import Bits, Ids, draw, two_below
from hvfreeze.data.sets.image_set import ImageSet
from hvfreeze.data.views.augment import Augment
from hvfreeze.data.views.recipes import recoloured, resized_crops, version

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
    """What a view is made by; see `config.rules.parse_recipe`."""

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
            other = torch.from_numpy(views % 2 == 1)[:, None, None, None]
            return self.clean(torch.where(other, pixels.flip(3), pixels))
        seeds = draw("resize", self.data_seed, ids, views)
        cropped = self._cropped(pixels, ids=ids, views=views, seeds=seeds)
        if self.flips:
            sides = (draw("flip", self.data_seed, ids) & np.uint64(1)).astype(np.int64)
            flipped = np.flatnonzero((sides + views) % 2)
            cropped[flipped] = cropped[flipped][..., ::-1]
        shown = recoloured(torch.from_numpy(cropped), self.recipe, seeds=draw("colour", self.data_seed, ids, views))
        return self._normalised(shown)

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


def seen_shape(image_shape: tuple[int, int, int], image_size: int | None) -> tuple[int, int, int]:
    """Return (C, H, W) of an image as a model sees it, resized to `image_size` where that is given."""
    channels, height, width = image_shape
    return channels, image_size or height, image_size or width


def transform_for(
    image_set: ImageSet,
    *,
    augment: Augment,
    data_seed: int,
    image_size: int | None,
    recipe: tuple[str, ...] = ("crop",),
    statistics: Statistics | None = None,
) -> Transform:
    """Return a data set's transform, whose views are flipped where a mirrored image still shows its class.

    Crops are taken from a black border of an eighth of the side, or where stored pixels are larger than the images from
    these. `statistics` are mean and standard deviation to normalise with; None is the data set's own.
    """
    _, height, width = image_set.image_shape
    larger = image_size is not None and min(height, width) > image_size
    mean, std = statistics or (image_set.mean, image_set.std)
    return Transform(
        data_seed=data_seed,
        augment=augment,
        pad=0 if larger else min(height, width) // 8,
        flips=image_set.flips,
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
