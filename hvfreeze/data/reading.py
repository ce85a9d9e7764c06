"""Read one image: open it, apply its EXIF orientation, and convert it to 8-bit RGB of a given size."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from hvfreeze.config.data import DataConfig
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.user_code import HF, is_named_code

PixelArray = NDArray[np.uint8]
READING = 4
"""Version of the conversion from files to pixels.

1: pixels as stored, and the upper 8 bits of 16-bit grey.
2: EXIF orientation applied, and 16-bit grey scaled by the bits that the image uses.
3: transparent parts filled with the background colour, instead of the colours stored for them.
4: large JPEG files decoded at a reduced scale, see `reduce`.
"""
Colour = tuple[int, int, int]
"""Red, green and blue, each 0 to 255."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The settings of reading images and bringing them to one shape."""

    version: int = READING
    background: Colour = (255, 255, 255)
    """Colour behind transparent parts and around padded images."""
    fit: str = "crop"
    """Fit to the square, one of `config.data.FITS`."""
    resample: str = "bilinear"
    """Interpolation, one of `config.data.RESAMPLES`."""

    @property
    def filter(self) -> Image.Resampling:
        """Pillow's resampling filter."""
        return Image.Resampling[self.resample.upper()]


def reading_of(data: DataConfig) -> Reading:
    """Return the image reading of a run's settings.

    A custom dataset decodes its images at full size, so prediction with its model does too.
    """
    version = 3 if is_named_code(data.data) or data.data.startswith(HF) else READING
    return Reading(version=version, background=data.background_colour(), fit=data.fit, resample=data.resample)


USUAL = Reading()
ORIENTATION = ExifTags.Base.Orientation
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that turns an image upright, by EXIF orientation."""
PNG_TEXTS = b"eXIf", b"iTXt", b"tEXt", b"zTXt"
"""PNG chunks that may hold an orientation."""
MODES_OF_16_BITS = "I;16"
JPEG = ("JPEG", "MPO")
"""Formats whose decoder can reduce the scale."""
WHOLE_SIDE = 512
"""Side in pixels up to which images are always decoded whole."""
COLOUR_OF_16_BITS = re.compile("[A-Z]{2,4};16[BLN]")
"""Pillow's names of 16-bit colour channels in a file."""


LIMIT = "HVFREEZE_MAX_MEGAPIXELS"
"""Environment variable for the limit on an image's megapixels, which also applies to images that user code opens."""


class TooLargeError(RefusedError):
    """An intact image that exceeds the size limit; it is never skipped as a broken one."""


class UnknownRangeError(ValueError):
    """An image whose pixels have no known range, or with channels that are not colours."""


def allow_large_images() -> None:
    """Set Pillow's size limit from `LIMIT`. Raises UsageError if that is not a size."""
    text = os.environ.get(LIMIT, "")
    if not text:
        return
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UsageError(f"{LIMIT} ({text}) must be a whole number of megapixels, at least 1")
    # Pillow refuses images with more than twice as many.
    Image.MAX_IMAGE_PIXELS = int(text) * 500_000


def too_large(place: str, error: Exception) -> TooLargeError:
    """Return the refusal of an image that exceeds Pillow's size limit."""
    found = re.search(r"\((\d+) pixels\)", str(error))
    megapixels = int(found[1]) // 10**6 + 1 if found else 0
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6
    return TooLargeError(
        f"{place} is too large: {megapixels} megapixels, and the limit is {limit}; shrink it, or set "
        f"the environment variable {LIMIT}={megapixels} on all ranks"
    )


def open_image(path: str | Path) -> Image.Image:
    """Open an image, reading only its header; the caller closes it.

    Raises:
        RefusedError: the file is unreadable, not an image or too large; names it.
    """
    allow_large_images()
    try:
        # Opening a pipe would wait for a writer, perhaps for ever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a plain file")
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
"""Offset and value of the bytes that mark DICOM files."""
DICOM_SUFFIXES = (".dcm", ".dicom")
CONVERT_DICOM = "convert DICOM files to PNG, for example with pydicom or dcmj2pnm"


def unsupported_kind(path: str | Path) -> str:
    """Return the format of a file that Pillow does not read, with a remedy; empty for unknown formats."""
    with suppress(Exception), open(path, "rb") as file:
        head = file.read(DICOM_OFFSET + len(DICOM))
        if head[DICOM_OFFSET:] == DICOM:
            return f"is a DICOM file, which is not supported; {CONVERT_DICOM}"
        if head[:4] in (b"II*\0", b"MM\0*"):
            tags: Any = TiffImagePlugin.ImageFileDirectory_v2(head[:8])
            file.seek(tags.next)
            tags.load(file)
            if (channels := tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)) > 3:
                return too_many_channels(channels)
    return ""


