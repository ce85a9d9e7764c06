"""Decides whether to cache the rows of a cut, on rank 0 from measurements of all ranks; records the outcome."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.activations import Counters, RunBlocks, Shares, permuted_batch_is_exact, rows_are_independent
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget, free_bytes
from hvfreeze.cache.file.reader import directory_bytes, remove_left_over
from hvfreeze.cache.planning import (
    PROBE_BYTES,
    CostMeasurement,
    Plan,
    Rates,
    make_plan,
    measure_directory,
    reads_again,
)
from hvfreeze.comm.agreement import gather_results
from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.data.shards import Ids
from hvfreeze.errors import UsageError
from hvfreeze.prefix.splits import RowSource, Split


@dataclass
class PrefixTimer:
    """Seconds of the frozen prefix, and of a batch that is computed from images."""

    cut: int = 0
    measured: float = 0.0
    """Seconds of a batch in the trial at this cut."""
    seconds: float = 0.0
    batches: int = 0
    spent: float = 0.0
    """Seconds of all images and forward passes so far, at any cut."""
    _loading: float = 0.0

    def restart(self, cut: int) -> None:
        """Start again at another cut."""
        self.cut, self.measured, self.seconds, self.batches = cut, 0.0, 0.0, 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure the block, which loads the images of a batch."""
        start = time.perf_counter()
        yield
        self._loading = time.perf_counter() - start
        self.spent += self._loading

    @contextmanager
    def running(self, start: int, stop: int) -> Iterator[None]:
        """Measure the block, which runs blocks start..stop-1; a run from the images to the cut is a batch."""
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.spent += took
        if (start, stop) == (0, self.cut):
            self.seconds += self._loading + took
            self.batches += 1
        self._loading = 0.0

    def seconds_per_batch(self) -> float:
        """Return the mean seconds of batches computed from images at this cut, or those of the trial."""
        return self.seconds / self.batches if self.batches else self.measured


@dataclass
class Account:
    """Rows read at all cuts, and seconds saved: those of computing all requested batches minus the actual ones."""

    timer: PrefixTimer
    counters: Counters
    seconds_saved_predicted: float = 0.0
    """The sum of the plans' predictions, each until the cut changes."""
    seconds_saved: float = 0.0
    _batches: int = 0
    _took: float = 0.0

    def settle(self, cut: int) -> None:
        """Count the requests since the last call, while the cut was `cut`."""
        took = self.timer.spent + self.counters.read_seconds + self.counters.write_seconds
        if cut > 0:
            asked = self.counters.batches - self._batches
            self.seconds_saved += asked * self.timer.seconds_per_batch() - (took - self._took)
        self._batches, self._took = self.counters.batches, took

    @property
    def rows_read(self) -> int:
        """Rows read at the current and at shallower cuts."""
        return self.counters.rows_read + sum(self.counters.rows_advanced.values())


@dataclass(frozen=True)
class PrefixTrial:
    """Properties of the prefix found with one batch."""

    exact: bool
    """Whether a row's bits do not depend on its place in a batch."""
    seconds: float
    """Seconds of a forward pass."""
    row_elements: int
    """Number of elements of the output for a sample."""
    dtype: torch.dtype
    """Type of the output."""


def try_prefix(run_prefix: Callable[[Tensor], Tensor], images: Tensor) -> PrefixTrial:
    """Return properties of a frozen prefix from three forward passes of a batch, (B, C, H, W).

    Raises UsageError if a sample's output depends on the other samples of its batch.
    """
    seconds, outputs = [], []

    def run(x: Tensor) -> Tensor:
        start = time.perf_counter()
        outputs.append(run_prefix(x))
        seconds.append(time.perf_counter() - start)
        return outputs[-1]

    exact = permuted_batch_is_exact(run, images)
    if not rows_are_independent(run_prefix, images, outputs[0]):
        raise UsageError(
            "the frozen blocks normalise with batch statistics (BatchNorm without running statistics), so a "
            "sample's output depends on its batch and cannot be cached; use --cache off, or layers with running "
            "statistics"
        )
    # The first forward also brings libraries and memory up to speed.
    return PrefixTrial(exact, seconds[-1], row_elements=outputs[-1][0].numel(), dtype=outputs[-1].dtype)


