"""What the cache is told of a run: what rows cost to compute, and how long they will serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hvfreeze.cache.compute import RunBlocks, permuted_batch_is_exact
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.names import directory_bytes
from hvfreeze.cache.planning.rates import Rates, measure_directory
from hvfreeze.config.sections import CacheConfig
from hvfreeze.runs.clock import PhaseClock

ROUNDED_TO = 9
"""Digits of an epoch's parts, which are ratios of steps."""


@dataclass
class Misses:
    """Seconds that the frozen prefix took, and what a batch costs that is computed from images."""

    cut: int = 0
    measured: float = 0.0
    """Of a batch, when the cut was tried."""
    seconds: float = 0.0
    batches: int = 0
    spent: float = 0.0
    """On all images and forwards so far, at whatever cut."""
    _loading: float = 0.0

    def restart(self, cut: int) -> None:
        """Begin anew at another cut."""
        self.cut, self.measured, self.seconds, self.batches = cut, 0.0, 0.0, 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the block's seconds, in which the images of a batch are loaded."""
        start = time.perf_counter()
        yield
        self._loading = time.perf_counter() - start
        self.spent += self._loading

    @contextmanager
    def running(self, start: int, stop: int) -> Iterator[None]:
        """Count the block's seconds, in which blocks start..stop-1 run: from images to the cut that is a batch."""
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.spent += took
        if (start, stop) == (0, self.cut):
            self.seconds += self._loading + took
            self.batches += 1
        self._loading = 0.0

    def seconds_per_batch(self) -> float:
        """Return the mean over the batches computed from images at this cut, or what one took when it was tried."""
        return self.seconds / self.batches if self.batches else self.measured


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
    epoch: int = 0
    """The one under way, or about to begin."""

    def trained(self, *, passes: float) -> tuple[float, float, float]:
        """Return passes over the training samples that are left, until the move, and the part of one that is over."""
        left = round(passes * self.epochs_left, ROUNDED_TO)
        return left, passes * self.epochs_until_move, math.ceil(left) - left

    def evaluated(self, *, passes: float) -> tuple[float, float, float]:
        """Return the same of evaluations, which are made at the ends of epochs and never in parts."""
        left = round(self.epochs_left, ROUNDED_TO)
        first = left - math.ceil(left) + 1
        before = max(0.0, self.epochs_until_move - first)
        until = before if math.isinf(before) else math.ceil(round(before, ROUNDED_TO))
        return max(1.0, passes * math.ceil(left)), passes * until, 0.0


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
