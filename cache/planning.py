"""Decides whether storing rows pays: compares computing a batch with reading it, over the epochs that remain.

It only chooses between alternatives with equal results. Types or numbers of views that would help are printed as
advice.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import FULL
from hvfreeze.cache.file.reader import MappedRows
from hvfreeze.cache.file.writer import write_at

PROBE_BYTES = 4 << 20
"""Bytes that are written to a directory, and read back, to measure it."""


@dataclass(frozen=True)
class Rates:
    """Costs of a directory in seconds per byte."""

    read: float = 0.0
    """Reading shuffled rows."""
    write: float = 0.0
    """Writing rows until they are safe on the disk, including hashing."""
    write_cpu: float = 0.0
    """The part of `write` that occupies a core; the rest is waiting."""


FULL_DISK = Rates(read=1e-8, write=1e-8)
"""Assumed rates of a full disk, which cannot be measured, but whose rows can be read."""


def measure_directory(directory: Path, *, row_bytes: int, batch_rows: int, most_bytes: int, warm: bool) -> Rates:
    """Measure `directory` by writing and reading a temporary file of at most `most_bytes`, at least a row.

    With `warm`, the rows are read from the page cache, else from the disk.

    Raises:
        CacheFault: the directory cannot be written.
    """
    row_bytes = min(row_bytes, PROBE_BYTES)
    num_rows = max(1, min(most_bytes, PROBE_BYTES) // row_bytes)
    content = np.random.default_rng(0).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            start, start_cpu = time.perf_counter(), time.thread_time()
            hashlib.sha256(content.data).digest()
            write_at(file.fileno(), memoryview(content).cast("B"), 0)
            os.fsync(file.fileno())
            written, written_cpu = time.perf_counter(), time.thread_time()
            if not warm:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = MappedRows(file.fileno(), offset=0, num_rows=num_rows, row_bytes=row_bytes, name="the probe file")
            opened = time.perf_counter()
            for rows in order.split(batch_rows):
                mapped.read(rows)
            read = time.perf_counter()
    except OSError as error:
        if error.errno in FULL:
            return FULL_DISK
        raise CacheFault(
            f"cache directory {directory} cannot be measured ({error}); choose another --cache-dir"
        ) from error
    seconds = (read - opened, written - start, written_cpu - start_cpu)
    return Rates(*(each / content.nbytes for each in seconds))


@dataclass(frozen=True, kw_only=True)
class CostMeasurement:
    """Measurements and plans of one rank; seconds are per batch."""

    rows: int
    """Samples of this rank."""
    views: int
    """Views of each sample."""
    batch_rows: int
    padded: bool = False
    """Whether the last batch is padded; if not, there are whole batches only."""
    epochs_left: float
    """Passes over all samples that remain; each uses the next view."""
    epochs_until_move: float = math.inf
    """Passes until the cut changes."""
    present: tuple[float, ...] = ()
    """Shares of the samples that are already cached in each of the next `views` epochs; empty is none."""
    all_at_once: bool = False
    """Missing rows are computed before training continues."""
    rows_rewritten: int = 0
    """Rows in an incomplete file, which are rewritten when it is completed."""
    left_bytes: int | None = None
    """Bytes of new rows that this rank's share of the budget still allows; None is unlimited."""
    free_bytes: int = 1 << 62
    """Free bytes of the disk."""
    filesystem: str = ""
    """Equal for directories on the same file system, also as seen from several hosts. Separate disks that look alike
    may be taken for one, which only makes the plan more cautious."""

    in_memory: bool = True
    """Whether the page cache has room for all rows."""
    row_bytes: int = 0
    image_seconds: float = 0.0
    """Loading and augmenting images."""
    prefix_seconds: float = 0.0
    rates: Rates = Rates()
    source_share: float = 0.0
    """Share of the rows that are cached at a shallower cut."""
    source_spares: float = 0.0
    """Seconds saved by starting from those rows."""

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.rows, max(1, self.batch_rows))
        return whole + (self.padded and rest > 0)

    @property
    def new_bytes(self) -> int:
        """Bytes that completing the cache allocates; 0 if it is complete."""
        missing = max(0, self.rows * self.views - round(sum(self.present) * self.rows))
        return (missing + self.rows_rewritten) * self.row_bytes if missing else 0

    @property
    def compute_seconds(self) -> float:
        """Seconds of a batch that is computed from images."""
        return self.image_seconds + self.prefix_seconds

    @property
    def read_seconds(self) -> float:
        """Seconds of reading a batch."""
        return self.rates.read * self.batch_rows * self.row_bytes

    @property
    def write_seconds(self) -> float:
        """Seconds that storing a batch adds to computing it, while which a thread writes the previous one."""
        batch_bytes = self.batch_rows * self.row_bytes
        return max(self.rates.write_cpu * batch_bytes, self.rates.write * batch_bytes - self.compute_seconds)


