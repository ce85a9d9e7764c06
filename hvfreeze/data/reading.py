"""One image: opened, turned upright, in 8-bit RGB of a size; refused by name where it is damaged."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from hvfreeze.data.settings import DataConfig
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.user_code import HF, is_named_code
from hvfreeze.wording import plural

PixelArray = NDArray[np.uint8]
READING = 4
"""How images become pixels. 1: as they are stored, and 16-bit grey by its upper 8 bits. 2: turned as their EXIF
orientation says, and 16-bit grey by the 8 bits below the highest that the image uses. 3: also transparent parts in the
background's colour; before, they had the colours that the file happens to store for them. 4: large JPEG files are
decoded at a reduced scale, see `reduce`."""
Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the images of a data set, or of a model, are read and brought to one shape."""

    version: int = READING
    background: Colour = (255, 255, 255)
    """Behind transparent parts, and around images that are padded."""
    fit: str = "crop"
    """One of `data.settings.FITS`."""
    resample: str = "bilinear"
    """One of `data.settings.RESAMPLES`."""

    @property
    def filter(self) -> Image.Resampling:
        """How Pillow resizes images."""
        return Image.Resampling[self.resample.upper()]


def reading_of(data: DataConfig) -> Reading:
    """Return how a run's settings say that images are read.

    A Dataset decodes its images itself, whole; so must whoever applies the model.
    """
    version = 3 if is_named_code(data.data) or data.data.startswith(HF) else READING
    return Reading(version=version, background=data.background_colour(), fit=data.fit, resample=data.resample)


USUAL = Reading()
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
JPEG = ("JPEG", "MPO")
"""Formats whose decoder can reduce the scale."""
WHOLE_SIDE = 512
"""Side in pixels up to which images are always decoded whole."""
SPARE_FACTOR = 2
"""A reduced image keeps at least this many times the pixels a side that it is resized to."""
COLOUR_OF_16_BITS = re.compile("[A-Z]{2,4};16[BLN]")
"""How Pillow calls the channels in a file."""


LIMIT = "HVFREEZE_MAX_MEGAPIXELS"
"""The environment variable that raises the limit on an image's size, also of images that a user's code opens."""


class TooLargeError(RefusedError):
    """An image is intact, and larger than may be opened: it is never left out as a broken one."""


class UnknownRangeError(ValueError):
    """The range of an image's pixels is not known, or some of its channels are not colours."""


def allow_large_images() -> None:
    """Let Pillow open images as large as `LIMIT` says. Raises UsageError where that is no size."""
    text = os.environ.get(LIMIT, "")
    if not text:
        return
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UsageError(f"{LIMIT} ({text}) must be a whole number of megapixels, at least 1")
    # Pillow refuses what has more than twice as many.
    Image.MAX_IMAGE_PIXELS = int(text) * 500_000


def too_large(place: str, error: Exception) -> TooLargeError:
    """Return the refusal of an image that Pillow takes for a file made to fill the memory."""
    found = re.search(r"\((\d+) pixels\)", str(error))
    megapixels = int(found[1]) // 10**6 + 1 if found else 0
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6
    return TooLargeError(
        f"{place} is too large: {megapixels} megapixels, and the limit is {limit}; make it smaller, or set the "
        f"environment variable {LIMIT}={megapixels} on all ranks"
    )


def open_image(path: str | Path) -> Image.Image:
    """Return an image of which only the header has been read; the caller closes it.

    Raises RefusedError, which names it, where the file cannot be read, is not an image or is too large.
    """
    allow_large_images()
    try:
        # Opening a pipe would wait for whoever writes to it, for ever where nobody does.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no plain file")
        return with_8_bit_key(Image.open(path))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(str(path), error) from error
    except UnidentifiedImageError as error:
        unsupported = unsupported_kind(path)
        if unsupported:
            raise RefusedError(f"{path} {unsupported}") from error
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error
    except Exception as error:
        raise _damaged(path, error) from error


DICOM_OFFSET, DICOM = 128, b"DICM"
"""Where DICOM files have which bytes."""
DICOM_SUFFIXES = (".dcm", ".dicom")
CONVERT_DICOM = "convert DICOM files to PNG, for example with pydicom or dcmj2pnm"
SAMPLES_PER_PIXEL, EXTRA_SAMPLES = 277, 338
"""Tags of TIFF files."""


def unsupported_kind(path: str | Path) -> str:
    """Return what a file is that Pillow does not know, and what to do about it; nothing if that is not known."""
    with suppress(Exception), open(path, "rb") as file:
        head = file.read(DICOM_OFFSET + len(DICOM))
        if head[DICOM_OFFSET:] == DICOM:
            return f"is a DICOM file, which is not supported; {CONVERT_DICOM}"
        if head[:4] in (b"II*\0", b"MM\0*"):
            tags: Any = TiffImagePlugin.ImageFileDirectory_v2(head[:8])
            file.seek(tags.next)
            tags.load(file)
            if (channels := tags.get(SAMPLES_PER_PIXEL, 1)) > 3:
                return too_many_channels(channels)
    return ""


