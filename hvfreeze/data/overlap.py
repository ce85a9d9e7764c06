"""Training images among those that accuracy is measured on: found by their pixels, their files or where they come from.

Accuracy counts an answer that was learned by heart as right, so who reads it has to know.
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
"""Of a rank's evaluated images in memory that are looked at: a quarter of a second of work."""
MOST_FILES, MOST_TRAINED_FILES = 64, 1024
"""That are read of evaluated images and of training images, where their pixels are not in memory."""
MOST_DECODED, MOST_TRAINED_DECODED = 64, 512
"""That are decoded for it of images that have no files of their own to compare."""
MOST_TWIN_BYTES = 2**31
"""Of all ranks' training images in memory that are digested because their first pixels are equal: two seconds."""
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


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Training images that are the same picture and have different classes."""

    found: int
    looked_at: int
    trained: int
    """All training images, of which some may not have been looked at."""
    example: tuple[str, str]
    """What messages call two such images."""
    classes: tuple[str, str]
    """Theirs."""

    def describe(self) -> str:
        """Return a note for the user."""
        looked = f"{self.looked_at} looked at of " if self.looked_at < self.trained else ""
        return (
            f"of {looked}{plural(self.trained, 'training image')}, {self.found} have a twin in another class, such as "
            f"{self.example[0]} ({self.classes[0]}) and {self.example[1]} ({self.classes[1]}): one of the labels is "
            "wrong; remove one of each"
        )


def twins_in(digests: Digests, labels: Sequence[int]) -> list[int]:
    """Return the samples, ascending, whose digest another sample of another class has; `labels` are by sample."""
    classes: dict[bytes, set[int]] = {}
    for sample, digest in digests.items():
        classes.setdefault(digest, set()).add(labels[sample])
    return sorted(sample for sample, digest in digests.items() if len(classes[digest]) > 1)


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


def keys_of(first: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """Return (images,) a number for each image's first pixels: equal for equal ones, and seldom for others."""
    words = np.ascontiguousarray(first).view(np.uint8).reshape(len(first), -1, 8).view(np.uint64)[..., 0]
    odd = np.random.default_rng(1).integers(0, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    found: NDArray[np.uint64] = (words * odd).sum(1, dtype=np.uint64)
    return found


def files_of_equal_size(trained: FileSource, ids: Ids) -> Ids:
    """Return training samples whose files may be the same as another's by their sizes; a few, whole sizes at a time."""
    sizes = trained.num_bytes[ids]
    order = np.argsort(sizes, kind="stable")
    _, places, counts = np.unique(sizes[order], return_index=True, return_counts=True)
    chosen: list[int] = []
    for place, count in zip(places.tolist(), counts.tolist()):
        if count > 1 and len(chosen) + count <= MOST_TRAINED_FILES:
            chosen += order[place : place + count].tolist()
    return np.sort(ids[chosen])


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


def doubles_by_origin(evaluated: DatasetSource, ids: Ids, trained: DatasetSource, trained_ids: Ids) -> Doubles:
    """Return which samples are the same item of one data set behind both, as where that was divided by mistake."""
    (tested, rows), (known, trained_rows) = _behind(evaluated.dataset), _behind(trained.dataset)
    paths, trained_paths = (getattr(each, "samples", None) for each in (tested, known))
    places: list[Any]
    trained_places: list[Any]
    if tested is known:
        places, trained_places = list(rows), list(trained_rows)
    elif isinstance(paths, Sequence) and isinstance(trained_paths, Sequence):
        # Two objects over one folder, such as one with and one without random draws.
        places = [_path_in(paths, row) for row in rows]
        trained_places = [_path_in(trained_paths, row) for row in trained_rows]
    else:
        return {}
    held = {place: sample for sample in reversed(trained_ids.tolist()) if (place := trained_places[sample]) is not None}
    doubles = {sample: held[place] for sample in ids.tolist() if (place := places[sample]) in held}
    # Text that names no file may be no path.
    return {i: double for i, double in doubles.items() if tested is known or os.path.exists(places[i])}


def _behind(dataset: Any) -> tuple[Any, Sequence[int]]:
    """Return the data set of which one is a part, and the row there of each sample."""
    rows: Sequence[int] = range(len(dataset))
    while isinstance(dataset, Subset):
        indices = dataset.indices
        rows, dataset = [int(indices[row]) for row in rows], dataset.dataset
    return dataset, rows


def _path_in(samples: Sequence[Any], row: int) -> Any:
    """Return the path of a sample in a list such as that of a data set of folders, None where it has none."""
    entry = samples[row] if row < len(samples) else None
    path = entry[0] if isinstance(entry, tuple) and entry else entry
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None


def samples_to_decode(ids: Ids, trained_ids: Ids) -> tuple[Ids, Ids]:
    """Return a few evaluated samples, and of the training samples those of the same numbers and a few others."""
    chosen = evenly(ids, MOST_DECODED)
    return chosen, np.union1d(np.intersect1d(chosen, trained_ids), evenly(trained_ids, MOST_TRAINED_DECODED))


def digests_of_decoded(image_set: ImageSet, ids: Ids) -> Digests:
    """Return digests of decoded images; of those that cannot be decoded whoever loads the pixels tells."""
    found = {}
    for sample in ids.tolist():
        with suppress(RefusedError):
            found[sample] = hashlib.blake2b(image_set.decode(sample).tobytes(), digest_size=16).digest()
    return found