@dataclass
class Forecast:
    """Uses of this cut's rows, if they are stored, in epochs' worth of batches."""

    written: float = 0.0
    read: float = 0.0
    """Batches that are read until the cut changes."""
    read_later: float = 0.0
    """Batches that are read after that, to compute deeper rows."""


def forecast(rank: CostMeasurement) -> Forecast:
    """Return how often rows are written and read: the first epoch of each view stores them, later ones read them."""
    total, there = Forecast(), list(rank.present) or [0.0] * rank.views
    if rank.all_at_once:
        total.written = rank.views - sum(there)
        there = [1.0] * rank.views
    unread = [1.0] * rank.views
    for epoch in range(math.ceil(rank.epochs_left)):
        view, length = epoch % rank.views, min(1.0, rank.epochs_left - epoch)
        here = min(max(rank.epochs_until_move - epoch, 0.0), length)
        stored = (1.0 - there[view]) * here
        total.written += stored
        total.read += there[view] * here
        # A deeper row is computed from these once; then the plan of that cut counts it.
        again = min(length - here, unread[view])
        unread[view] -= again
        total.read_later += there[view] * again
        # An epoch does not read rows that it stored itself.
        there[view] += stored
    return total


@dataclass(frozen=True)
class Plan:
    """The decision for one cut; equal on all ranks because it is computed once."""

    use: bool
    """Whether to cache."""
    fits: bool
    """Whether the disk and the budget have room for the rows."""
    seconds_saved: float
    """Predicted seconds that a rank saves until the cut changes, compared with computing every batch from images;
    includes rows of a shallower cut. May be negative."""
    reason: str
    """The reason, one clause."""
    rows: tuple[tuple[str, str], ...]
    """(quantity, value) rows of the printed table, advice last."""

    def table(self) -> str:
        """Return the rows as text, one a line."""
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)


def make_plan(ranks: Sequence[CostMeasurement], *, asked: bool = False) -> Plan:
    """Return the plan from the measurements of all ranks.

    Args:
        ranks: one per rank; ranks wait for each other, so the slowest counts.
        asked: store rows whether that pays or not, if they fit.
    """
    gained = seconds_saved(ranks, kept=True) - seconds_saved(ranks, kept=False)
    obstacle, again = obstacle_to(ranks), reads_again(ranks)
    fits, pays = not obstacle, gained > 0
    if obstacle:
        reason = obstacle
    elif pays:
        reason = f"saves {gained:.1f} s from now on"
    elif not again:
        rank = max(ranks, key=lambda rank: rank.views)
        rows = "no row" if rank.views == 1 else f"none of {rank.views} views"
        reason = f"{rows} will be read again in the remaining {rank.epochs_left:.1f} epochs"
    elif any(rank.epochs_until_move < rank.epochs_left for rank in ranks):
        reason = "the cut will probably change before the rows are read often enough"
    else:
        reason = "reading and writing the cache would take longer than computing, in the remaining epochs"
    return Plan(
        use=fits and pays,
        fits=fits,
        seconds_saved=seconds_saved(ranks, kept=asked or (fits and pays), later=False),
        reason=reason,
        # Where no row is read again nothing was measured.
        rows=table_of(ranks, gained, reason, fits=fits) if asked or again else (("decision", reason),),
    )


def reads_again(ranks: Sequence[CostMeasurement]) -> bool:
    """Return True if any row stored at this cut would be read, whatever the cost."""
    futures = [forecast(rank) for rank in ranks if rank.rows]
    return any(future.read + future.read_later > 0 for future in futures)


