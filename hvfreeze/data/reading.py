"""One image: opened, turned upright, in 8-bit RGB of a size; refused by name where it is damaged."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hvfreeze.errors import RefusedError, UsageError

PixelArray = NDArray[np.uint8]
READING = 2
"""How images become pixels. 1: as they are stored, and 16-bit grey by its upper 8 bits. 2: turned as their EXIF
orientation says, and 16-bit grey by the 8 bits below the highest that the image uses."""
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image upright, by its EXIF orientation."""
PNG_TEXTS = b"eXIf", b"iTXt", b"tEXt", b"zTXt"
"""The pieces of a PNG file that may tell an orientation."""
MODES_OF_16_BITS = "I;16"


class UnknownRangeError(ValueError):
    """Pixels are numbers of which nobody says what is black and what is white."""


def open_image(path: str | Path) -> Image.Image:
    """Return an image of which only the header has been read; the caller closes it.

    Raises RefusedError, which names it, where the file cannot be read or is not an image.
    """
    try:
        # Opening a pipe would wait for whoever writes to it, for ever where nobody does.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no plain file")
        return Image.open(path)
    except UnidentifiedImageError as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error
    except Exception as error:
        raise _damaged(path, error) from error


def read_rgb(path: str | Path, *, reading: int = READING) -> Image.Image:
    """Return a decoded image file; grey, palettes and transparency become RGB.

    Raises RefusedError, which names it, where the file cannot be read, is not an intact image, or holds pixels whose
    range is not known.
    """
    with open_image(path) as image:
        try:
            return to_rgb(image, reading=reading)
        except UnknownRangeError as error:
            raise RefusedError(f"{path} cannot be used: {error}") from error
        # Pillow's decoders raise errors of many kinds on damaged files.
        except Exception as error:
            raise _damaged(path, error) from error


def to_rgb(image: Image.Image, *, reading: int = READING) -> Image.Image:
    """Return an image in 8-bit RGB, turned as `READING` says; itself where it is that.

    Raises UnknownRangeError where the range of its pixels is not known.
    """
    # What a PNG file says of itself may come behind its pixels.
    image.load()
    turn = turn_of(image) if reading > 1 else None
    rgb = _in_rgb(image, reading=reading)
    return rgb if turn is None else rgb.transpose(turn)


def _in_rgb(image: Image.Image, *, reading: int) -> Image.Image:
    if image.mode.startswith(MODES_OF_16_BITS):
        # Pillow clips 16-bit grey to 255 instead of scaling it.
        grey = np.asarray(image)
        unused = 8 if reading == 1 else max(0, bits_used(grey) - 8)
        return Image.fromarray((grey >> unused).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F"):
        raise UnknownRangeError(f"pixels of mode {image.mode} have no known range, convert it to 8 bits")
    # Straight to RGB, Pillow warns of palettes with transparency.
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def bits_used(grey: NDArray[np.uint16]) -> int:
    """Return how many bits the largest value has."""
    return int(grey.max()).bit_length()


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return what brings an image upright by its EXIF orientation; None where it is, or nothing says that it is not."""
    if image.format == "TIFF":
        # Pillow turns TIFF itself.
        return None
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    # Damaged EXIF data, on which Pillow raises errors of many kinds, says nothing.
    except Exception:
        return None


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of an image file that was only opened, as it is when it stands upright."""
    sideways = turn_in_header(image) in (TURNS[5], TURNS[6], TURNS[7], TURNS[8])
    return (image.width, image.height) if sideways else (image.height, image.width)


def turn_in_header(image: Image.Image) -> Image.Transpose | None:
    """Return `turn_of` an image file that was only opened, of which pixels are decoded only where nothing else tells.

    That is a PNG file with texts behind its pixels.
    """
    if image.format == "PNG" and "exif" not in image.info:
        with open(image.filename, "rb") as file:  # type: ignore[attr-defined]  # it was opened from a file
            content = file.read()
        if not any(chunk in content for chunk in PNG_TEXTS):
            return None
    return turn_of(image)


def picture_of(pixels: Tensor) -> Image.Image:
    """Return a (H, W) or (C, H, W) uint8 tensor, C of 1 or 3, as a picture.

    Raises ValueError where it is something else.
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


def one_shape(
    sizes: Mapping[tuple[int, int], str], image_size: int | None, *, told: str = ""
) -> tuple[tuple[int, int, int], int | None]:
    """Return the (C, H, W) of all decoded images, and the side of their squares, None where they keep their size.

    `sizes` are the distinct (height, width) of some, each with the place of one. Squares have the side `image_size`, or
    the shorter side of the images where that is smaller. Raises UsageError, which begins with `told`, where images
    differ in size and `image_size` is None.
    """
    if image_size is None and len(sizes) > 1:
        shown = " and ".join(f"{place} ({width}x{height})" for (height, width), place in list(sizes.items())[:2])
        raise UsageError(f"{told}images differ in size: {shown}; give --image-size SIDE to bring all to one size")
    side = None if image_size is None else min(image_size, max(min(size) for size in sizes))
    return (3, side, side) if side else (3, *next(iter(sizes))), side


def sized_pixels(image: Image.Image, *, side: int | None, image_shape: tuple[int, int, int], place: str) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8, its centre square at `side` where that is given.

    Raises UsageError where none is given, and the image is not of `image_shape`; names its place.
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
