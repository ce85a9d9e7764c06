"""The sizes of a few probed images, and the shape to which all images are decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hvfreeze.data.shards import evenly
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.wording import plural

MOST_PROBED = 64
UNEQUAL_SIDE = 128
"""Side in pixels to which images of different sizes are resized by default."""
Size = tuple[int, int]
"""Height and width in pixels."""


def rows_probed(total: int) -> list[int]:
    """Return at most `MOST_PROBED` evenly spaced rows of a dataset with `total` samples."""
    rows: list[int] = evenly(np.arange(total), MOST_PROBED).tolist()
    return rows


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of probed images."""

    counts: Counter[Size] = field(default_factory=Counter)
    examples: dict[Size, str] = field(default_factory=dict)
    """The name of an image of each size."""

    def probe(self, total: int, look: Callable[[int], tuple[Size, str]]) -> None:
        """Add the sizes of a few images of a dataset with `total` samples.

        `look` returns the size and the name of the image in a row. Skips unreadable images: loading the pixels reports
        them all.

        Raises:
            RefusedError: all probed images are unreadable.
        """
        refusals, before = list[RefusedError](), self.counts.total()
        for row in rows_probed(total):
            try:
                size, name = look(row)
            except RefusedError as error:
                refusals.append(error)
                continue
            self.counts[size] += 1
            self.examples.setdefault(size, name)
        if refusals and self.counts.total() == before:
            raise refusals[0]

    @property
    def oblong(self) -> bool:
        """Whether an image is not square."""
        return any(height != width for height, width in self.counts)

    def one_shape(
        self, image_size: int | None, *, fit: str, default: int | None = UNEQUAL_SIDE, told: str = ""
    ) -> tuple[tuple[int, int, int], int | None, list[str]]:
        """Return the (C, H, W) of decoded images, the side of their squares, and log lines.

        The side is `image_size`, or the side of the part that squares take of the images if that is smaller; None if
        images keep their size. `default` replaces an `image_size` of None if images differ in size.

        Raises:
            UsageError: images differ in size, and `image_size` and `default` are None; the message begins with `told`.
        """
        unequal = image_size is None and len(self.counts) > 1
        if unequal and default is None:
            places = [f"{place} ({width}x{height})" for (height, width), place in self.examples.items()]
            shown = " and ".join(places[:2])
            raise UsageError(f"{told}images differ in size: {shown}; use --image-size SIDE to resize them all")
        wanted = default if unequal else image_size
        if wanted is None:
            return (3, *next(iter(self.counts))), None, []
        taken = min if fit == "crop" else max
        side = min(wanted, max(taken(size) for size in self.counts))
        note = f"images differ in size: resizing to {side}x{side} pixels; use --image-size for another side"
        notes = [note] if unequal else []
        return (3, side, side), side, notes + (self.notes_on_crop() if fit == "crop" else [])

    def notes_on_crop(self) -> list[str]:
        """Return a log line on the area that a crop to squares removes, if an image loses 1 % or more."""
        lost = {size: 1 - min(size) / max(size) for size in self.counts}
        cut = [size for size in self.counts if lost[size] >= 0.01]
        if not cut:
            return []
        count = sum(self.counts[size] for size in cut)
        share = sum(lost[size] * self.counts[size] for size in cut) / count
        probed = f"of {plural(self.counts.total(), 'image')} probed, {count} lose{'s' if count == 1 else ''}"
        crop = f"--image-size crops to the centre square: {probed} {share:.0%} of their area"
        return [f"{crop}; use --fit squash or --fit pad to keep it"]