class Horizon(NamedTuple):
    """How long the rows of a cut will be used, from now on."""

    epochs_left: float
    epochs_until_move: float
    """Epochs until the cut changes; infinity if the cut is fixed."""
    epoch: int = 0
    """The current or next epoch."""

    def passes(self, split: Split) -> tuple[float, float]:
        """Return the passes over the samples of `split`: the remaining ones, and those until the cut changes.

        Evaluations are held at the ends of epochs, so they are never partial.
        """
        # Fractions of an epoch are ratios of steps, with rounding errors.
        left, until = round(self.epochs_left, 9), round(self.epochs_until_move, 9)
        each = split.passes_per_epoch
        if split.name == "train":
            return each * left, each * until
        return max(1.0, each * math.ceil(left)), each * (until if math.isinf(until) else max(0, math.ceil(until) - 1))


@dataclass
class CostInputs:
    """The run's contribution to a plan."""

    horizon: Callable[[], Horizon]
    budget: Budget
    directory: Path
    memory_bytes: int
    """Memory in bytes that the page cache may take for this rank."""
    _trials: dict[tuple[int, int], PrefixTrial] = field(default_factory=dict)

    def trial(self, cut: int, run: RunBlocks, images: Tensor) -> PrefixTrial:
        """Return the properties of the prefix for a batch, (B, C, H, W); tried once for each B at a cut."""
        if (cut, len(images)) not in self._trials:
            known = {key: trial for key, trial in self._trials.items() if key[0] == cut}
            self._trials = {**known, (cut, len(images)): try_prefix(lambda x: run(x, 0, cut), images)}
        return self._trials[cut, len(images)]


@cache
def rates_of(directory: Path, *, row_bytes: int, batch_rows: int, most_bytes: int, warm: bool) -> Rates:
    """Measure a directory once; see `measure_directory`."""
    return measure_directory(directory, row_bytes=row_bytes, batch_rows=batch_rows, most_bytes=most_bytes, warm=warm)


