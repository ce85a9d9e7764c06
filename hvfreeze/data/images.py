"""Sources of images: arrays in memory and files. Reports of broken images and of special conversions."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from hvfreeze.data.reading import (
    COLOUR_OF_16_BITS,
    PNG_TEXTS,
    USUAL,
    WHOLE_SIDE,
    PixelArray,
    Reading,
    bits_used,
    fitted,
    is_16_bit_grey,
    is_reduced,
    open_image,
    read_rgb,
    sized_pixels,
    to_pixels,
    transparency_of,
    turn_in_header,
)
from hvfreeze.errors import RefusedError
from hvfreeze.wording import first_few

T = TypeVar("T")


class BrokenImagesError(RefusedError):
    """Damaged or unreadable images; `reasons` has a message for each."""

    def __init__(self, reasons: Sequence[str] | str) -> None:
        self.reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        if isinstance(reasons, str):
            super().__init__(reasons)
            return
        what = self.reasons[0] if len(reasons) == 1 else f"{len(reasons)} images cannot be used: {listed(reasons)}"
        super().__init__(f"{what}; --skip-bad leaves such images out")


def listed(reasons: Sequence[str]) -> str:
    """Return the first messages about images, without their remedies, and the number of the others."""
    return first_few([reason.partition(";")[0] for reason in reasons], between="; ")


def load_all(*loads: Callable[[], T]) -> list[T]:
    """Call each load and return the results.

    Raises:
        BrokenImagesError: images are damaged or unreadable; names the images of all loads.
    """
    loaded, broken = [], []
    for load in loads:
        try:
            loaded.append(load())
        except BrokenImagesError as error:
            broken += error.reasons
    if broken:
        raise BrokenImagesError(broken)
    return loaded


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TURNED, TRANSPARENT, FRAMES, SCALED, COARSE, REDUCED = ODD = (
    "images are rotated by their EXIF orientation",
    "images have transparent parts, filled with the --background colour",
    "images have several frames or pages; only the first is read",
    "images are 16-bit grey and use fewer bits; each is scaled by the bits it uses",
    "images have 16 bits per channel; the upper 8 are read, so convert images that use fewer bits to 8 bits",
    "images are large JPEG files, decoded at 1/2, 1/4 or 1/8 of their size",
)
"""Special conversions from files to pixels, as they are logged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySource:
    """Images in memory."""

    pixels: PixelArray
    """Pixels, (N, 3, H, W)."""
    side: int | None
    """The centre square is resized to this side; None keeps the pixels as they are."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of a decoded image, (C, H, W)."""
        _, channels, height, width = self.pixels.shape
        return (channels, self.side or height, self.side or width)

    @property
    def kept(self) -> bool:
        """Whether decoding returns `pixels` unchanged."""
        return self.image_shape == self.pixels.shape[1:]

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image."""
        if self.kept:
            kept: PixelArray = self.pixels[row]
            return kept
        assert self.side is not None
        return to_pixels(fitted(Image.fromarray(self.pixels[row].transpose(1, 2, 0)), self.side, self.side))

    def identity(self, *, local: bool) -> str:
        """Return a digest of all pixels; `local` has no effect, since arrays have no file times."""
        header = f"{self.pixels.shape} {self.side} {PIL.__version__ if self.side else ''}"
        return hashlib.sha256(header.encode() + self._digest).hexdigest()

    @cached_property
    def _digest(self) -> bytes:
        """SHA-256 of the pixels. 50,000 images of CIFAR-10 take 0.7 s, and a cached run asks twice."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource:
    """Image files, decoded to RGB on demand."""

    root: Path
    paths: tuple[str, ...]
    """Paths relative to `root`, sorted as bytes."""
    image_shape: tuple[int, int, int]
    """Shape of a decoded image, (C, H, W)."""
    side: int | None
    """Side of the square that images are fitted to, in pixels; None accepts images of `image_shape` only."""
    num_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Size of each file in bytes."""
    local: str = ""
    """Digest of the modification times on this machine."""
    reading: Reading = USUAL
    oblong: bool = True
    """Whether a probed image is not square."""
    odd: Mapping[str, int] | None = None
    """The result of `count_odd` for all files; None computes it on demand."""

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image.

        Raises:
            RefusedError: the file is unreadable or damaged; names it.
            UsageError: the image has another size than the others, without --image-size; names the file.
        """
        # A string: making a Path takes a tenth of the time of decoding a small image.
        path = os.path.join(self.root, self.paths[row])
        image = read_rgb(path, reading=self.reading, side=self.side)
        return sized_pixels(image, side=self.side, image_shape=self.image_shape, reading=self.reading, place=path)

    def identity(self, *, local: bool) -> str:
        """Return a digest of the listed paths and sizes and, with `local`, modification times.

        Readings that give the same pixels have the same digest.
        """
        header = f"{self.image_shape} {self.side} {PIL.__version__} {self.local if local else ''}"
        header += self._read_otherwise
        return hashlib.sha256(f"{header} {digest_of_files(self.paths, self.num_bytes)}".encode()).hexdigest()

    @cached_property
    def known_odd(self) -> Mapping[str, int]:
        """The result of `count_odd` for all files."""
        return count_odd(self) if self.odd is None else self.odd

    @cached_property
    def _read_otherwise(self) -> str:
        """The settings that give other pixels than reading 1 did."""
        version, background, fit = self.reading.version, self.reading.background, self.reading.fit
        found = ""
        if version > 1 and (self.known_odd[TURNED] or self.known_odd[SCALED]):
            found += " reading 2"
        if version > 2 and self.known_odd[TRANSPARENT]:
            found += f" transparent on {background}"
        if version > 3 and self.known_odd[REDUCED]:
            found += " reduced"
        if self.side is not None and fit != "crop":
            found += f" {fit} {background if fit == 'pad' else ''}"
        if self.side is not None and self.reading.resample != USUAL.resample:
            found += f" {self.reading.resample}"
        return found


