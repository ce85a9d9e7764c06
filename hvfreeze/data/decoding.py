"""The pixels of a rank's samples: decoded once into memory when they fit a budget, else streamed through threads."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

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
"""Of a set's pixels, all ranks together: a second of work for each gigabyte."""
_CHUNK = 64
_BATCHES_AHEAD = 4


def find_broken(image_set: ImageSet, *, share: int = 0, shares: int = 1, workers: int = 1) -> dict[int, str]:
    """Return the samples of a share of an image set that cannot be decoded, and why; every image is decoded.

    Raises TooLargeError where one is larger than may be opened.
    """

    def look(some: Ids) -> dict[int, str]:
        return _decode_into(image_set, some, np.empty((len(some), *image_set.image_shape), dtype=np.uint8))

    ids = np.arange(share, len(image_set), shares, dtype=np.int64)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        found = pool.map(look, [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)])
        return {row: reason for part in found for row, reason in part.items()}


@dataclass(frozen=True, eq=False)
class Pool:
    """Memory for pixels that also others read, of whom each decodes a part."""

    ids: Ids
    """(N,) of all samples in it, each once."""
    pixels: PixelArray
    """(N, C, H, W)."""
    mine: slice
    """The rows to decode; all are needed only after all others have decoded theirs."""


def open_pool(image_set: ImageSet) -> Pool | None:
    """Return the array that an image set's images are in already, None where there is none."""
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
            ids: The samples that may be fetched later.
            workers: Decoding threads.
            pool: Where the samples are, or are being, decoded to; None takes memory for them and decodes all.

        Raises:
            BrokenImagesError: Images are damaged or cannot be read; names them.
        """
        if pool is None:
            pool = Pool(ids, np.empty((len(ids), *image_set.image_shape), dtype=np.uint8), slice(len(ids)))
        self._pixels = torch.from_numpy(pool.pixels)
        rows = np.full(len(image_set), -1, dtype=np.int64)
        rows[pool.ids] = np.arange(len(pool.ids))
        self._row_of = np.full(len(image_set), -1, dtype=np.int64)
        self._row_of[ids] = rows[ids]
        own, out = pool.ids[pool.mine], self._pixels[pool.mine]
        starts = range(0, len(own), _CHUNK)
        threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        try:
            futures = [_submit(threads, image_set, own[i : i + _CHUNK], out[i : i + _CHUNK]) for i in starts]
            broken: list[str] = []
            for future in futures:
                broken += future.result().values()
            if broken:
                raise BrokenImagesError(broken)
        finally:
            threads.shutdown(cancel_futures=True)

    def fetch(self, ids: Ids) -> Tensor:
        """Return (B, C, H, W) uint8, row i of sample ids[i]; raises KeyError for a sample that was not given."""
        rows = self._row_of[ids]
        if rows.size and rows.min() < 0:
            raise KeyError(f"sample {ids[rows.argmin()]} is not among those loaded")
        return self._pixels.index_select(0, torch.from_numpy(rows))

    @property
    def bytes_each(self) -> int:
        """Of one image."""
        return int(np.prod(self._pixels.shape[1:]))

    def at(self, ids: Ids, places: NDArray[np.int64]) -> PixelArray:
        """Return (B, places) uint8, of each sample the pixels at `places` of C * H * W."""
        flat = self._pixels.numpy().reshape(len(self._pixels), self.bytes_each)
        return flat[np.ix_(self._row_of[ids], places)]

    def content(self, ids: Ids) -> int:
        """Return the sum, modulo 2^64, over samples of a digest of each one's number and pixels.

        So it does not depend on how samples are dealt out to ranks. Of large sets some samples are left out.
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

    def close(self) -> None:
        """Do nothing: no thread outlives the constructor."""