def seconds_saved(ranks: Sequence[CostMeasurement], *, kept: bool, later: bool = True) -> float:
    """Return the seconds that all ranks save, with waiting for each other, compared with computing from images.

    If rows are not `kept`, every batch starts from the rows of a shallower cut that exist. `later` includes the time
    after the cut changes.
    """
    images, times = [], []
    for rank in ranks:
        spared, future = rank.source_share * rank.source_spares, forecast(rank)
        if kept:
            read = future.read + (future.read_later if later else 0.0)
            gain = read * (rank.compute_seconds - rank.read_seconds) + future.written * (spared - rank.write_seconds)
            # Rows that are computed beforehand are computed in addition to those of the epochs.
            gain -= future.written * rank.compute_seconds if rank.all_at_once else 0.0
        else:
            gain = spared * (rank.epochs_left if later else min(rank.epochs_left, rank.epochs_until_move))
        images.append(rank.steps * rank.epochs_left * rank.compute_seconds)
        times.append(images[-1] - rank.steps * gain)
    return max(images) - max(times)


def obstacle_to(ranks: Sequence[CostMeasurement]) -> str:
    """Return why the rows cannot be stored, or ""."""
    needed, limit_bytes = sum(rank.new_bytes for rank in ranks), limit_of(ranks)
    if limit_bytes is not None and needed > limit_bytes:
        return f"needs {gib(needed)} GiB, but --cache-limit leaves {gib(limit_bytes)}"
    by_filesystem: dict[str, list[CostMeasurement]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        by_filesystem[rank.filesystem].append(rank)
        # Shards may differ in size, and shares of the budget do not.
        if rank.left_bytes is not None and rank.new_bytes > rank.left_bytes:
            return (
                f"needs {gib(rank.new_bytes)} GiB on rank {number}, but its share of --cache-limit leaves "
                f"{gib(rank.left_bytes)}"
            )
    for filesystem, group in by_filesystem.items():
        need, free = sum(rank.new_bytes for rank in group), min(rank.free_bytes for rank in group)
        if need > free:
            return f"needs {gib(need)} GiB on {filesystem}, but {gib(free)} are free"
    return ""


def gib(num_bytes: float, digits: int = 2) -> str:
    """Return bytes as GiB."""
    return f"{num_bytes / 2**30:.{digits}f}"


def limit_of(ranks: Sequence[CostMeasurement]) -> int | None:
    """Return the bytes that the budget still allows for new rows of all ranks; None is unlimited."""
    lefts = [rank.left_bytes for rank in ranks if rank.left_bytes is not None]
    return sum(lefts) if lefts else None


def table_of(
    ranks: Sequence[CostMeasurement], gained: float, reason: str, *, fits: bool
) -> tuple[tuple[str, str], ...]:
    """Return the printed table. Its advice is about user choices that would change results."""
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    needed, limit_bytes = sum(rank.new_bytes for rank in ranks), limit_of(ranks)
    rows = [
        ("loading images, ms per batch", f"{slowest.image_seconds * 1e3:.2f}"),
        ("frozen prefix, ms per batch", f"{slowest.prefix_seconds * 1e3:.2f}"),
        ("reading the cache, ms per batch", f"{max(rank.read_seconds for rank in ranks) * 1e3:.2f}"),
        ("writing the cache, ms per batch", f"{max(rank.write_seconds for rank in ranks) * 1e3:.2f}"),
        ("epochs left: in all, at this cut", f"{slowest.epochs_left:.1f}, {slowest.epochs_until_move:.1f}"),
        ("GiB to store, all ranks", f"{gib(needed, digits=3)}"),
        ("GiB allowed", "no limit" if limit_bytes is None else f"{gib(limit_bytes, digits=3)}"),
        ("predicted saving, seconds", f"{gained:.1f}"),
        ("decision", reason),
    ]
    views = max(rank.views for rank in ranks)
    if not fits or not all(rank.in_memory for rank in ranks):
        rows.append(
            ("advice", f"--cache-dtype float16 would need {gib(needed / 2, digits=3)} GiB if rows are float32 now")
        )
    if views > 1 and (not fits or any(rank.epochs_left <= 2 * rank.views for rank in ranks)):
        fewer = f"--augment views:{views // 2} would need {gib(needed * (views // 2) / views, digits=3)} GiB"
        rows.append(("advice", f"{fewer} and be complete sooner"))
    return tuple(rows)