def too_many_channels(count: int) -> str:
    """Return the refusal of an image with `count` channels, with a remedy."""
    return f"has {count} channels, and at most 3 are supported; save three of them as an RGB image"


def check_channels(image: Image.Image) -> None:
    """Raise UnknownRangeError for a TIFF file with channels other than colour and transparency, which Pillow would
    drop.
    """
    tags: Any = getattr(image, "tag_v2", None) or {}
    extra = tags.get(TiffImagePlugin.EXTRASAMPLES, ()) if image.format == "TIFF" else ()
    extra = extra if isinstance(extra, tuple) else (extra,)
    if 0 in extra and (channels := tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)) > 3:
        raise UnknownRangeError(f"it {too_many_channels(channels)}")


def with_8_bit_key(image: Image.Image) -> Image.Image:
    """Return an opened image with its transparent value in 8 bits, like the pixels that Pillow decodes."""
    key, raw = image.info.get("transparency"), str(getattr(image, "tile", ""))
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * (85 if "'L;2'" in raw else 17 if "'L;4'" in raw else 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and COLOUR_OF_16_BITS.search(raw):
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


def read_rgb(path: str | Path, *, reading: Reading = USUAL, side: int | None = None) -> Image.Image:
    """Decode an image file to RGB; see `to_rgb`, also for `side`.

    Raises:
        RefusedError: the file is unreadable or damaged, or its pixels have no known range; names the file.
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
    """Convert an image to upright 8-bit RGB on its background; see `READING`.

    `side` is the longer side to which the image will be resized; None keeps its size.

    Raises:
        UnknownRangeError: the pixels have no known range.
    """
    check_channels(image)
    if side is not None and reading.version > 3:
        reduce(image, side)
    # The metadata of a PNG file may follow its pixels.
    image.load()
    turn = turn_of(image) if reading.version > 1 else None
    rgb = _in_rgb(image, version=reading.version)
    mask = transparency_of(image) if reading.version > 2 else None
    if mask is not None:
        # Opaque pixels keep their exact values.
        rgb = Image.composite(rgb, Image.new("RGB", rgb.size, reading.background), mask)
    return rgb if turn is None else rgb.transpose(turn)


def reduce(image: Image.Image, side: int) -> None:
    """Decode a large opened JPEG file at 1/2, 1/4 or 1/8 of its size, if `is_reduced`.

    The decoder skips the frequencies that resizing to `side` removes anyway, which is more than 3x faster for a
    photograph of 12 megapixels.
    """
    if is_reduced(image, side):
        image.draft(None, (2 * side, 2 * side))


def is_reduced(image: Image.Image, side: int) -> bool:
    """Return True for a large JPEG file that has at least twice `side` pixels a side at half its size."""
    return image.format in JPEG and max(image.size) > WHOLE_SIDE and min(image.size) >= 4 * side


def _in_rgb(image: Image.Image, *, version: int) -> Image.Image:
    if is_16_bit_grey(image):
        # Pillow clips 16-bit grey to 255 instead of scaling it.
        grey = np.asarray(image)
        unused = 8 if version == 1 else max(0, bits_used(grey) - 8)
        return Image.fromarray((grey >> unused).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F"):
        raise UnknownRangeError(f"pixels of mode {image.mode} have no known range; convert it to 8 bits")
    # For palettes with transparency, Pillow warns about a direct conversion to RGB.
    return (_in_rgba(image) if carries_transparency(image) else image).convert("RGB")


def is_16_bit_grey(image: Image.Image) -> bool:
    """Return True for 16-bit grey. Pillow scales PGM files with a maximum above 255 to 16 bits, in mode I."""
    return image.mode.startswith(MODES_OF_16_BITS) or (image.mode == "I" and image.format == "PPM")


def _in_rgba(image: Image.Image) -> Image.Image:
    # Pillow has no direct conversion.
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


MODES_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def carries_transparency(image: Image.Image) -> bool:
    """Return True if an image may have transparent parts, also before it is decoded."""
    palette = image.palette if image.mode == "P" else None
    in_palette = palette is not None and palette.mode.endswith("A")
    return image.mode in MODES_WITH_ALPHA or "transparency" in image.info or in_palette


def transparency_of(image: Image.Image) -> Image.Image | None:
    """Return the 8-bit alpha channel; None if all pixels are opaque. Decodes the image only if necessary."""
    if not carries_transparency(image):
        return None
    image.load()
    if image.mode.startswith(MODES_OF_16_BITS):
        # Pillow has no transparency for such images.
        opaque = np.asarray(image) != image.info["transparency"]
        mask = Image.fromarray(np.where(opaque, 255, 0).astype(np.uint8))
    else:
        mask = _in_rgba(image).getchannel("A")
    lowest, _ = mask.getextrema()
    return None if lowest == 255 else mask


def bits_used(grey: NDArray[np.integer[Any]]) -> int:
    """Return the number of bits of the largest value."""
    return int(grey.max()).bit_length()


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that turns an image upright by its EXIF orientation; None if none is needed or known."""
    if image.format == "TIFF":
        # Pillow applies the orientation of TIFF files.
        return None
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    # Damaged EXIF data, on which Pillow raises errors of many kinds, is ignored.
    except Exception:
        return None


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Return the upright (height, width) of an opened image file."""
    sideways = turn_in_header(image) in (TURNS[5], TURNS[6], TURNS[7], TURNS[8])
    return (image.width, image.height) if sideways else (image.height, image.width)


def turn_in_header(image: Image.Image) -> Image.Transpose | None:
    """Return `turn_of` an opened image file, decoding only PNG files whose texts follow the pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        with open(image.filename, "rb") as file:  # type: ignore[attr-defined]  # it was opened from a file
            content = file.read()
        if not any(chunk in content for chunk in PNG_TEXTS):
            return None
    return turn_of(image)


def picture_of(pixels: Tensor) -> Image.Image:
    """Convert an (H, W) or (C, H, W) uint8 tensor, C of 1 or 3, to a picture. Raises ValueError for other values."""
    if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
        found = pixels.dtype if isinstance(pixels, Tensor) else type(pixels).__name__
        raise ValueError(f"a PIL image or a uint8 tensor is needed, not {found}")
    if pixels.ndim == 3 and pixels.shape[0] == 3:
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    if pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[0] == 1):
        return Image.fromarray(pixels.reshape(pixels.shape[-2:]).contiguous().numpy())
    if pixels.ndim == 3 and pixels.shape[0] > 3 and pixels.shape[2] > 3:
        raise ValueError(f"a tensor of shape {tuple(pixels.shape)} {too_many_channels(pixels.shape[0])}")
    raise ValueError(f"a tensor of shape {tuple(pixels.shape)} is not an image; give (H, W), (1, H, W) or (3, H, W)")


