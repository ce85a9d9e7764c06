"""The pixels of a rank's samples: decoded once into memory if they fit a budget, else streamed by threads."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.images import ArraySource, BrokenImagesError
from hvfreeze.data.reading import PixelArray, TooLargeError
from hvfreeze.data.shards import Ids
from hvfreeze.data.views import Augment, Transform
from hvfreeze.data.windows import Windows
from hvfreeze.errors import RefusedError

_log = logging.getLogger(__name__)

MOST_DIGESTED_BYTES = 2**32
"""Pixels of a dataset to hash, in bytes over all ranks; one second of work per gigabyte."""
_CHUNK = 64
_BATCHES_AHEAD = 4


def find_broken(image_set: ImageSet, *, share: int = 0, shares: int = 1, workers: int = 1) -> dict[int, str]:
    """Decode a share of an image set; return the samples that cannot be decoded, with the reasons.

    Raises:
        TooLargeError: an image exceeds the size limit.
    """
    return _decode(image_set, np.arange(share, len(image_set), shares), None, workers=workers)


def _decode(image_set: ImageSet, ids: Ids, pixels: PixelArray | None, *, workers: int) -> dict[int, str]:
    """Decode samples into `pixels`, if given; return the broken samples with the reasons."""

    def decode(start: int) -> dict[int, str]:
        some = ids[start : start + _CHUNK]
        rows = np.empty((len(some), *image_set.image_shape), np.uint8) if pixels is None else pixels[start:]
        return _decode_into(image_set, some, rows[: len(some)])

    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        found = pool.map(decode, range(0, len(ids), _CHUNK))
        return {row: reason for part in found for row, reason in part.items()}


@dataclass(frozen=True, eq=False)
class Pool:
    """Shared memory for pixels; each process decodes a part of them."""

    ids: Ids
    """Ids of all samples in the pool, (N,)."""
    pixels: PixelArray
    """Pixels, (N, C, H, W)."""
    mine: slice
    """Rows that this process decodes. The others are valid once all processes are done."""


def open_pool(image_set: ImageSet) -> Pool | None:
    """Return the array that already holds an image set's images; None if there is none."""
    source = image_set.source
    if not isinstance(source, ArraySource) or not source.kept:
        return None
    return Pool(np.arange(len(image_set)), source.pixels, slice(0))


