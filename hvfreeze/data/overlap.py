"""Training images among those that accuracy is measured on: found by their pixels, else by their files.

Accuracy counts an answer that was learned by heart as right, so who reads it has to know.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvfreeze.data.decoding import MemoryPixels
from hvfreeze.data.images import FileSource
from hvfreeze.data.shards import Ids, evenly
from hvfreeze.wording import plural

MOST_IMAGES, MOST_BYTES = 10_000, 2**28
"""Of a rank's evaluated images in memory that are looked at: a quarter of a second of work."""
MOST_FILES, MOST_TRAINED_FILES = 64, 1024
"""That are read of evaluated images and of training images, where their pixels are not in memory."""
PIXELS_LOOKED_AT = 64
"""Of each image, at first: they tell most images apart."""

Digests = dict[int, bytes]
"""A sample's id -> a digest of all of its pixels, or of its file."""
Doubles = dict[int, int]
"""An evaluated sample's id -> the id of a training sample that is the same image."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many evaluated images are training images too."""

    found: int
    looked_at: int
    evaluated: int
    """All evaluated images, of which some may not have been looked at."""
    example: tuple[str, str]
    """What messages call such an image, and the training image that it is."""

    def describe(self) -> str:
        """Return a note for the user."""
        looked = f"{self.looked_at} looked at of " if self.looked_at < self.evaluated else ""
        are = "is a training image" if self.found == 1 else "are training images"
        return (
            f"of {looked}{plural(self.evaluated, 'image')} that accuracy is measured on, {self.found} {are} too, such "
            f"as {self.example[0]} (in training: {self.example[1]}): the accuracy does not tell how new images fare"
        )


def looked_at(pixels: MemoryPixels, ids: Ids) -> Ids:
    """Return which evaluated images in memory are compared; of many or large ones, some are left out."""
    return evenly(ids, max(1, min(MOST_IMAGES, MOST_BYTES // pixels.bytes_each)))


def match(evaluated: Digests, trained: Digests) -> Doubles:
    """Return the evaluated samples of which a training sample has the digest."""
    known = {digest: sample for sample, digest in reversed(trained.items())}
    return {sample: known[digest] for sample, digest in evaluated.items() if digest in known}


def first_pixels(pixels: MemoryPixels, ids: Ids) -> NDArray[np.bytes_]:
    """Return (images,) a few pixels of each image in memory: only images that agree in them are digested."""
    places = np.random.default_rng(0).integers(0, pixels.bytes_each, PIXELS_LOOKED_AT)
    return np.ascontiguousarray(pixels.at(ids, places)).view(f"S{PIXELS_LOOKED_AT}")[:, 0]


def digests_in_memory(pixels: MemoryPixels, ids: Ids) -> Digests:
    """Return digests of images in memory."""
    return {
        sample: hashlib.blake2b(pixels.fetch(ids[row : row + 1]).numpy().data, digest_size=16).digest()
        for row, sample in enumerate(ids.tolist())
    }


def files_to_compare(evaluated: FileSource, ids: Ids, trained: FileSource, trained_ids: Ids) -> tuple[Ids, Ids]:
    """Return evaluated samples, and training samples whose files may be the same by their sizes; a few of each."""
    chosen = evenly(ids, MOST_FILES)
    same_size = np.isin(trained.num_bytes[trained_ids], evaluated.num_bytes[chosen])
    return chosen, evenly(trained_ids[same_size], MOST_TRAINED_FILES)


def digests_of_files(source: FileSource, ids: Ids) -> Digests:
    """Return digests of files; those that cannot be read have none: whoever loads the pixels tells of them."""
    found = {}
    for sample in ids.tolist():
        # An empty one may be a pipe, which would be waited for.
        if source.num_bytes[sample]:
            with suppress(OSError), open(os.path.join(source.root, source.paths[sample]), "rb") as file:
                found[sample] = hashlib.blake2b(file.read(), digest_size=16).digest()
    return found