def fitted(image: Image.Image, height: int, width: int, *, reading: Reading = USUAL) -> Image.Image:
    """Return an image resized to `height` and `width`, by the fit and the filter of `reading`.

    `crop` takes the largest centred part with these proportions. `squash` takes the whole image. `pad` takes the whole
    image in its own proportions, centred on the background. An image of this size is returned unchanged.
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


def sized_pixels(
    image: Image.Image, *, side: int | None, image_shape: tuple[int, int, int], reading: Reading, place: str
) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8, fitted to a square of `side` if that is given.

    Raises:
        UsageError: no side is given and the image is not of `image_shape`; names its place.
    """
    if side is not None:
        return to_pixels(fitted(image, side, side, reading=reading))
    if (3, image.height, image.width) != image_shape:
        _, height, width = image_shape
        raise UsageError(
            f"{place} has {image.width}x{image.height} pixels, others have {width}x{height}; use "
            f"--image-size SIDE to resize them all"
        )
    return to_pixels(image)


def to_pixels(image: Image.Image) -> PixelArray:
    """Return an RGB image as (3, H, W) uint8."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def unreadable(path: str | Path, error: OSError) -> RefusedError:
    """Return the refusal of an unreadable file or folder."""
    return RefusedError(f"{path} cannot be read ({error.strerror}); check --data-dir and the permissions")


def _damaged(path: str | Path, error: Exception) -> RefusedError:
    reason = " ".join(str(error).replace(str(path), "the file").split())
    if isinstance(error, UnidentifiedImageError):
        reason = "its format is unknown"
    if "text chunk" in reason.lower().replace("_", " "):
        return TooLargeError(f"{path} holds more text than Pillow accepts ({reason}); save it without metadata")
    return RefusedError(f"{path} is not an intact image ({reason}); restore or remove it")