class MemoryPixels:
    """All pixels of the given samples in memory."""

    def __init__(
        self,
        image_set: ImageSet,
        ids: Ids,
        *,
        workers: int,
        pool: Pool | None = None,
    ) -> None:
        """Decode the samples.

        Args:
            image_set: The split that `ids` are rows of.
            ids: The samples to make available.
            workers: Decoding threads.
            pool: Shared memory with the samples, decoded or being decoded; None allocates memory and decodes all.

        Raises:
            BrokenImagesError: Images are damaged or unreadable; names them.
        """
        if pool is None:
            pool = Pool(ids, np.empty((len(ids), *image_set.image_shape), dtype=np.uint8), slice(len(ids)))
        self._pixels = torch.from_numpy(pool.pixels)
        rows = np.full(len(image_set), -1, dtype=np.int64)
        rows[pool.ids] = np.arange(len(pool.ids))
        self._row_of = np.full(len(image_set), -1, dtype=np.int64)
        self._row_of[ids] = rows[ids]
        broken = _decode(image_set, pool.ids[pool.mine], pool.pixels[pool.mine], workers=workers)
        if broken:
            raise BrokenImagesError(list(broken.values()))

    def fetch(self, ids: Ids) -> Tensor:
        """Return (B, C, H, W) uint8, row i of sample ids[i]; raises KeyError for a sample that was not loaded."""
        rows = self._row_of[ids]
        if rows.size and rows.min() < 0:
            raise KeyError(f"sample {ids[rows.argmin()]} is not among those loaded")
        return self._pixels.index_select(0, torch.from_numpy(rows))

    @property
    def bytes_each(self) -> int:
        """Bytes per image."""
        return int(np.prod(self._pixels.shape[1:]))

    def at(self, ids: Ids, places: NDArray[np.int64]) -> PixelArray:
        """Return the pixels of each sample at the flat indices `places`, (B, places) uint8."""
        flat = self._pixels.numpy().reshape(len(self._pixels), self.bytes_each)
        return flat[np.ix_(self._row_of[ids], places)]

    def content(self, ids: Ids) -> int:
        """Return a digest of the samples that does not depend on how they are sharded.

        It is the sum, modulo 2^64, of a digest of each sample's id and pixels. Large sets are sampled.
        """
        rarely = -(-len(self._row_of) * self.bytes_each // MOST_DIGESTED_BYTES)
        total, pixels = 0, self._pixels.numpy()
        for sample in ids[ids % max(1, rarely) == 0].tolist():
            row = pixels[self._row_of[sample]]
            digest = hashlib.blake2b(row.data, digest_size=8, key=sample.to_bytes(8, "little")).digest()
            total = (total + int.from_bytes(digest, "little")) % 2**64
        return total

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Do nothing: everything is in memory."""


Decoding = tuple[Tensor, list[Future[dict[int, str]]]]
"""A batch's pixels, and its decoding threads' results: the broken samples with the reasons."""


class StreamedPixels:
    """Pixels that are decoded shortly before they are needed, a few batches at a time.

    The threads end with the object.
    """

    def __init__(self, image_set: ImageSet, *, workers: int) -> None:
        self._image_set = image_set
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._plan = deque[Ids]()
        """Announced batches that are not fetched yet."""
        self._started = deque[Decoding]()
        """The first of them, decoded or being decoded."""

    def fetch(self, ids: Ids) -> Tensor:
        """Return (B, C, H, W) uint8, row i of sample ids[i]; waits until the threads have decoded them.

        Raises:
            RefusedError: an image is damaged or unreadable; names the file.
        """
        skipped = next((place for place, planned in enumerate(self._plan) if np.array_equal(planned, ids)), None)
        if skipped is None:
            decoding = self._start(ids)
        else:
            for _ in range(skipped):
                self._plan.popleft()
                self._cancel(1)
            self._plan.popleft()
            decoding = self._started.popleft() if self._started else self._start(ids)
            self._look_ahead()
        pixels, futures = decoding
        for future in futures:
            broken = list(future.result().values())
            if broken:
                raise BrokenImagesError(broken)
        return pixels

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Announce the batches that may be fetched next, in this order; replaces the previous announcement.

        Threads decode at most four batches ahead.
        """
        self._cancel(len(self._started))
        self._plan = deque(batches)
        self._look_ahead()

    def _start(self, ids: Ids) -> Decoding:
        pixels = torch.empty((len(ids), *self._image_set.image_shape), dtype=torch.uint8)
        chunk = max(1, -(-len(ids) // self._workers))
        starts = range(0, len(ids), chunk)
        return pixels, [
            self._pool.submit(_decode_into, self._image_set, ids[i : i + chunk], pixels[i : i + chunk].numpy())
            for i in starts
        ]

    def _look_ahead(self) -> None:
        for ids in list(islice(self._plan, len(self._started), _BATCHES_AHEAD)):
            self._started.append(self._start(ids))

    def _cancel(self, batches: int) -> None:
        for _ in range(min(batches, len(self._started))):
            for future in self._started.popleft()[1]:
                future.cancel()


def load_pixels(
    image_set: ImageSet,
    ids: Ids,
    *,
    budget_bytes: int,
    workers: int,
    pool: Pool | None = None,
) -> MemoryPixels | StreamedPixels:
    """Return the pixels of the samples `ids`: in memory if they fit `budget_bytes`, else streamed.

    Args:
        image_set: The split that `ids` are rows of.
        ids: The samples that this rank may fetch.
        budget_bytes: Memory for the decoded pixels, one byte per value.
        workers: Decoding threads.
        pool: Shared memory with all of the samples; see `MemoryPixels`.

    Raises:
        RefusedError: An image is damaged or unreadable. Streamed images raise it at `fetch`.
        UsageError: An image has another size than the others. Streamed images raise it at `fetch`.
    """
    pool = pool or open_pool(image_set)
    needed = 0 if pool else len(ids) * int(np.prod(image_set.image_shape))
    if needed > budget_bytes:
        _log.info("%d images need %d bytes, the budget is %d: streaming them", len(ids), needed, budget_bytes)
        return StreamedPixels(image_set, workers=workers)
    started = time.perf_counter()
    pixels = MemoryPixels(image_set, ids, workers=workers, pool=pool)
    seconds = time.perf_counter() - started
    decoded = len(pool.ids[pool.mine]) if pool else len(ids)
    rate = decoded / max(seconds, 1e-9)
    _log.info("decoded %d images in %.1f s (%.0f images/s, %d threads)", decoded, seconds, rate, workers)
    return pixels


@dataclass(frozen=True)
class Images:
    """The images of this rank's samples in any augmented view, as floats."""

    pixels: MemoryPixels | StreamedPixels
    transform: Transform
    labels: Tensor
    """Labels of all samples of the split, in the task's form."""

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return (B, C, S, S) float32, channels last, augmented and normalised; row i shows view views[i] of ids[i]."""
        images = self.transform(self.pixels.fetch(ids), ids=ids, views=views)
        return images.contiguous(memory_format=torch.channels_last)

    def labels_of(self, ids: Ids, views: Ids) -> Tensor:
        """Return the labels of B samples."""
        return self.labels[torch.from_numpy(ids)]

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Announce the next samples to the decoding threads, in order."""
        self.pixels.prefetch(batches)

    def shown(self, augment: Augment, *, mirrors: bool) -> Images:
        """Return the same pixels with another augmentation, with or without horizontal flips."""
        return replace(self, transform=replace(self.transform, augment=augment, flips=mirrors))


Inputs = Images | Windows
"""The model inputs and labels of this rank's samples."""


def _decode_into(image_set: ImageSet, ids: Ids, rows: PixelArray) -> dict[int, str]:
    broken = {}
    for row, sample_id in zip(rows, ids, strict=True):
        try:
            row[:] = image_set.decode(int(sample_id))
        except TooLargeError:
            raise
        except RefusedError as error:
            broken[int(sample_id)] = str(error)
    return broken
