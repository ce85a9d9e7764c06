"""What the cache is told of a run: what rows cost to compute, and how long they will serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.cache.compute import Counters, RunBlocks, permuted_batch_is_exact
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.names import directory_bytes
from hvfreeze.cache.rates import Rates, measure_directory
from hvfreeze.config.sections import CacheConfig
from hvfreeze.runs.clock import PhaseClock


@dataclass
class Misses:
    """Seconds that batches cost which were not cached: what a batch that is read saves."""

    measured: float = 0.0
    seconds: float = 0.0
    batches: int = 0

    def restart(self, measured: float) -> None:
        """Begin anew at another cut, where a batch took `measured` seconds when it was tried."""
        self.measured, self.seconds, self.batches = measured, 0.0, 0

    @contextmanager
    def timed(self, *, batches: int, counts: bool = True) -> Iterator[None]:
        """Add the block's seconds, which complete `batches` batches."""
        start = time.perf_counter()
        yield
        if counts:
            self.seconds += time.perf_counter() - start
            self.batches += batches

    def seconds_per_batch(self) -> float:
        """Return the mean over the batches computed from images at this cut, or what one took when it was tried."""
        return self.seconds / self.batches if self.batches else self.measured


@dataclass
class Savings:
    """Seconds that rows which were read would have cost to compute, waiting for them not taken off."""

    misses: Misses
    seconds: float = 0.0
    _read: int = 0
    _advanced: dict[int, int] = field(default_factory=dict)
    _seconds_at: dict[int, float] = field(default_factory=dict)

    def count(self, counters: Counters, *, cut: int, batch_rows: int) -> None:
        """Count what was read since the last call, while the cut stood at `cut`."""
        self._seconds_at[cut] = self.misses.seconds_per_batch()
        rows_by_cut = dict(counters.rows_advanced)
        rows_by_cut[cut] = rows_by_cut.get(cut, 0) + counters.rows_read - self._read
        for earlier, rows in rows_by_cut.items():
            batches = (rows - self._advanced.get(earlier, 0)) / batch_rows
            self.seconds += batches * self._seconds_at.get(earlier, 0.0)
        self._read, self._advanced = counters.rows_read, dict(counters.rows_advanced)


@dataclass(frozen=True)
class Trial:
    """What one batch told of the prefix."""

    exact: bool
    """Whether the rows' bits do not depend on their places in the batch."""
    seconds: float
    """Of a forward."""
    row_elements: int
    """Of the output for a sample."""
    dtype: torch.dtype
    """Of the output."""


class Horizon(NamedTuple):
    """How long the rows of a cut will serve, from now on."""

    epochs_left: float
    epochs_until_move: float
    """Until the cut moves; infinity where it is fixed."""


@dataclass
class Outlook:
    """What the plan must know of the run."""

    horizon: Callable[[], Horizon]
    suffix_seconds: Callable[[], float]
    """Seconds of a batch's part in a step that reading and writing can hide behind; 0 before the first step."""
    budget: Budget
    directory: Path
    memory_bytes: int
    """That the page cache may take for this rank."""
    _trials: dict[int, Trial] = field(default_factory=dict)

    def trial(self, cut: int, run: RunBlocks, images: Tensor) -> Trial:
        """Return how the prefix fares with a batch, (B, C, H, W); tried once at a cut, for both splits."""
        if cut not in self._trials:
            self._trials = {cut: try_prefix(lambda x: run(x, 0, cut), images)}
        return self._trials[cut]


def suffix_seconds(clock: PhaseClock, *, batches: float) -> float:
    """Return what the clock says of a batch behind the prefix, after so many batches; 0 before the first."""
    spent = clock.read()
    return sum(spent[phase] for phase in ("backward", "allreduce", "optimizer")) / max(1, batches)


def try_prefix(run_prefix: Callable[[Tensor], Tensor], images: Tensor) -> Trial:
    """Return what two forwards with a batch, (B, C, H, W), tell of a frozen prefix."""
    seconds, outputs = [], []

    def run(x: Tensor) -> Tensor:
        start = time.perf_counter()
        outputs.append(run_prefix(x))
        seconds.append(time.perf_counter() - start)
        return outputs[-1]

    exact = permuted_batch_is_exact(run, images)
    # The first forward also brings libraries and memory up to speed.
    return Trial(exact, seconds[-1], row_elements=outputs[-1][0].numel(), dtype=outputs[-1].dtype)


@lru_cache
def rates_of(directory: Path, row_bytes: int, batch_rows: int) -> Rates:
    """Measure a directory once per size of row."""
    return measure_directory(directory, row_bytes=row_bytes, batch_rows=batch_rows)


def open_budget(settings: CacheConfig, place: Path, *, size: int) -> Budget:
    """Return one rank's share of --cache-limit, of which files that are there already have used their part."""
    limit = settings.limit_bytes()
    return Budget(None if limit is None else max(0, limit - directory_bytes(place)) // size)
