"""Prefetches announced rows in a thread, once reading has turned out to be slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hvfreeze.cache.file.format import Keys, pack_keys
from hvfreeze.cache.levels import Levels
from hvfreeze.cache.store import RowLocation, Store

Found = tuple[Store, Tensor]
"""The store of a batch's cached rows, and the rows, (batch_rows, ...)."""


@dataclass(eq=False, slots=True)
class Request:
    """A requested batch: samples and views, padded keys, and the location of the rows if known."""

    sample_ids: Keys
    views: Keys
    keys: Keys
    found: tuple[Store, RowLocation] | None = None

    def is_for(self, sample_ids: Keys, views: Keys) -> bool:
        """Return True if this is the request for that batch."""
        same = self.sample_ids is sample_ids and self.views is views
        return same or (np.array_equal(self.sample_ids, sample_ids) and np.array_equal(self.views, views))


def requests_for(batches: Sequence[tuple[Keys, Keys]], *, pad: Callable[[Keys], Keys]) -> list[Request]:
    """Return requests for (sample ids, views); packing all keys at once is several times faster."""
    if not batches:
        return []
    keys = pack_keys(*(np.concatenate(column) for column in zip(*batches, strict=True)))
    each = np.split(keys, np.cumsum([len(ids) for ids, _ in batches])[:-1])
    return [Request(*batch, pad(own)) for batch, own in zip(batches, each, strict=True)]


class Prefetcher:
    """Reads announced batches ahead of their use, without changing the result.

    Attributes:
        upcoming: announced requests that were not used yet.
    """

    def __init__(self, levels: Levels) -> None:
        self.upcoming: deque[Request] = deque()
        self._levels, self._usual_excess = levels, 0.0
        self._started: deque[Future[Found | None]] = deque()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cache-reader")

    def announce(self, requests: Sequence[Request]) -> None:
        """Announce these requests, in order."""
        self.forget()
        self.upcoming = deque(requests)
        self.look_up()

    def next_for(self, sample_ids: Keys, views: Keys) -> Request | None:
        """Return the next announced request, if it is for this batch."""
        return self.upcoming[0] if self.upcoming and self.upcoming[0].is_for(sample_ids, views) else None

    def take(self, request: Request) -> Found | None:
        """Return the cached activations for `request`, None if some are missing; also works for requests not announced.

        Raises:
            CacheFault: a file cannot be trusted any more.
        """
        is_next = bool(self.upcoming) and self.upcoming[0] is request
        if is_next:
            self.upcoming.popleft()
        result = self._started.popleft().result() if is_next and self._started else self._read(request)
        if self._usual_excess > 0:
            # Two batches in advance.
            for position in range(len(self._started), min(2, len(self.upcoming))):
                self._started.append(self._reader.submit(self._read, self.upcoming[position]))
        return result

    def forget(self) -> None:
        """Drop prefetched rows and locations before the stores change. The announced order is kept."""
        while self._started:
            future = self._started.pop()
            if not future.cancel():
                future.exception()
        for request in self.upcoming:
            request.found = None

    def look_up(self) -> None:
        """Locate the announced rows in advance; `forget` undoes it."""
        found = self._levels.locate_batches([request.keys for request in self.upcoming])
        for request, place in zip(self.upcoming, found, strict=True):
            request.found = place

    def close(self) -> None:
        """Wait for a read in progress and stop."""
        self.upcoming.clear()
        self.forget()
        self._reader.shutdown(wait=True)

    def _read(self, request: Request) -> Found | None:
        found = request.found or self._levels.locate(request.keys)
        if found is None:
            return None
        start = time.perf_counter()
        activations = found[0].read_at(found[1])
        # A thread is for disks only, because computing needs the cores and memory bandwidth is shared. Handing a batch
        # from thread to thread costs half a millisecond, and rows in memory are read at more than 4 GB/s.
        excess = time.perf_counter() - start - 0.5e-3 - activations.nbytes / 4e9
        self._usual_excess += (excess - self._usual_excess) / 4
        return found[0], activations
