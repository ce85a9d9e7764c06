"""Augmentation as a function of data seed, sample id and view: the same pixels on every rank and in every batch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.nn import functional

from hvfreeze.config.rules import parse_views
from hvfreeze.data.datasets import ImageSet
from hvfreeze.data.draws import Ids, draw, two_below


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
        """Returns the (B,) int64 views that `epoch` shows of the (B,) samples `ids`.

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

    Raises:
        UsageError: it is not `none`, `fresh` or `views:K` with K from 1 to 65536.
    """
    return Augment(*parse_views(text))


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

    def __call__(self, pixels: Tensor, *, ids: Ids, views: Ids) -> Tensor:
        """Returns the given views: cropped out of a black border, flipped, normalised, enlarged.

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
        rows, columns = two_below(draw("crop", self.data_seed, ids, views), 2 * self.pad + 1)
        cropped = _crop(pixels.numpy(), pad=self.pad, rows=rows, columns=columns)
        if self.flips:
            sides = (draw("flip", self.data_seed, ids) & np.uint64(1)).astype(np.int64)
            flipped = np.flatnonzero((sides + views) % 2)
            cropped[flipped] = cropped[flipped][..., ::-1]
        return self.clean(torch.from_numpy(cropped))

    def clean(self, pixels: Tensor) -> Tensor:
        """Returns the (B, C, H, W) uint8 pixels normalised and enlarged as float32, without augmentation."""
        scale = torch.tensor([1 / (255 * std) for std in self.std]).view(-1, 1, 1)
        shift = torch.tensor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)]).view(-1, 1, 1)
        batch = pixels.to(torch.float32).mul_(scale).add_(shift)
        if self.image_size is None or batch.shape[-2:] == (self.image_size, self.image_size):
            return batch
        return functional.interpolate(batch, size=(self.image_size, self.image_size), mode="bilinear")

    def identity(self) -> str:
        """Returns everything that, beside the stored pixels, determines a view: equal texts mean equal bits."""
        return json.dumps({"version": 1, **asdict(self)}, sort_keys=True)


def transform_for(image_set: ImageSet, *, augment: Augment, data_seed: int, image_size: int | None) -> Transform:
    """Returns a data set's transform: crops from a border of an eighth of the side, and flips where they make sense."""
    _, height, width = image_set.image_shape
    return Transform(
        data_seed=data_seed,
        augment=augment,
        pad=min(height, width) // 8,
        flips=image_set.flips,
        mean=image_set.mean,
        std=image_set.std,
        image_size=image_size,
    )


def _crop(pixels: np.ndarray, *, pad: int, rows: Ids, columns: Ids) -> np.ndarray:
    batch, channels, height, width = pixels.shape
    padded = np.zeros((batch, channels, height + 2 * pad, width + 2 * pad), dtype=np.uint8)
    padded[:, :, pad : pad + height, pad : pad + width] = pixels
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    return np.ascontiguousarray(windows[np.arange(batch), :, rows, columns])
