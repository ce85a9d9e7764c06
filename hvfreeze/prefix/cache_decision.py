"""Decides whether to cache the rows of a cut, on rank 0 from measurements of all ranks; records the outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.activations import Counters, RunBlocks, Shares, permuted_batch_is_exact, rows_are_independent
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget, free_bytes
from hvfreeze.cache.file.reader import directory_bytes, remove_left_over
from hvfreeze.cache.planning import (
    PROBE_BYTES,
    PROBE_SECONDS,
    CostMeasurement,
    Plan,
    Rates,
    make_plan,
    measure_directory,
    reads_again,
)
from hvfreeze.comm.agreement import gather_results
from hvfreeze.comm.world import World
from hvfreeze.data.shards import Ids
from hvfreeze.errors import UsageError
from hvfreeze.prefix.settings import CacheConfig
from hvfreeze.prefix.splits import RowSource
from hvfreeze.runs.clock import PhaseClock

ROUNDED_TO = 9
"""Decimal digits of fractions of an epoch, which are ratios of steps."""


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


class Sums(NamedTuple):
    """Totals of one rank since it began."""

    rows_read: int = 0
    """Totals at all cuts."""
    seconds_saved: float = 0.0


@dataclass(frozen=True)
class CutPeriod:
    """A plan, whether rows were stored for it, and the rank's totals when it was made."""

    cut: int
    plan: Plan
    kept: bool
    began: Sums


@dataclass
class Account:
    """Seconds saved: those of the requested batches computed from images, minus the actual ones, per period."""

    timer: PrefixTimer
    counters: Counters
    periods: list[CutPeriod] = field(default_factory=list)
    _saved: float = 0.0
    _batches: int = 0
    _took: float = 0.0

    def settle(self, cut: int) -> None:
        """Count the requests since the last call, while the cut was `cut`."""
        took = self.timer.spent + self.counters.read_seconds + self.counters.write_seconds
        if cut > 0:
            asked = self.counters.batches - self._batches
            self._saved += asked * self.timer.seconds_per_batch() - (took - self._took)
        self._batches, self._took = self.counters.batches, took

    def begin(self, cut: int, plan: Plan, *, kept: bool) -> None:
        """Record a plan; the previous period is complete."""
        self.periods.append(CutPeriod(cut, plan, kept, self.sums))

    @property
    def sums(self) -> Sums:
        """Totals up to the last `settle`."""
        return Sums(self.counters.rows_read + sum(self.counters.rows_advanced.values()), self._saved)

    def of_periods(self) -> list[Sums]:
        """Return the totals of each period."""
        ends = [*(period.began for period in self.periods), self.sums][1:]
        return [
            Sums(end.rows_read - period.began.rows_read, end.seconds_saved - period.began.seconds_saved)
            for period, end in zip(self.periods, ends, strict=True)
        ]


def summary_of(periods: Sequence[CutPeriod], done: Sequence[Sequence[Sums]]) -> dict[str, Any]:
    """Return the entries of summary.json's `cache` that compare predictions with outcomes.

    Args:
        periods: the periods of any rank, because plans are equal on all.
        done: the sums of each period, per rank; rows are summed over ranks, seconds averaged.
    """
    told = []
    for number, period in enumerate(periods):
        plan, ranks = period.plan, [rank[number] for rank in done]
        # What was to be read after the next move is that move's plan to tell, where there was one.
        last = number == len(periods) - 1
        told.append(
            {
                "cut": period.cut,
                "kept": period.kept,
                "reason": plan.reason,
                "rows_read_predicted": round(plan.rows_read + last * plan.rows_read_later),
                "rows_read": sum(rank.rows_read for rank in ranks),
                "seconds_saved_predicted": plan.seconds_saved + last * plan.seconds_saved_later,
                "seconds_saved": sum(rank.seconds_saved for rank in ranks) / len(ranks),
            }
        )
    names = ("rows_read_predicted", "rows_read", "seconds_saved_predicted", "seconds_saved")
    return {**{name: sum(entry[name] for entry in told) for name in names}, "stays": told}


@dataclass(frozen=True)
class PrefixTrial:
    """Properties of the prefix found with one batch."""

    exact: bool
    """Whether a row's bits do not depend on its place in a batch."""
    seconds: float
    """Seconds of a forward pass."""
    row_elements: int
    """Shape of the output for a sample."""
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

    def trained(self, *, passes: float) -> tuple[float, float, float]:
        """Return passes over the training samples: remaining ones, those until the cut changes, the fraction done."""
        left = round(passes * self.epochs_left, ROUNDED_TO)
        return left, passes * self.epochs_until_move, math.ceil(left) - left

    def evaluated(self, *, passes: float) -> tuple[float, float, float]:
        """Return the same for evaluations, which are held at the ends of epochs and are never partial."""
        left = round(self.epochs_left, ROUNDED_TO)
        first = left - math.ceil(left) + 1
        before = max(0.0, self.epochs_until_move - first)
        until = before if math.isinf(before) else math.ceil(round(before, ROUNDED_TO))
        return max(1.0, passes * math.ceil(left)), passes * until, 0.0


@dataclass
class CostInputs:
    """The run's contribution to a plan."""

    horizon: Callable[[], Horizon]
    suffix_seconds: Callable[[], float]
    """Seconds per batch of the rest of a step, which can hide reading and writing; 0 before the first step."""
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


def behind_prefix(clock: PhaseClock) -> float:
    """Return the clock's seconds behind the prefix so far."""
    spent = clock.read()
    return sum(spent[phase] for phase in ("backward", "allreduce", "optimizer"))