def digest_of_files(paths: Sequence[str], num_bytes: NDArray[np.int64]) -> str:
    """Return the SHA-256 over paths and sizes of files, as hex."""
    digest = hashlib.sha256(os.fsencode("\0".join(paths)))
    digest.update(num_bytes.astype("<i8").tobytes())
    return digest.hexdigest()


def oddities(image: Image.Image, turn: Callable[[Image.Image], object]) -> list[str]:
    """Return the special conversions, without REDUCED, that apply to an opened image; see `turn_of`.

    Decodes only 16-bit grey images and images that may be transparent.
    """
    # Pillow drops this information when it decodes the file.
    coarse = COLOUR_OF_16_BITS.search(str(getattr(image, "tile", ""))) is not None
    # A JPEG with a second picture is a photograph with a preview.
    several = image.format != "MPO" and getattr(image, "is_animated", False)
    found = {
        TURNED: turn(image) is not None,
        TRANSPARENT: transparency_of(image) is not None,
        FRAMES: several,
        SCALED: is_16_bit_grey(image) and bits_used(np.asarray(image)) < 16,
        COARSE: coarse,
    }
    return [what for what, true in found.items() if true]


PNG_OPAQUE = (0, 2, 3)
"""Colour types of a PNG file without an alpha channel."""
JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of the segment of a JPEG file that holds its height and width."""
HEAD_BYTES = 4096
"""Bytes at the start of a file that usually rule out special conversions."""


def is_plain(head: bytes) -> bool:
    """Return True if the first bytes of a file rule out all of `ODD`; this is 4x faster than opening it with Pillow.

    These are WebP files without extended header and transparency; JPEG files of at most `WHOLE_SIDE` pixels a side
    without an APP1 segment, which holds EXIF data and XMP; and small PNG files of at most 8 bits without transparency,
    animation, EXIF data and texts, which may follow the pixels.
    """
    if head[:4] == b"\x89PNG":
        whole = len(head) < HEAD_BYTES and b"IEND" in head
        plain = whole and head[24] <= 8 and head[25] in PNG_OPAQUE
        return plain and not any(chunk in head for chunk in (*PNG_TEXTS, b"tRNS", b"acTL"))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        # A bit in the last byte of a lossless file's height announces an alpha channel.
        return head[12:16] == b"VP8 " or (head[12:16] == b"VP8L" and len(head) > 24 and not head[24] & 0x10)
    place = 2 if head[:2] == b"\xff\xd8" else len(head)
    while place + 4 <= len(head) and head[place] == 0xFF:
        marker, length = head[place + 1], int.from_bytes(head[place + 2 : place + 4], "big")
        if marker == 0xDA:
            return True
        sides = [int.from_bytes(head[place + at : place + at + 2], "big") for at in (5, 7)]
        if marker == 0xE1 or (marker in JPEG_FRAMES and max(sides) > WHOLE_SIDE):
            return False
        place += 2 + length
    return False


def head_of(path: str) -> bytes:
    """Return the first `HEAD_BYTES` of a file; empty for a pipe, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, HEAD_BYTES)
    finally:
        os.close(descriptor)


def count_odd(source: FileSource, *, share: int = 0, shares: int = 1, workers: int = 1) -> dict[str, int]:
    """Count the files in a share of a source per special conversion.

    Reads headers, and decodes only 16-bit grey images and images that may be transparent. Skips damaged files.
    """

    def look(paths: Sequence[str]) -> list[str]:
        found = []
        for path in paths:
            place = os.path.join(source.root, path)
            # Loading the pixels reports damaged files.
            with suppress(Exception):
                if not is_plain(head_of(place)):
                    with open_image(place) as image:
                        found += oddities(image, turn_in_header)
                        found += [REDUCED] if source.side and is_reduced(image, source.side) else []
        return found

    own = source.paths[share::shares]
    with ThreadPoolExecutor(workers, thread_name_prefix="headers") as pool:
        found = Counter(chain(*pool.map(look, [own[start : start + 64] for start in range(0, len(own), 64)])))
    return {name: found[name] for name in ODD}
