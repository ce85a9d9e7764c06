"""How an image becomes what a model sees: the very pixels that the run was evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from hvfreeze.data.sources import PixelArray, fitted, picture_of, read_rgb, to_pixels, to_rgb
from hvfreeze.data.views.augment import Augment
from hvfreeze.data.views.transform import Transform, Triple
from hvfreeze.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """From an image of any size to a normalised float tensor, without augmentation.

    Called with a PIL image or a uint8 tensor, (H, W), (C, H, W) or (N, C, H, W) with C of 1 or 3, it returns
    (3, S, S) or (N, 3, S, S) float32. Raises UsageError for anything else.
    """

    height: int
    width: int
    """Pixels to which the largest centred part of these proportions is resized (bilinear)."""
    cropped_to: int | None
    """Side of the square that is cut out of the centre of that; None takes all of it."""
    enlarged_to: int | None
    """Side in pixels to which that is enlarged after normalisation (bilinear); None leaves it."""
    mean: Triple
    """Per channel, of pixels scaled to 0-1."""
    std: Triple

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return the image, or each of the images, as the model sees it."""
        if isinstance(image, Tensor) and image.ndim == 4:
            return self.normalised(torch.stack([torch.from_numpy(self.pixels(each)) for each in image]))
        return self.normalised(torch.from_numpy(self.pixels(image))[None])[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the model sees."""
        side = self.enlarged_to or self.cropped_to
        return (3, side or self.height, side or self.width)

    def pixels(self, image: Image.Image | Tensor) -> PixelArray:
        """Return (3, height, width) uint8.

        Raises:
            UsageError: it is no image whose pixels have a known range.
        """
        try:
            rgb = to_rgb(image if isinstance(image, Image.Image) else picture_of(image))
        except ValueError as error:
            raise UsageError(f"the image cannot be used: {error}") from error
        return to_pixels(fitted(rgb, self.height, self.width))

    def pixels_of(self, path: Path) -> PixelArray:
        """Return an image file's (3, height, width) uint8.

        Raises:
            RefusedError: the file cannot be read or is not an intact image; names it.
        """
        return to_pixels(fitted(read_rgb(path), self.height, self.width))

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return (N, 3, S, S) float32, channels last, of (N, 3, height, width) uint8."""
        return self._transform.clean(pixels).contiguous(memory_format=torch.channels_last)

    @cached_property
    def _transform(self) -> Transform:
        return Transform(
            data_seed=0,
            augment=Augment("none", 1),
            pad=0,
            flips=False,
            mean=self.mean,
            std=self.std,
            image_size=self.enlarged_to,
            cropped_to=self.cropped_to,
        )
