"""Decides whether caching pays: measures disk rates, forecasts each epoch and compares times, as pure functions.

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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import FULL, Disk, free_bytes
from hvfreeze.cache.file.reader import MappedRows

PROBE_BYTES = 24 << 20
PROBE_SECONDS = 0.15
"""Longest time of the write measurement, in seconds; reading may take twice as long."""
SYNC_BYTES = 4 << 20
SLOW_DISK = 1e-8
"""Assumed seconds per byte of a disk that cannot be measured because it is full."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Costs of a directory in seconds per byte; `_cpu` is the part that occupies a core, the rest is waiting."""

    read_cold: float
    """Reading shuffled rows that are not in the page cache."""
    read_warm: float
    """Reading shuffled rows that are in the page cache."""
    read_cpu: float
    write: float
    """Writing rows until they are safe on the disk, including hashing."""
    write_cpu: float
    hash: float
    """Verifying rows."""
    free_bytes: int
    filesystem: str
    """Equal for directories on the same file system, also as seen from several hosts. Separate disks that look alike
    may be taken for one, which only makes the plan more cautious."""


def measure_directory(
    directory: Path,
    *,
    row_bytes: int,
    batch_rows: int,
    most_bytes: int = PROBE_BYTES,
    most_seconds: float = PROBE_SECONDS,
    disk: Disk | None = None,
) -> Rates:
    """Measure the rates of `directory` by a temporary file of at most `most_bytes` or about `seconds` of writing.

    It is read twice, each time for at most as long. At least one batch is written.

    Raises:
        CacheFault: the directory cannot be written.
    """
    disk, row_bytes = disk or Disk(), min(row_bytes, SYNC_BYTES)
    batch_rows = max(1, min(batch_rows, SYNC_BYTES // row_bytes))
    batch = np.random.default_rng(0).integers(0, 256, (batch_rows, row_bytes), dtype=np.uint8)
    try:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                written, write, write_cpu = _time_writes(file.fileno(), batch, disk, most_bytes, most_seconds)
                cold, warm, read_cpu = _time_reads(file.fileno(), written, batch, disk, most_seconds)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # What lies there can still be read: measured in memory, and taken for a slow disk where it is not.
            with os.fdopen(os.memfd_create("hvfreeze"), "w+b") as file:
                written, write, write_cpu = _time_writes(file.fileno(), batch, disk, most_bytes, most_seconds)
                _, warm, read_cpu = _time_reads(file.fileno(), written, batch, disk, most_seconds)
            cold = max(warm, SLOW_DISK)
        status, free = os.statvfs(directory), free_bytes(directory)
    except OSError as error:
        raise CacheFault(
            f"cache directory {directory} cannot be measured ({error}); choose another --cache-dir"
        ) from error
    start = time.perf_counter()
    hashlib.sha256(batch.data).digest()
    hashing = (time.perf_counter() - start) / batch.nbytes
    return Rates(
        read_cold=max(cold, warm),
        read_warm=warm,
        read_cpu=read_cpu,
        write=write,
        write_cpu=write_cpu,
        hash=hashing,
        free_bytes=free,
        filesystem=f"{status.f_fsid:x}-{status.f_blocks}",
    )


def _time_writes(
    descriptor: int, batch: np.ndarray, disk: Disk, most_bytes: int, most_seconds: float
) -> tuple[int, float, float]:
    """Return bytes written, and seconds and processor seconds per byte."""
    written = unsynced = 0
    start, start_cpu = time.perf_counter(), time.thread_time()
    # At least one batch, however long a crowded core made this process wait.
    while written == 0 or (written + batch.nbytes <= most_bytes and time.perf_counter() - start < most_seconds):
        disk.write(batch.nbytes)
        hashlib.sha256(batch.data).digest()
        os.pwrite(descriptor, batch.data, written)
        written += batch.nbytes
        unsynced += batch.nbytes
        if unsynced >= SYNC_BYTES:
            os.fsync(descriptor)
            unsynced = 0
    os.fsync(descriptor)
    return written, (time.perf_counter() - start) / written, (time.thread_time() - start_cpu) / written


def _time_reads(
    descriptor: int, written: int, batch: np.ndarray, disk: Disk, most_seconds: float
) -> tuple[float, float, float]:
    """Return seconds per byte of reading shuffled batches from the disk, from the page cache, and on a core."""
    num_rows, row_bytes = written // batch.shape[1], batch.shape[1]
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedRows(descriptor, offset=0, num_rows=num_rows, row_bytes=row_bytes, name="the probe file")
    order = torch.from_numpy(np.random.default_rng(1).permutation(num_rows)).split(len(batch))[:24]
    seconds, processor_seconds = [], []
    for _ in ("cold", "warm"):
        start, start_cpu, num_bytes = time.perf_counter(), time.thread_time(), 0
        for rows in order:
            disk.read(len(rows) * row_bytes)
            mapped.read(rows)
            num_bytes += len(rows) * row_bytes
            if time.perf_counter() - start > most_seconds:
                break
        seconds.append((time.perf_counter() - start) / num_bytes)
        processor_seconds.append((time.thread_time() - start_cpu) / num_bytes)
    return seconds[0], seconds[1], processor_seconds[1]


@dataclass(frozen=True, kw_only=True)
class CostMeasurement:
    """Measurements and plans of one rank; seconds are per batch."""

    image_seconds: float
    """Loading and augmenting the images that the prefix needs."""
    prefix_seconds: float
    suffix_seconds: float
    """The rest of the training step, which can hide prefetching and writing."""
    batch_rows: int
    rows: int
    """Samples of this rank."""
    views: int
    """Views of each sample."""
    row_bytes: int
    epochs_left: float
    """Passes over all samples that remain; each uses the next view."""
    memory_bytes: int
    """Memory in bytes that the page cache may take for this rank."""
    rates: Rates
    left_bytes: int | None = None
    """Bytes of new rows that this rank's share of the budget still allows; None is unlimited."""
    padded: bool = False
    """Whether the last batch is padded; if not, there are whole batches only."""
    rows_rewritten: int = 0
    """Rows in an incomplete file, which are rewritten when it is completed."""
    epochs_until_move: float = math.inf
    passed: float = 0.0
    """The share of the current epoch that is over."""
    present: tuple[float, ...] = ()
    """Shares of the samples that are already cached in each of the next `views` epochs, beginning with the current one;
    empty is none."""
    sources: tuple[float, ...] = ()
    """The same for rows that are cached at a shallower cut."""
    source_spares: float = 0.0
    """Seconds saved by starting from those rows."""
    all_at_once: bool = False
    """Missing rows are computed before training continues."""

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
    def num_bytes(self) -> int:
        """Bytes of all rows of this rank."""
        return self.rows * self.views * self.row_bytes

    @property
    def compute_seconds(self) -> float:
        """Seconds of a batch without the cache, which the cache saves."""
        return self.image_seconds + self.prefix_seconds

    @property
    def read_seconds(self) -> float:
        """Seconds that reading a batch adds to a step: core time, and what prefetching cannot hide."""
        rate = self.rates.read_warm if self.num_bytes <= self.memory_bytes else self.rates.read_cold
        return self._added(rate, self.rates.read_cpu, hidden_behind=self.suffix_seconds)

    @property
    def write_seconds(self) -> float:
        """Seconds that storing a batch adds to a step: core time, and what cannot be hidden."""
        hidden_behind = self.suffix_seconds + self.compute_seconds
        return self._added(self.rates.write, self.rates.write_cpu, hidden_behind=hidden_behind)

    def _added(self, rate: float, cpu: float, *, hidden_behind: float) -> float:
        batch_bytes = self.batch_rows * self.row_bytes
        return cpu * batch_bytes + max(0.0, (rate - cpu) * batch_bytes - hidden_behind)


ROUNDING = 1e-9


@dataclass
class Forecast:
    """Seconds saved compared with computing every batch from images, and epochs' worth of batches that use cached rows.

    All are per batch of an epoch. `_later` counts after the next change of the cut, when rows of this cut are used to
    compute deeper ones.
    """

    saved: float = 0.0
    saved_later: float = 0.0
    read: float = 0.0
    read_later: float = 0.0


def forecast(rank: CostMeasurement, *, kept: bool) -> Forecast:
    """Return the predicted savings of a rank from now on.

    With `kept`, the first epochs of each view fill the cache and later ones read it; otherwise rows of a shallower cut
    are used. An epoch whose views are partly cached is swept: its missing rows are computed together, and then read
    with the others, at this cut or, if its rows are not stored, at the shallower one.
    """
    views, steps, total = rank.views, rank.steps, Forecast()
    there = list(rank.present) or [0.0] * views
    sources, unread = list(rank.sources) or [0.0] * views, [1.0] * views
    reading = rank.compute_seconds - rank.read_seconds
    if kept:
        verified = round(sum(rank.present) * rank.rows) * rank.row_bytes * rank.rates.hash
        total.saved -= verified / max(1, steps)
        if rank.all_at_once:
            total.saved -= sum(1.0 - share for share in there) * (rank.compute_seconds + rank.write_seconds)
            there = [1.0] * views
    at, number, passed = 0.0, 0, rank.passed
    # The first epoch may have begun, the last may end early.
    while at < rank.epochs_left - ROUNDING:
        view, length = number % views, min(1.0 - passed, rank.epochs_left - at)
        here = min(max(rank.epochs_until_move - at, 0.0), length)
        # Rows of what is over were stored in passing, and are not met again in this epoch.
        share, source = (max(0.0, shares[view] - passed) / (1.0 - passed) for shares in (there, sources))
        if not kept:
            gain = gain_later = source * rank.source_spares
            read = share_later = 1.0 if _mixed(source, steps) else source
            sources[view] += (read - source) * here
        else:
            swept = _mixed(share, steps) or (share <= ROUNDING and _mixed(source, steps))
            missing = 1.0 - share
            # What this cut has of an epoch was computed in a part of it that the shallower one did not see.
            source = min(1.0, source / missing) if missing > ROUNDING else 0.0
            filling = source * rank.source_spares - rank.write_seconds
            if swept:
                gain, read = reading - missing * (rank.compute_seconds - filling), 1.0 + missing * source
            elif share > 1.0 - ROUNDING:
                gain, read = reading, 1.0
            else:
                gain, read = filling, source
            if here > ROUNDING:
                there[view] += missing * here
                # What an epoch has added is not met again in that epoch.
                share = 1.0 if swept else share
            gain_later, share_later = share * reading, share
        if here > ROUNDING or not kept:
            total.saved += here * gain
            total.read += here * read
        # A deeper row is computed from these once; then it is there itself, or the plan of that cut counts it.
        again = min(length - here, unread[view]) if share_later > ROUNDING or not kept else 0.0
        unread[view] -= again
        total.saved_later += again * gain_later
        total.read_later += again * share_later
        at, number, passed = at + length, number + 1, 0.0
    return total


def _mixed(share: float, steps: int) -> bool:
    """Return True if there are enough rows for a batch, and others are missing."""
    return share * steps >= 1.0 and share <= 1.0 - ROUNDING


GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """The decision for one cut; equal on all ranks because it is computed once."""

    use: bool
    """Whether to cache."""
    fits: bool
    """Whether the disk and the budget have room for the rows."""
    seconds_saved: float
    """Predicted seconds that a rank saves until the next change of the cut, compared with computing every batch from
    images; includes rows of a shallower cut. May be negative."""
    seconds_saved_later: float
    """The same after that change, from rows that are cached by then."""
    rows_read: float
    """Predicted number of rows read until the next change of the cut, over all ranks."""
    rows_read_later: float
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
    kept, left = ([forecast(rank, kept=kept) for rank in ranks] for kept in (True, False))
    gained = _saved(ranks, kept) - _saved(ranks, left)
    obstacle, again = _obstacle(ranks), reads_again(ranks)
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
    chosen = kept if asked or (fits and pays) else left
    whole, here = _saved(ranks, chosen), _saved(ranks, chosen, later=False)
    table = _table(ranks, saved=gained, reason=reason, does_not_fit=not fits)
    return Plan(
        use=fits and pays,
        fits=fits,
        seconds_saved=here,
        seconds_saved_later=whole - here,
        rows_read=sum(rank.batch_rows * rank.steps * own.read for rank, own in zip(ranks, chosen)),
        rows_read_later=sum(rank.batch_rows * rank.steps * own.read_later for rank, own in zip(ranks, chosen)),
        reason=reason,
        # Where no row is read again nothing was measured.
        rows=table if asked or again else (("decision", reason),),
    )


def reads_again(ranks: Sequence[CostMeasurement]) -> bool:
    """Return True if any row stored at this cut would be read, whatever the cost."""
    futures = [forecast(replace(rank, sources=()), kept=True) for rank in ranks if rank.rows]
    return any(future.read + future.read_later > 0 for future in futures)


def _saved(ranks: Sequence[CostMeasurement], futures: Sequence[Forecast], *, later: bool = True) -> float:
    """Return the seconds that all ranks save, with waiting for each other, until the cut changes or the run ends."""
    images = [rank.steps * rank.epochs_left * rank.compute_seconds for rank in ranks]
    gains = (own.saved + (own.saved_later if later else 0.0) for own in futures)
    return max(images) - max(one - rank.steps * gain for one, rank, gain in zip(images, ranks, gains, strict=True))


def _limit_bytes(ranks: Sequence[CostMeasurement]) -> int | None:
    """Return the bytes that the budget still allows for new rows of all ranks; None is unlimited."""
    lefts = [rank.left_bytes for rank in ranks if rank.left_bytes is not None]
    return sum(lefts) if lefts else None


def _obstacle(ranks: Sequence[CostMeasurement]) -> str:
    """Return why the rows cannot be stored, or ""."""
    needed, limit_bytes = sum(rank.new_bytes for rank in ranks), _limit_bytes(ranks)
    if limit_bytes is not None and needed > limit_bytes:
        return f"needs {needed / GIB:.2f} GiB, but --cache-limit leaves {limit_bytes / GIB:.2f}"
    for number, rank in enumerate(ranks):
        # Shards may differ in size, and shares of the budget do not.
        if rank.left_bytes is not None and rank.new_bytes > rank.left_bytes:
            return (
                f"needs {rank.new_bytes / GIB:.2f} GiB on rank {number}, but its share of --cache-limit leaves "
                f"{rank.left_bytes / GIB:.2f}"
            )
    by_filesystem: dict[str, list[CostMeasurement]] = defaultdict(list)
    for rank in ranks:
        by_filesystem[rank.rates.filesystem].append(rank)
    for filesystem, group in by_filesystem.items():
        need, free = sum(rank.new_bytes for rank in group), min(rank.rates.free_bytes for rank in group)
        if need > free:
            return f"needs {need / GIB:.2f} GiB on {filesystem}, but {free / GIB:.2f} are free"
    return ""


def _table(
    ranks: Sequence[CostMeasurement], *, saved: float, reason: str, does_not_fit: bool
) -> tuple[tuple[str, str], ...]:
    """Return the printed table. Its advice is about user choices that would change results."""
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    needed, limit_bytes = sum(rank.new_bytes for rank in ranks), _limit_bytes(ranks)
    rows = [
        ("loading images, ms per batch", f"{slowest.image_seconds * 1e3:.2f}"),
        ("frozen prefix, ms per batch", f"{slowest.prefix_seconds * 1e3:.2f}"),
        ("rest of the step, ms", f"{slowest.suffix_seconds * 1e3:.2f}"),
        ("reading the cache, ms per batch", f"{max(rank.read_seconds for rank in ranks) * 1e3:.2f}"),
        ("writing the cache, ms per batch", f"{max(rank.write_seconds for rank in ranks) * 1e3:.2f}"),
        ("epochs left: in all, at this cut", f"{slowest.epochs_left:.1f}, {slowest.epochs_until_move:.1f}"),
        ("GiB to store, all ranks", f"{needed / GIB:.3f}"),
        ("GiB allowed", "no limit" if limit_bytes is None else f"{limit_bytes / GIB:.3f}"),
        ("predicted saving, seconds", f"{saved:.1f}"),
        ("decision", reason),
    ]
    if does_not_fit or any(rank.num_bytes > rank.memory_bytes for rank in ranks):
        rows.append(("advice", f"--cache-dtype float16 would need {needed / 2 / GIB:.3f} GiB if rows are float32 now"))
    views = max(rank.views for rank in ranks)
    if views > 1 and (does_not_fit or any(rank.epochs_left <= 2 * rank.views for rank in ranks)):
        fewer = f"--augment views:{views // 2} would need {needed * (views // 2) / views / GIB:.3f} GiB"
        rows.append(("advice", f"{fewer} and be complete sooner"))
    return tuple(rows)
