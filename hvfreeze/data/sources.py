"""Where pixels come from: arrays in memory, or image files. A sample's row is its id."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hvfreeze.errors import RefusedError, UsageError

PixelArray = NDArray[np.uint8]

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySource:
    """Images that are in memory already."""

    pixels: PixelArray
    """(N, 3, H, W)."""
    side: int | None
    """The centre square is resized to this side; None keeps the pixels as they are."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every decoded image."""
        _, channels, height, width = self.pixels.shape
        return (channels, self.side or height, self.side or width)

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image."""
        if self.image_shape == self.pixels.shape[1:]:
            kept: PixelArray = self.pixels[row]
            return kept
        assert self.side is not None
        return to_pixels(fitted(Image.fromarray(self.pixels[row].transpose(1, 2, 0)), self.side, self.side))

    def identity(self, *, local: bool) -> str:
        """Return a digest of all pixels; `local` makes no difference, since arrays carry no file times."""
        header = f"{self.pixels.shape} {self.side} {PIL.__version__ if self.side else ''}"
        return hashlib.sha256(
            header.encode() + hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()
        ).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource:
    """Image files, decoded when asked for. Grey and RGBA images become RGB."""

    root: Path
    paths: tuple[str, ...]
    """Relative to `root`, sorted as bytes."""
    image_shape: tuple[int, int, int]
    """(C, H, W) of every decoded image."""
    side: int | None
    """The centre square of every image is resized to this side; None accepts images of `image_shape` only."""
    num_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The size of each file."""
    local: str = ""
    """A digest of when each file was changed on this machine."""

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image.

        Raises:
            RefusedError: The file cannot be read or is not an intact image; names it.
            UsageError: The image has another size than the others and no --image-size was given; names it.
        """
        # No Path: to make one costs a tenth of decoding a small image.
        path = os.path.join(self.root, self.paths[row])
        return sized_pixels(read_rgb(path), side=self.side, image_shape=self.image_shape, place=path)

    def identity(self, *, local: bool) -> str:
        """Return a digest of every file's path and size and, when `local`, time of change, as they were listed."""
        header = f"{self.image_shape} {self.side} {PIL.__version__} {self.local if local else ''}"
        return hashlib.sha256(f"{header} {digest_of_files(self.paths, self.num_bytes)}".encode()).hexdigest()


def digest_of_files(paths: Sequence[str], num_bytes: NDArray[np.int64]) -> str:
    """Return the SHA-256 over paths and sizes of files, as hex."""
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, paths)))
    digest.update(num_bytes.astype("<i8").tobytes())
    return digest.hexdigest()


def open_image(path: str | Path) -> Image.Image:
    """Return an image of which only the header has been read; the caller closes it.

    Raises:
        RefusedError: The file cannot be read or is not an image; names it.
    """
    try:
        return Image.open(path)
    except UnidentifiedImageError as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error
    except Exception as error:
        raise _damaged(path, error) from error


def read_rgb(path: str | Path) -> Image.Image:
    """Return a decoded image file; grey, palettes and transparency become RGB.

    Raises:
        RefusedError: the file cannot be read or is not an intact image; names it.
    """
    with open_image(path) as image:
        try:
            return to_rgb(image)
        # Pillow's decoders raise errors of many kinds on damaged files.
        except Exception as error:
            raise _damaged(path, error) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in 8-bit RGB, itself where it is that.

    Raises:
        ValueError: the range of its pixels is not known.
    """
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit grey to 255 instead of scaling it.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range; convert it to 8 bits")
    # Straight to RGB, Pillow warns of palettes with transparency.
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def picture_of(pixels: Tensor) -> Image.Image:
    """Return a (H, W) or (C, H, W) uint8 tensor, C of 1 or 3, as a picture.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
        found = pixels.dtype if isinstance(pixels, Tensor) else type(pixels).__name__
        raise ValueError(f"a PIL image or a uint8 tensor is needed, not {found}")
    if pixels.ndim == 3 and pixels.shape[0] == 3:
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    if pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[0] == 1):
        return Image.fromarray(pixels.reshape(pixels.shape[-2:]).contiguous().numpy())
    raise ValueError(f"a tensor of shape {tuple(pixels.shape)} is no image; (H, W), (1, H, W) or (3, H, W) is")


def fitted(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the largest centred part of these proportions, a square where both are equal, in this size (bilinear).

    That is the image itself where it has this size.
    """
    if (image.height, image.width) == (height, width):
        return image
    part_width = min(image.width, max(1, image.height * width // height))
    part_height = min(image.height, max(1, image.width * height // width))
    left, top = (image.width - part_width) // 2, (image.height - part_height) // 2
    box = (left, top, left + part_width, top + part_height)
    if (part_height, part_width) == (height, width):
        return image.crop(box)
    return image.resize((width, height), Image.Resampling.BILINEAR, box=box)


def sized_pixels(image: Image.Image, *, side: int | None, image_shape: tuple[int, int, int], place: str) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8, its centre square at `side` where that is given.

    Raises:
        UsageError: none is given, and the image is not of `image_shape`; names its place.
    """
    if side is not None:
        return to_pixels(fitted(image, side, side))
    if (3, image.height, image.width) != image_shape:
        _, height, width = image_shape
        raise UsageError(
            f"{place} has {image.width}x{image.height} pixels where others have {width}x{height}; "
            "give --image-size SIDE to bring all images to one size"
        )
    return to_pixels(image)


def to_pixels(image: Image.Image) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def unreadable(path: str | Path, error: OSError) -> RefusedError:
    """Return the refusal of a file or folder that the operating system does not let us read."""
    return RefusedError(f"{path} cannot be read ({error.strerror}); check --data-dir and the permissions")


def _damaged(path: str | Path, error: Exception) -> RefusedError:
    reason = " ".join(str(error).replace(str(path), "the file").split())
    return RefusedError(f"{path} is not an intact image ({reason}); restore or remove it")