def open_budget(settings: CacheConfig, directory: Path, *, size: int) -> Budget:
    """Return one rank's share of --cache-limit, minus the files that already exist.

    Files of killed jobs are removed first.
    """
    if settings.cache != "off":
        remove_left_over(directory)
    limit = settings.limit_bytes()
    return Budget(None if limit is None else max(0, limit - directory_bytes(directory)) // size)


@dataclass
class Planner:
    """Plans caching for one split, at one cut after another.

    Attributes:
        batch_invariant: whether a row's bits at this cut do not depend on its place in a batch.
        exact: whether that was so at all cuts so far.
    """

    world: World
    source: RowSource
    costs: CostInputs
    timer: PrefixTimer
    batch_invariant: bool = True
    exact: bool = True
    _cut: int = 0
    _trial: PrefixTrial | None = None
    _image_seconds: float = 0.0
    _seconds_at: dict[int, float] = field(default_factory=dict)

    def plan(self, cut: int, look: Callable[[Sequence[tuple[Ids, Ids]]], Shares], *, asked: bool) -> Plan:
        """Return the plan for `cut`; the second time at a cut, it uses what training has measured since. Collective.

        Args:
            cut: number of frozen blocks.
            look: epochs, each as (sample ids, views) -> the cached share of each.
            asked: store rows whether that pays or not.

        Raises:
            CacheFault: the cache directory cannot be used on some rank; raised on all.
        """
        split, world = self.source.split, self.world
        epochs = split.coming(self.costs.horizon().epoch)
        looks: list[Shares] = []

        def outline() -> CostMeasurement:
            looks.append(look(epochs))
            return self._outline(looks[0])

        outlines = gather_results(world, outline, name=f"cache.look.{split.name}")
        # A run that would read nothing is spared the measurements.
        worth, shares = asked or reads_again(outlines), looks[0]

        def measure() -> CostMeasurement:
            if cut != self._cut:
                self._seconds_at[self._cut] = self.timer.seconds_per_batch()
                self._cut, self._trial, self._image_seconds, self.batch_invariant = cut, None, 0.0, True
                self.timer.restart(cut)
            if self._trial is None and (worth or shares.source_share > 0):
                self._try()
            return self._measure(shares, rated=worth)

        ranks = gather_results(world, measure, name=f"cache.measure.{split.name}")
        return world.broadcast_object(make_plan(ranks, asked=asked), name="cache.plan")

    def _try(self) -> None:
        """Load a batch and run it through the prefix, if there are samples."""
        split = self.source.split
        if len(split.ids):
            ids = np.resize(split.ids, self.source.recipe.batch_rows)
            start = time.perf_counter()
            images = split.images.load(ids, np.zeros_like(ids))
            self._image_seconds = time.perf_counter() - start
            self._trial = self.costs.trial(self._cut, self.source.run_blocks, images)
            self.timer.measured = self._image_seconds + self._trial.seconds
        self.batch_invariant = self._trial is None or self._trial.exact
        self.exact = self.exact and self.batch_invariant

    def _outline(self, shares: Shares) -> CostMeasurement:
        """Return the plan input that is known before any measurement."""
        split = self.source.split
        epochs_left, epochs_until_move = self.costs.horizon().passes(split)
        return CostMeasurement(
            rows=len(split.ids),
            views=split.num_views,
            batch_rows=self.source.recipe.batch_rows,
            padded=split.padded,
            epochs_left=epochs_left,
            epochs_until_move=epochs_until_move,
            present=shares.present,
            source_share=shares.source_share,
            all_at_once=self.source.shared,
            rows_rewritten=shares.rows_to_complete,
            left_bytes=self.costs.budget.left_bytes,
        )

    def _measure(self, shares: Shares, *, rated: bool) -> CostMeasurement:
        """Return the plan input with the measured costs of a batch and, if `rated`, of the directory."""
        outline, trial, directory = self._outline(shares), self._trial, self.costs.directory
        stored = self.source.recipe.stored or (trial.dtype if trial else None)
        row_bytes = trial.row_elements * stored.itemsize if trial and stored else 0
        num_bytes = outline.rows * outline.views * row_bytes
        found = replace(
            outline,
            image_seconds=self._image_seconds,
            prefix_seconds=max(0.0, self.timer.seconds_per_batch() - self._image_seconds),
            row_bytes=row_bytes,
            in_memory=num_bytes <= self.costs.memory_bytes,
        )
        if rated and row_bytes:
            rates = rates_of(
                directory,
                row_bytes=row_bytes,
                batch_rows=found.batch_rows,
                most_bytes=min(PROBE_BYTES, num_bytes),
                warm=found.in_memory,
            )
            free, filesystem = space_in(directory)
            found = replace(found, rates=rates, free_bytes=free, filesystem=filesystem)
        spares = self._seconds_at.get(shares.source_cut, 0.0) - found.read_seconds
        return replace(found, source_spares=max(0.0, min(spares, found.compute_seconds)))


def space_in(directory: Path) -> tuple[int, str]:
    """Return the free bytes of a directory, and a name of its file system.

    Raises:
        CacheFault: the directory is gone.
    """
    try:
        status = os.statvfs(directory)
        return free_bytes(directory), f"{status.f_fsid:x}-{status.f_blocks}"
    except OSError as error:
        raise CacheFault(
            f"cache directory {directory} cannot be measured ({error}); choose another --cache-dir"
        ) from error
