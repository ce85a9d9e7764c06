"""Train/test duplicates: evaluation images that are also training images, found by pixels, files or origin.

A model can memorize duplicates, so they make the test accuracy too high.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.decoding import MemoryPixels
from hvfreeze.data.images import FileSource
from hvfreeze.data.own import DatasetSource
from hvfreeze.data.shards import Ids, evenly
from hvfreeze.errors import RefusedError
from hvfreeze.wording import plural

MOST_IMAGES, MOST_BYTES = 10_000, 2**28
"""Evaluation images in memory that a rank compares, and their bytes: a quarter of a second of work."""
MOST_FILES, MOST_TRAINED_FILES = 64, 1024
"""Evaluation files and training files that are read if their pixels are not in memory."""
MOST_DECODED, MOST_TRAINED_DECODED = 64, 512
"""Evaluation images and training images that are decoded if there are no files to compare."""
MOST_HASHED_BYTES = 2**31
"""Bytes of training images, over all ranks, that are hashed because their first pixels are equal: two seconds."""
PIXELS_PROBED = 64
"""Pixels per image that are compared first; they distinguish most images."""

Digests = dict[int, bytes]
"""Digest of all pixels or of the file, by sample id."""
Duplicates = dict[int, int]
"""Id of a training sample with the same image, by evaluated sample id."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The evaluation images that are also training images."""

    found: int
    compared: int
    evaluated: int
    """Number of evaluation images, compared or not."""
    example: tuple[str, str]
    """Names of a duplicate and of its training image."""

    def describe(self) -> str:
        """Return the log line."""
        compared = f"{self.compared} compared of " if self.compared < self.evaluated else ""
        are = "is" if self.found == 1 else "are"
        return (
            f"of {compared}{plural(self.evaluated, 'evaluation image')}, {self.found} {are} also in the "
            f"training set, such as {self.example[0]} = {self.example[1]}: the accuracy will be too high"
        )


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Equal training images with different classes."""

    found: int
    compared: int
    trained: int
    """Number of training images, compared or not."""
    example: tuple[str, str]
    """Names of two such images."""
    classes: tuple[str, str]
    """Classes of the two images."""

    def describe(self) -> str:
        """Return the log line."""
        compared = f"{self.compared} compared of " if self.compared < self.trained else ""
        return (
            f"of {compared}{plural(self.trained, 'training image')}, {self.found} have a duplicate in "
            f"another class, such as "
            f"{self.example[0]} ({self.classes[0]}) and {self.example[1]} ({self.classes[1]}): one of the labels is "
            "wrong; remove one of each"
        )


def conflicts_in(digests: Digests, labels: Sequence[int]) -> list[int]:
    """Return the samples with the digest of a sample of another class, ascending; `labels` are by sample."""
    classes: dict[bytes, set[int]] = {}
    for sample, digest in digests.items():
        classes.setdefault(digest, set()).add(labels[sample])
    return sorted(sample for sample, digest in digests.items() if len(classes[digest]) > 1)


def images_to_compare(pixels: MemoryPixels, ids: Ids) -> Ids:
    """Return the evaluated images in memory to compare, a subset of many or large ones."""
    return evenly(ids, max(1, min(MOST_IMAGES, MOST_BYTES // pixels.bytes_each)))


def match(evaluated: Digests, trained: Digests) -> Duplicates:
    """Return the evaluated samples with the digest of a training sample."""
    known = {digest: sample for sample, digest in reversed(trained.items())}
    return {sample: known[digest] for sample, digest in evaluated.items() if digest in known}


def first_pixels(pixels: MemoryPixels, ids: Ids) -> NDArray[np.bytes_]:
    """Return a few pixels of each image in memory, (images,); only images with equal first pixels are hashed."""
    places = np.random.default_rng(0).integers(0, pixels.bytes_each, PIXELS_PROBED)
    return np.ascontiguousarray(pixels.at(ids, places)).view(f"S{PIXELS_PROBED}")[:, 0]


def digests_in_memory(pixels: MemoryPixels, ids: Ids) -> Digests:
    """Return digests of images in memory."""
    return {
        sample: hashlib.blake2b(pixels.fetch(ids[row : row + 1]).numpy().data, digest_size=16).digest()
        for row, sample in enumerate(ids.tolist())
    }


def keys_of(first: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """Return a hash of each image's first pixels, (images,)."""
    words = np.ascontiguousarray(first).view(np.uint8).reshape(len(first), -1, 8).view(np.uint64)[..., 0]
    odd = np.random.default_rng(1).integers(0, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    found: NDArray[np.uint64] = (words * odd).sum(1, dtype=np.uint64)
    return found


def files_of_equal_size(trained: FileSource, ids: Ids) -> Ids:
    """Return training samples whose file has the same size as another one: a few, with all files of a size."""
    sizes = trained.num_bytes[ids]
    order = np.argsort(sizes, kind="stable")
    _, places, counts = np.unique(sizes[order], return_index=True, return_counts=True)
    chosen: list[int] = []
    for place, count in zip(places.tolist(), counts.tolist()):
        if count > 1 and len(chosen) + count <= MOST_TRAINED_FILES:
            chosen += order[place : place + count].tolist()
    return np.sort(ids[chosen])


def files_to_compare(evaluated: FileSource, ids: Ids, trained: FileSource, trained_ids: Ids) -> tuple[Ids, Ids]:
    """Return a few evaluated samples and a few training samples with files of equal sizes."""
    chosen = evenly(ids, MOST_FILES)
    same_size = np.isin(trained.num_bytes[trained_ids], evaluated.num_bytes[chosen])
    return chosen, evenly(trained_ids[same_size], MOST_TRAINED_FILES)


def digests_of_files(source: FileSource, ids: Ids) -> Digests:
    """Return digests of the readable files; loading the pixels reports the others."""
    found = {}
    for sample in ids.tolist():
        # An empty file may be a pipe, and reading it would block.
        if source.num_bytes[sample]:
            with suppress(OSError), open(os.path.join(source.root, source.paths[sample]), "rb") as file:
                found[sample] = hashlib.blake2b(file.read(), digest_size=16).digest()
    return found


def duplicates_by_origin(evaluated: DatasetSource, ids: Ids, trained: DatasetSource, trained_ids: Ids) -> Duplicates:
    """Return the samples that come from the same item of one underlying dataset, as after a wrong split."""
    (tested, rows), (known, trained_rows) = _behind(evaluated.dataset), _behind(trained.dataset)
    paths, trained_paths = (getattr(each, "samples", None) for each in (tested, known))
    places: list[Any]
    trained_places: list[Any]
    if tested is known:
        places, trained_places = list(rows), list(trained_rows)
    elif isinstance(paths, Sequence) and isinstance(trained_paths, Sequence):
        # Two objects over one folder, such as one with and one without random augmentation.
        places = [_path_in(paths, row) for row in rows]
        trained_places = [_path_in(trained_paths, row) for row in trained_rows]
    else:
        return {}
    held = {place: sample for sample in reversed(trained_ids.tolist()) if (place := trained_places[sample]) is not None}
    duplicates = {sample: held[place] for sample in ids.tolist() if (place := places[sample]) in held}
    # A text may be something other than a path.
    return {i: duplicate for i, duplicate in duplicates.items() if tested is known or os.path.exists(places[i])}


def _behind(dataset: Any) -> tuple[Any, Sequence[int]]:
    """Return the dataset behind a subset, and each sample's row in it."""
    rows: Sequence[int] = range(len(dataset))
    while isinstance(dataset, Subset):
        indices = dataset.indices
        rows, dataset = [int(indices[row]) for row in rows], dataset.dataset
    return dataset, rows


def _path_in(samples: Sequence[Any], row: int) -> Any:
    """Return the path of a sample in a list like that of an ImageFolder; None if it has none."""
    entry = samples[row] if row < len(samples) else None
    path = entry[0] if isinstance(entry, tuple) and entry else entry
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None


def samples_to_decode(ids: Ids, trained_ids: Ids) -> tuple[Ids, Ids]:
    """Return a few evaluated samples, and the training samples with the same ids and a few others."""
    chosen = evenly(ids, MOST_DECODED)
    return chosen, np.union1d(np.intersect1d(chosen, trained_ids), evenly(trained_ids, MOST_TRAINED_DECODED))


def digests_of_decoded(image_set: ImageSet, ids: Ids) -> Digests:
    """Return digests of decoded images, without broken ones; loading the pixels reports these."""
    found = {}
    for sample in ids.tolist():
        with suppress(RefusedError):
            found[sample] = hashlib.blake2b(image_set.decode(sample).tobytes(), digest_size=16).digest()
    return found
