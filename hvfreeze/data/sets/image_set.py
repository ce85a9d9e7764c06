"""A split of a data set: its samples with ids, labels, classes and what a transform must know of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.sets.own import DatasetSource
from hvfreeze.data.sources import ArraySource, FileSource, PixelArray
from hvfreeze.errors import RefusedError

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """One split of a data set. A sample's id is its row, 0..N-1, the same on every rank and in every run."""

    name: str
    classes: tuple[str, ...]
    labels: Tensor
    """(N,) int64."""
    mean: Triple
    """Per channel, of pixels scaled to 0-1."""
    std: Triple
    flips: bool
    """Whether a mirrored image still shows its class."""
    source: ArraySource | FileSource | DatasetSource
    broken: Mapping[int, str] = field(default_factory=dict)
    """Samples that are left out because they cannot be decoded, and why."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The samples that may be used, (N,) ascending."""
        return np.array([row for row in range(len(self)) if row not in self.broken], dtype=np.int64)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every decoded image."""
        return self.source.image_shape

    def sample_digest(self, count: int = 16) -> str:
        """Return the SHA-256 over the pixels of `count` samples that lie evenly in the set, as hex."""
        digest = hashlib.sha256()
        ids = self.ids
        for sample_id in ids[np.unique(np.linspace(0, len(ids) - 1, count).astype(np.int64))]:
            # Whoever loads the pixels tells of all broken images together.
            with suppress(RefusedError):
                digest.update(np.ascontiguousarray(self.decode(int(sample_id))).data)
        return digest.hexdigest()

    def decode(self, sample_id: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one sample.

        Raises:
            RefusedError: The image is damaged or cannot be read; names the file.
            UsageError: The image's size differs and no --image-size was given; names the file.
        """
        return self.source.decode(sample_id)

    def identity(self, *, local: bool = True) -> str:
        """Return a digest of what the decoded pixels, labels and classes are.

        Args:
            local: Whether times of modification count, which find more changes to image files. Leave them out to
                compare ranks on different machines, whose copies of a folder were made at different times.
        """
        digest = hashlib.sha256(repr((self.name, self.classes)).encode())
        digest.update(self.labels.numpy().data)
        digest.update(self.source.identity(local=local).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """A data set's splits, with equal classes and image shapes."""

    train: ImageSet
    validation: ImageSet | None
    """Only of an image folder that brings train, val and test."""
    test: ImageSet
    notes: list[str] = field(default_factory=list)
    """What the user should know about how the splits came about, one sentence each."""