def suffix_seconds(clock: PhaseClock, *, batches: float, before: float = 0.0) -> float:
    """Return the seconds per batch behind the prefix, after so many batches; 0 before the first.

    `before` are seconds that other stages have spent there.
    """
    return max(0.0, behind_prefix(clock) - before) / batches if batches > 0 else 0.0


PROBED, MORE = 0.005, 2.0
"""Largest share of the possible saving that each part of a disk measurement may take, and the factor by which the
allowed time must grow before a directory is measured again."""


class Measured(NamedTuple):
    """The parameters of a disk measurement, and the measured rates."""

    most_bytes: int
    most_seconds: float
    rates: Rates


_MEASURED: dict[tuple[Path, int, int], Measured] = {}
"""Measurements by directory, row size and rows per batch."""


def rates_of(directory: Path, row_bytes: int, batch_rows: int, *, rows: int, at_stake: float) -> Rates:
    """Measure a directory once per row size, and its free space each time.

    Uses at most as many bytes as so many rows, and a small share of the seconds `at_stake`: for few rows a full
    measurement would take longer than the cache can save.

    Raises:
        CacheFault: the directory cannot be used.
    """
    key = directory, row_bytes, batch_rows
    most_bytes, most_seconds = min(PROBE_BYTES, row_bytes * rows), min(PROBE_SECONDS, PROBED * at_stake)
    known = _MEASURED.get(key)
    if known is None or known.most_bytes < most_bytes or MORE * known.most_seconds < most_seconds:
        rates = measure_directory(
            directory, row_bytes=row_bytes, batch_rows=batch_rows, most_bytes=most_bytes, most_seconds=most_seconds
        )
        _MEASURED[key] = Measured(most_bytes, most_seconds, rates)
        return rates
    try:
        return replace(known.rates, free_bytes=free_bytes(directory))
    except OSError as error:
        raise CacheFault(
            f"cache directory {directory} cannot be measured ({error}); choose another --cache-dir"
        ) from error


def open_budget(settings: CacheConfig, directory: Path, *, size: int) -> Budget:
    """Return one rank's share of --cache-limit, minus the files that already exist.

    Files of killed jobs are removed first.
    """
    if settings.cache != "off":
        remove_left_over(directory)
    limit = settings.limit_bytes()
    return Budget(None if limit is None else max(0, limit - directory_bytes(directory)) // size)


PROBED_ROW_BYTES = 4096
"""Plan input of a rank without rows; its plan is that of the others."""
FREE_OF_CHARGE = Rates(
    read_cold=0.0, read_warm=0.0, read_cpu=0.0, write=0.0, write_cpu=0.0, hash=0.0, free_bytes=1 << 62, filesystem=""
)
"""Rates of a directory that is not measured because no row would be read."""


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
        # Measuring a directory takes up to a second, which a run that would read nothing is spared.
        worth, shares = asked or reads_again(outlines), looks[0]

        def measure() -> CostMeasurement:
            if cut != self._cut:
                self._seconds_at[self._cut] = self.timer.seconds_per_batch()
                self._cut, self._trial, self._image_seconds, self.batch_invariant = cut, None, 0.0, True
                self.timer.restart(cut)
            if self._trial is None and (worth or any(shares.sources)):
                self._try()
            return self._measured(shares, rated=worth)

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
        split, horizon = self.source.split, self.costs.horizon()
        left = horizon.trained if split.name == "train" else horizon.evaluated
        epochs_left, until_move, passed = left(passes=split.passes_per_epoch)
        return CostMeasurement(
            image_seconds=0.0,
            prefix_seconds=0.0,
            suffix_seconds=0.0,
            batch_rows=self.source.recipe.batch_rows,
            rows=len(split.ids),
            views=split.num_views,
            row_bytes=0,
            padded=split.padded,
            epochs_left=epochs_left,
            epochs_until_move=until_move,
            passed=passed,
            present=shares.present,
            sources=shares.sources,
            rows_rewritten=shares.rows_to_complete,
            all_at_once=self.source.shared,
            memory_bytes=self.costs.memory_bytes,
            rates=FREE_OF_CHARGE,
            left_bytes=self.costs.budget.left_bytes,
        )

    def _measured(self, shares: Shares, *, rated: bool) -> CostMeasurement:
        """Return the plan input with the measured costs of a batch and, if `rated`, of the directory."""
        trial, recipe = self._trial, self.source.recipe
        stored = recipe.stored or (trial.dtype if trial else None)
        row_bytes = trial.row_elements * stored.itemsize if trial and stored else 0
        computed = replace(
            self._outline(shares),
            image_seconds=self._image_seconds,
            prefix_seconds=max(0.0, self.timer.seconds_per_batch() - self._image_seconds),
            suffix_seconds=self.costs.suffix_seconds() if self.source.split.name == "train" else 0.0,
            row_bytes=row_bytes,
        )
        found = replace(computed, rates=self._rates(computed)) if rated else computed
        spares = self._seconds_at.get(shares.source_cut, 0.0) - found.read_seconds
        return replace(found, source_spares=max(0.0, min(spares, found.compute_seconds)))

    def _rates(self, computed: CostMeasurement) -> Rates:
        """Return the rates of the directory, measured for a small share of the time that computing all rows takes."""
        return rates_of(
            self.costs.directory,
            computed.row_bytes or PROBED_ROW_BYTES,
            computed.batch_rows,
            rows=computed.rows * computed.views,
            at_stake=computed.compute_seconds * computed.steps * computed.epochs_left,
        )