class StreamedPixels:
    """Pixels decoded shortly before they are needed; holds a few batches at a time."""

    def __init__(self, image_set: ImageSet, *, workers: int) -> None:
        self._image_set = image_set
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._plan: list[Ids] = []
        self._positions_of: dict[bytes, list[int]] = {}
        self._fetched = -1
        self._started: dict[int, tuple[Tensor, list[Future[dict[int, str]]]]] = {}
        self._next = 0

    def fetch(self, ids: Ids) -> Tensor:
        """Return (B, C, H, W) uint8, row i of sample ids[i]; waits only for what the threads have not decoded yet.

        Raises RefusedError, which names the file, where an image is damaged or cannot be read.
        """
        # The same samples come once for each view.
        known = self._positions_of.get(ids.tobytes(), [])
        position = next((place for place in known if place > self._fetched), -1)
        if position >= 0:
            self._fetched = position
            self._forget(before=position)
        pixels, futures = self._started.pop(position) if position in self._started else self._start(ids)
        if position >= 0:
            self._next = max(self._next, position + 1)
            self._look_ahead()
        for future in futures:
            broken = list(future.result().values())
            if broken:
                raise BrokenImagesError(broken)
        return pixels

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Hints that these batches will be fetched, in this order, some perhaps never. Replaces the last hint.

        Only the next four are worked on.
        """
        self._forget(before=len(self._plan))
        self._plan = list(batches)
        self._positions_of = {}
        for position, ids in enumerate(self._plan):
            self._positions_of.setdefault(ids.tobytes(), []).append(position)
        self._fetched = -1
        self._next = 0
        self._look_ahead()

    def close(self) -> None:
        """End the threads; batches that were started are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, ids: Ids) -> tuple[Tensor, list[Future[dict[int, str]]]]:
        pixels = torch.empty((len(ids), *self._image_set.image_shape), dtype=torch.uint8)
        chunk = max(1, -(-len(ids) // self._workers))
        starts = range(0, len(ids), chunk)
        return pixels, [_submit(self._pool, self._image_set, ids[i : i + chunk], pixels[i : i + chunk]) for i in starts]

    def _look_ahead(self) -> None:
        while self._next < len(self._plan) and len(self._started) < _BATCHES_AHEAD:
            self._started[self._next] = self._start(self._plan[self._next])
            self._next += 1

    def _forget(self, *, before: int) -> None:
        for position in [position for position in self._started if position < before]:
            _, futures = self._started.pop(position)
            for future in futures:
                future.cancel()


def load_pixels(
    image_set: ImageSet,
    ids: Ids,
    *,
    budget_bytes: int,
    workers: int,
    pool: Pool | None = None,
) -> MemoryPixels | StreamedPixels:
    """Return the pixels of the samples `ids`: in memory when they are there or fit `budget_bytes`, else streamed.

    Args:
        image_set: The split that `ids` are rows of.
        ids: The samples that this rank may fetch.
        budget_bytes: What the decoded pixels may take, one byte per value.
        workers: Decoding threads.
        pool: Memory that has all of the samples, taken already; see `MemoryPixels`.

    Raises:
        RefusedError: An image is damaged or cannot be read (when streamed: at `fetch`).
        UsageError: An image has another size than the others (likewise).
    """
    pool = pool or open_pool(image_set)
    needed = 0 if pool else len(ids) * int(np.prod(image_set.image_shape))
    if needed > budget_bytes:
        _log.info("%d images need %d bytes, more than %d: they are streamed", len(ids), needed, budget_bytes)
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
    """Float images of any view of the samples that this rank holds."""

    pixels: MemoryPixels | StreamedPixels
    transform: Transform
    labels: Tensor
    """Of all samples of the set, as the task has them."""

    def load(self, ids: Ids, views: Ids) -> Tensor:
        """Return (B, C, S, S) float32, channels last, augmented and normalised; row i shows view views[i] of ids[i]."""
        images = self.transform(self.pixels.fetch(ids), ids=ids, views=views)
        return images.contiguous(memory_format=torch.channels_last)

    def labels_of(self, ids: Ids, views: Ids) -> Tensor:
        """Return the labels of B samples."""
        return self.labels[torch.from_numpy(ids)]

    def prefetch(self, batches: Iterable[Ids]) -> None:
        """Tell a streamed source which samples come next, in order."""
        self.pixels.prefetch(batches)

    def shown(self, augment: Augment, *, mirrors: bool) -> Images:
        """Return the same pixels in other views, with mirror images among them or without."""
        return replace(self, transform=replace(self.transform, augment=augment, flips=mirrors))


Inputs = Images | Windows
"""What a model is given of the samples that this rank holds, and their labels."""


def _submit(pool: ThreadPoolExecutor, image_set: ImageSet, ids: Ids, pixels: Tensor) -> Future[dict[int, str]]:
    return pool.submit(_decode_into, image_set, ids, pixels.numpy())


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