def too_many_channels(count: int) -> str:
    """Return why an image of so many channels is refused, and what to do about it."""
    return f"has {count} channels, and at most 3 are supported; save three of them as an RGB image"


def check_channels(image: Image.Image) -> None:
    """Raise UnknownRangeError for a TIFF file with channels beside red, green and blue that are not transparency.

    Pillow would leave them out.
    """
    tags: Any = getattr(image, "tag_v2", None) or {}
    extra = tags.get(EXTRA_SAMPLES, ()) if image.format == "TIFF" else ()
    extra = extra if isinstance(extra, tuple) else (extra,)
    if 0 in extra and (channels := tags.get(SAMPLES_PER_PIXEL, 1)) > 3:
        raise UnknownRangeError(f"it {too_many_channels(channels)}")


def with_8_bit_key(image: Image.Image) -> Image.Image:
    """Return an image that was only opened, with its transparent value in 8 bits as Pillow decodes the others."""
    key, raw = image.info.get("transparency"), str(getattr(image, "tile", ""))
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * (85 if "'L;2'" in raw else 17 if "'L;4'" in raw else 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and COLOUR_OF_16_BITS.search(raw):
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


def read_rgb(path: str | Path, *, reading: Reading = USUAL, side: int | None = None) -> Image.Image:
    """Return a decoded image file; grey, palettes and transparency become RGB, as `to_rgb` does it.

    For `side` see there. Raises RefusedError, which names the file, where it cannot be read, is not an intact image, or
    holds pixels whose range is not known.
    """
    with open_image(path) as image:
        try:
            return to_rgb(image, reading=reading, side=side)
        except UnknownRangeError as error:
            raise RefusedError(f"{path} cannot be used: {error}") from error
        # Pillow's decoders raise errors of many kinds on damaged files.
        except Exception as error:
            raise _damaged(path, error) from error


def to_rgb(image: Image.Image, *, reading: Reading = USUAL, side: int | None = None) -> Image.Image:
    """Return an image in 8-bit RGB, turned and on its background as `READING` says; itself where it is that.

    `side` is the longer side to which the image will be resized; None keeps its size. Raises UnknownRangeError where
    the range of its pixels is not known.
    """
    check_channels(image)
    if side is not None and reading.version > 3:
        reduce(image, side)
    # What a PNG file says of itself may come behind its pixels.
    image.load()
    turn = turn_of(image) if reading.version > 1 else None
    rgb = _in_rgb(image, version=reading.version)
    mask = transparency_of(image) if reading.version > 2 else None
    if mask is not None:
        # Pixels that are opaque keep their values exactly.
        rgb = Image.composite(rgb, Image.new("RGB", rgb.size, reading.background), mask)
    return rgb if turn is None else rgb.transpose(turn)


def reduce(image: Image.Image, side: int) -> None:
    """Let a JPEG file that was only opened be decoded at 1/2, 1/4 or 1/8 of its size, if `is_reduced`.

    The JPEG decoder leaves out the frequencies that resizing to `side` removes anyway. A photograph of 12 megapixels
    takes less than a third of the time.
    """
    if is_reduced(image, side):
        image.draft(None, (SPARE_FACTOR * side, SPARE_FACTOR * side))


def is_reduced(image: Image.Image, side: int) -> bool:
    """Return True for a large JPEG file that, at half its size, still has `SPARE_FACTOR` times `side` pixels a side."""
    return image.format in JPEG and max(image.size) > WHOLE_SIDE and min(image.size) >= 2 * SPARE_FACTOR * side


def _in_rgb(image: Image.Image, *, version: int) -> Image.Image:
    if image.mode.startswith(MODES_OF_16_BITS):
        # Pillow clips 16-bit grey to 255 instead of scaling it.
        grey = np.asarray(image)
        unused = 8 if version == 1 else max(0, bits_used(grey) - 8)
        return Image.fromarray((grey >> unused).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F"):
        raise UnknownRangeError(f"pixels of mode {image.mode} have no known range, convert it to 8 bits")
    # Straight to RGB, Pillow warns of palettes with transparency.
    return (_in_rgba(image) if carries_transparency(image) else image).convert("RGB")


def _in_rgba(image: Image.Image) -> Image.Image:
    # Pillow knows no shorter way.
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


MODES_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def carries_transparency(image: Image.Image) -> bool:
    """Tell whether an image, perhaps only opened, may have transparent parts: all may turn out to be opaque."""
    palette = image.palette if image.mode == "P" else None
    in_palette = palette is not None and palette.mode.endswith("A")
    return image.mode in MODES_WITH_ALPHA or "transparency" in image.info or in_palette


def transparency_of(image: Image.Image) -> Image.Image | None:
    """Return how opaque each pixel is, in 8 bits; None where all are opaque. Decodes the image only if need be."""
    if not carries_transparency(image):
        return None
    image.load()
    if image.mode.startswith(MODES_OF_16_BITS):
        # Pillow knows no such image with transparency.
        opaque = np.asarray(image) != image.info["transparency"]
        mask = Image.fromarray(np.where(opaque, 255, 0).astype(np.uint8))
    else:
        mask = _in_rgba(image).getchannel("A")
    lowest, _ = mask.getextrema()
    return None if lowest == 255 else mask


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
    if pixels.ndim == 3 and pixels.shape[0] > 3 and pixels.shape[2] > 3:
        raise ValueError(f"a tensor of shape {tuple(pixels.shape)} {too_many_channels(pixels.shape[0])}")
    raise ValueError(f"a tensor of shape {tuple(pixels.shape)} is no image; (H, W), (1, H, W) or (3, H, W) is")


def fitted(image: Image.Image, height: int, width: int, *, reading: Reading = USUAL) -> Image.Image:
    """Return an image in this size, resampled and made to fit as `reading` says.

    `crop` takes the largest centred part of these proportions, a square where both are equal; `squash` takes all of the
    image; `pad` too, in its own proportions, in the middle of the background. That is the image itself where it has
    this size.
    """
    if (image.height, image.width) == (height, width):
        return image
    if reading.fit == "squash":
        return image.resize((width, height), reading.filter)
    if reading.fit == "pad":
        scale = min(width / image.width, height / image.height)
        inner = [max(1, round(length * scale)) for length in image.size]
        padded = Image.new("RGB", (width, height), reading.background)
        padded.paste(
            image.resize((inner[0], inner[1]), reading.filter),
            ((width - inner[0]) // 2, (height - inner[1]) // 2),
        )
        return padded
    part_width = min(image.width, max(1, image.height * width // height))
    part_height = min(image.height, max(1, image.width * height // width))
    left, top = (image.width - part_width) // 2, (image.height - part_height) // 2
    box = (left, top, left + part_width, top + part_height)
    if (part_height, part_width) == (height, width):
        return image.crop(box)
    return image.resize((width, height), reading.filter, box=box)


Sizes = Counter[tuple[int, int]]
"""How many of the images that were looked at have which (height, width)."""


def one_shape(
    sizes: Mapping[tuple[int, int], str], image_size: int | None, *, fit: str = "crop", told: str = ""
) -> tuple[tuple[int, int, int], int | None]:
    """Return the (C, H, W) of all decoded images, and the side of their squares, None where they keep their size.

    `sizes` are the distinct (height, width) of some, each with the place of one. Squares have the side `image_size`, or
    the side of what they take of the images where that is smaller. Raises UsageError, which begins with `told`, where
    images differ in size and `image_size` is None.
    """
    if image_size is None and len(sizes) > 1:
        shown = " and ".join(f"{place} ({width}x{height})" for (height, width), place in list(sizes.items())[:2])
        raise UsageError(f"{told}images differ in size: {shown}; give --image-size SIDE to bring all to one size")
    taken = min if fit == "crop" else max
    side = None if image_size is None else min(image_size, max(taken(size) for size in sizes))
    return (3, side, side) if side else (3, *next(iter(sizes))), side


def is_oblong(sizes: Sizes) -> bool:
    """Tell whether any of the images is not square."""
    return any(height != width for height, width in sizes)


def notes_on_crop(sizes: Sizes, *, side: int | None, fit: str) -> list[str]:
    """Return a note on how much of the images is cut off, where that is 1 % of one or more."""
    lost = {size: 1 - min(size) / max(size) for size in sizes}
    cut = [size for size in sizes if lost[size] >= LEAST_LOST]
    if side is None or fit != "crop" or not cut:
        return []
    count = sum(sizes[size] for size in cut)
    share = sum(lost[size] * sizes[size] for size in cut) / count
    note = f"--image-size takes the centre square: of {plural(sizes.total(), 'image')} looked at, {count} lose"
    return [f"{note}{'s' if count == 1 else ''} {share:.0%} of their area; --fit squash or --fit pad keeps all of it"]


LEAST_LOST = 0.01
"""Share of an image's area that is worth a note."""


def sized_pixels(
    image: Image.Image, *, side: int | None, image_shape: tuple[int, int, int], reading: Reading, place: str
) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8, made to fit a square of `side` where that is given.

    Raises UsageError where none is given, and the image is not of `image_shape`; names its place.
    """
    if side is not None:
        return to_pixels(fitted(image, side, side, reading=reading))
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
    if "text chunk" in reason.lower().replace("_", " "):
        return TooLargeError(f"{path} holds more text than Pillow reads ({reason}); save it without metadata")
    return RefusedError(f"{path} is not an intact image ({reason}); restore or remove it")
