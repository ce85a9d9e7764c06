"""What the cache is told to count and to time, for the run's clock and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvfreeze.cache.compute import Counters

Phase = Callable[[str], AbstractContextManager[None]]
"""Called with "cache_read" or "cache_write", around what training waits for."""


class Meter:
    """Counts, and times what training waits for.

    Attributes:
        counters: what was counted so far.
    """

    def __init__(self, phase: Phase | None) -> None:
        """Begin at 0; `phase` is told what is timed."""
        self.counters = Counters()
        self._phase = phase or (lambda name: nullcontext())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Time the block as reading."""
        start = time.perf_counter()
        with self._phase("cache_read"):
            yield
        self.counters.read_seconds += time.perf_counter() - start

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Time the block as writing."""
        start = time.perf_counter()
        with self._phase("cache_write"):
            yield
        self.counters.write_seconds += time.perf_counter() - start
