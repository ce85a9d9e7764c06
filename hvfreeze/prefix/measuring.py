"""What the cache is told of a run: which rows there are, what they would cost to compute, how long they will serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.compute import RunBlocks, permuted_batch_is_exact
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.cache.rates import Rates, measure_directory
from hvfreeze.chain.blocks import Chain
from hvfreeze.data.decoding import Images
from hvfreeze.data.draws import Ids
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.runs.moves import Move


@dataclass(frozen=True)
class Split:
    """The samples of one split that this rank asks for, and what identifies them."""

    name: str
    """`train` or `test`."""
    identity: str
    images: Images
    ids: Ids
    """(N,) samples that this rank may store."""
    passes_per_epoch: float = 1.0
    """How often they are all asked for."""

    @property
    def num_views(self) -> int:
        """Distinct views of a sample."""
        return max(1, self.images.transform.augment.num_views)

    def universe(self) -> tuple[Ids, Ids]:
        """Return (sample ids, views), (N x views,) each: every row that this rank may store."""
        views = np.arange(self.num_views, dtype=np.int64)
        return np.tile(self.ids, self.num_views), np.repeat(views, len(self.ids))


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


@dataclass
class Outlook:
    """What the plan must know of the run."""

    freezer: Freezer
    clock: PhaseClock
    budget: Budget
    directory: Path
    _trials: dict[int, Trial] = field(default_factory=dict)

    def trial(self, cut: int, run: RunBlocks, images: Tensor) -> Trial:
        """Return how the prefix fares with a batch, (B, C, H, W); tried once at a cut, for both splits."""
        if cut not in self._trials:
            self._trials = {cut: try_prefix(lambda x: run(x, 0, cut), images)}
        return self._trials[cut]

    def suffix_seconds(self) -> float:
        """Return the seconds of a step's part that reading and writing can hide behind; 0 before the first step."""
        spent = self.clock.read()
        return sum(spent[phase] for phase in ("backward", "allreduce", "optimizer")) / max(1, self.freezer.step)


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


def prefix_digest(chain: Chain, cut: int) -> str:
    """Return a digest of the first `cut` blocks' parameters and buffers."""
    return digest_tensors([*chain.named_parameters(0, cut), *chain.named_buffers(0, cut)])


def rounded_before(history: Sequence[Move]) -> list[int]:
    """Return the cuts, ascending, at which rows of the present cut were kept on the way: those that never thawed."""
    via: list[int] = []
    for move in history:
        via = [*(earlier for earlier in via if earlier < move.cut), move.cut]
    return [cut for cut in via[:-1] if cut > 0]
