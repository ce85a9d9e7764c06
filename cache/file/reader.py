"""A published cache file: opened without trusting it, verified in full, then read by mapping."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from hvfreeze.cache.faults import CacheFault, CacheMismatch
from hvfreeze.cache.file.disk import Budget, Disk, LocalDisk, remove
from hvfreeze.cache.file.hdf5 import Region, find_regions
from hvfreeze.cache.file.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_ROWS,
    NAMES,
    PAYLOAD,
    TABLES,
    Manifest,
    manifest_digest,
    verify_ranges,
)
from hvfreeze.cache.file.mapping import MappedRows
from hvfreeze.cache.file.rows import Keys, pack_keys
from hvfreeze.cache.fingerprint import Fingerprint

PIECE_BYTES = 1 << 20
MAX_TABLE_BYTES = 32 * MAX_ROWS


class ActivationFile:
    """The rows of one published file. `keys` (rows,) int64 belong to rows 0, 1, ... of the file, in this order."""

    def __init__(
        self,
        path: Path,
        *,
        expected: Fingerprint | None = None,
        disk: Disk | None = None,
        private: bool = False,
    ) -> None:
        """Open `path` and check its frame, manifest and tables; the rows are only readable after `verify`.

        Args:
            path: the file.
            expected: refuse a file of any other identity; None takes what is there.
            disk: stands in for the real one.
            private: refuse a file that is not this user's own.

        Raises:
            CacheMismatch: the file belongs to another fingerprint; the differing fields are named.
            CacheFault: the file is damaged or unsafe.
        """
        self.path = path
        self._disk: Disk = disk or LocalDisk()
        self._verified = self._late = False
        self._verifying = threading.Lock()
        self._verification: Future[None] | None = None
        descriptor, regions = find_regions(path, names=NAMES, private=private)
        try:
            self.file_bytes = os.fstat(descriptor).st_size
            self.manifest, self.keys, self._digests, self.digest = _read_tables(descriptor, regions)
            if expected is not None and expected.differences(self.manifest.fingerprint):
                raise CacheMismatch(
                    f"it holds something else: {expected.explain(self.manifest.fingerprint)}",
                    fields=expected.differences(self.manifest.fingerprint),
                )
            self._rows = MappedRows(
                descriptor,
                offset=regions[PAYLOAD].offset,
                num_rows=self.manifest.capacity,
                row_bytes=self.manifest.row.row_bytes,
                name=str(path),
                dtype=self.manifest.row.stored,
            )
            self._rows.seal(partial(verify_ranges, self.manifest, self._digests))
        except CacheMismatch as mismatch:
            raise CacheMismatch(f"cache file {path} refused: {mismatch}", fields=mismatch.fields) from None
        except (CacheFault, OSError, MemoryError) as fault:
            raise CacheFault(f"cache file {path} refused: {fault}") from fault
        finally:
            os.close(descriptor)

    def verify(self) -> None:
        """Read the whole file once and compare every range; afterwards rows may be read.

        Raises:
            CacheFault: a range does not have the contents that its digest was taken from.
        """
        with self._verifying:
            if not self._verified:
                try:
                    self._compare()
                except CacheFault as fault:
                    raise CacheFault(f"cache file {self.path} refused: {fault}") from fault
                self._verified = True

    def verify_in(self, executor: Executor) -> None:
        """Let `verify` happen elsewhere; `read` waits for it and raises what it raised."""
        self._verification = executor.submit(self.verify)

    def verify_when_read(self) -> None:
        """Let `verify` happen when rows are first read."""
        self._late = True

    def accept(self, digest: str) -> None:
        """Take the rows for verified if another process has verified the file with this digest."""
        self._verified = self._verified or digest == self.digest

    def _compare(self) -> None:
        """Read all rows and compare them with the digests."""

        def read(first: int, last: int) -> bytes:
            self._disk.read((last - first) * self.manifest.row.row_bytes)
            return self._rows.pread(first, last)

        verify_ranges(self.manifest, self._digests, read)

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of these rows, given as int64 row numbers.

        Raises:
            CacheFault: the file was truncated or changed since it was opened.
        """
        if not self._verified:
            if self._late:
                self.verify()
            elif self._verification is None:
                raise RuntimeError(f"cache file {self.path} was read before it was verified")
            else:
                self._verification.result()
        self._disk.read(rows.shape[0] * self.manifest.row.row_bytes)
        return self._rows.read(rows)

    def is_at(self, path: Path) -> bool:
        """Tell whether `path` is this very file, and not another generation of it."""
        return self._rows.is_at(path)

    def delete(self, budget: Budget) -> None:
        """Remove the file, unless another one has its name; rows stay readable from here."""
        if self.is_at(self.path):
            remove(self.path)
            budget.release(self.file_bytes)


def _read_tables(descriptor: int, regions: dict[str, Region]) -> tuple[Manifest, Keys, list[bytes], str]:
    for name in ("manifest", *TABLES):
        most = MAX_MANIFEST_BYTES if name == "manifest" else MAX_TABLE_BYTES
        if regions[name].nbytes > most:
            raise CacheFault(f"its '{name}' has {regions[name].nbytes} bytes, more than the {most} of any cache")
    expected = _pread(descriptor, regions["manifest_sha256"])
    if manifest_digest(lambda name: _pieces(descriptor, regions[name]), regions) != expected:
        raise CacheFault("its manifest or tables are damaged")
    manifest = Manifest.from_json(_pread(descriptor, regions["manifest"]))
    for name, (shape, dtype) in manifest.datasets().items():
        region = regions[name]
        if name != "manifest" and (region.shape, region.dtype) != (shape, dtype):
            raise CacheFault(f"'{name}' is {region.dtype} {region.shape}, its manifest says {dtype} {shape}")
    parts = {name: _pread(descriptor, regions[name]) for name in TABLES}
    ids, views = np.frombuffer(parts["sample_ids"], "<i8"), np.frombuffer(parts["views"], "<i4")
    try:
        keys = pack_keys(ids[: manifest.rows], views[: manifest.rows])
    except ValueError as error:
        raise CacheFault(f"its tables are not usable: {error}") from error
    if len(np.unique(keys)) != len(keys):
        raise CacheFault("a sample and view occurs twice")
    digests = [parts["range_sha256"][at : at + 32] for at in range(0, len(parts["range_sha256"]), 32)]
    return manifest, keys, digests, expected.hex()


def _pieces(descriptor: int, region: Region) -> Iterator[bytes]:
    """Return the region's bytes, never many at once: so much of a file is read before anything in it is trusted."""
    for start in range(0, region.nbytes, PIECE_BYTES):
        yield os.pread(descriptor, min(PIECE_BYTES, region.nbytes - start), region.offset + start)


def _pread(descriptor: int, region: Region) -> bytes:
    content = os.pread(descriptor, region.nbytes, region.offset)
    if len(content) != region.nbytes:
        raise CacheFault("it ends early")
    return content
