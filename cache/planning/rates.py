"""How fast a cache directory is, measured on the spot."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import FULL, Disk, LocalDisk, free_bytes
from hvfreeze.cache.file.mapping import MappedRows

PROBE_BYTES = 24 << 20
PROBE_SECONDS = 0.15
SYNC_BYTES = 4 << 20
PROBE_BATCHES = 24
SLOW_DISK = 1e-8
"""Seconds a byte of a disk that cannot be measured because it is full."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a directory costs. Seconds per byte; `_cpu_` is the part that occupies a core, the rest is waiting.

    Attributes:
        read_cold: of shuffled rows that are not in the page cache.
        read_warm: of shuffled rows that are.
        read_cpu: of the same rows, on a core.
        write: of rows up to their safe arrival on the disk, hashing included.
        write_cpu: of the same rows, on a core.
        hash: of verification.
        free_bytes: available on the file system.
        filesystem: equal for directories on the same file system, also seen from several hosts; disks of their own
            that look alike may be taken for one, which only makes the plan more careful.
    """

    read_cold: float
    read_warm: float
    read_cpu: float
    write: float
    write_cpu: float
    hash: float
    free_bytes: int
    filesystem: str


def measure_directory(directory: Path, *, row_bytes: int, batch_rows: int, disk: Disk | None = None) -> Rates:
    """Return the rates of `directory`, from a temporary file of at most 24 MiB or about 0.15 s of writing.

    Raises:
        CacheFault: the directory cannot be written.
    """
    rate_limit = disk or LocalDisk()
    row_bytes = min(row_bytes, SYNC_BYTES)
    batch_rows = max(1, min(batch_rows, SYNC_BYTES // row_bytes))
    batch = np.random.default_rng(0).integers(0, 256, (batch_rows, row_bytes), dtype=np.uint8)
    try:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                written, write, write_cpu = _time_writes(file.fileno(), batch, rate_limit)
                cold, warm, read_cpu = _time_reads(file.fileno(), written, batch, rate_limit)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # What lies there can still be read: measured in memory, and taken for a slow disk where it is not.
            with os.fdopen(os.memfd_create("hvfreeze"), "w+b") as file:
                written, write, write_cpu = _time_writes(file.fileno(), batch, rate_limit)
                _, warm, read_cpu = _time_reads(file.fileno(), written, batch, rate_limit)
            cold = max(warm, SLOW_DISK)
        status = os.statvfs(directory)
        free = free_bytes(directory)
    except OSError as error:
        raise CacheFault(f"cache directory {directory} cannot be measured ({error})") from error
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


def _time_writes(descriptor: int, batch: np.ndarray, disk: Disk) -> tuple[int, float, float]:
    """Return bytes written, and seconds and processor seconds per byte."""
    written = unsynced = 0
    start, start_cpu = time.perf_counter(), time.thread_time()
    # At least one batch, however long a crowded core made this process wait.
    while written == 0 or (written + batch.nbytes <= PROBE_BYTES and time.perf_counter() - start < PROBE_SECONDS):
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


def _time_reads(descriptor: int, written: int, batch: np.ndarray, disk: Disk) -> tuple[float, float, float]:
    """Return seconds per byte of shuffled batches from the disk, from the page cache, and on a core."""
    num_rows, row_bytes = written // batch.shape[1], batch.shape[1]
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedRows(descriptor, offset=0, num_rows=num_rows, row_bytes=row_bytes, name="the probe file")
    order = torch.from_numpy(np.random.default_rng(1).permutation(num_rows)).split(len(batch))[:PROBE_BATCHES]
    seconds, processor_seconds = [], []
    for _ in ("cold", "warm"):
        start, start_cpu, num_bytes = time.perf_counter(), time.thread_time(), 0
        for rows in order:
            disk.read(len(rows) * row_bytes)
            mapped.read(rows)
            num_bytes += len(rows) * row_bytes
            if time.perf_counter() - start > PROBE_SECONDS:
                break
        seconds.append((time.perf_counter() - start) / num_bytes)
        processor_seconds.append((time.thread_time() - start_cpu) / num_bytes)
    return seconds[0], seconds[1], processor_seconds[1]
