"""One cache file being made: allocated whole, filled row after row, published by a rename.

Rows are placed in the order in which they come, so every batch is one sequential write and ranges are hashed as they
fill. The reader's promise rests on this order of events: nothing has the final name before everything under it is on
the disk, and nothing writes to a file that has it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault, CacheFull
from hvfreeze.cache.file.disk import FULL, Budget, Disk, free_bytes, remove
from hvfreeze.cache.file.hdf5 import find_regions, make_frame
from hvfreeze.cache.file.lock import FileLock
from hvfreeze.cache.file.manifest import NAMES, PAYLOAD, Manifest, RangeHasher, manifest_digest, tables, verify_ranges
from hvfreeze.cache.file.mapping import MappedRows
from hvfreeze.cache.file.names import TEMPORARY_SUFFIX
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.fingerprint import fingerprint

# A disk filled to its last byte breaks other programs first, and then this one's checkpoints.
SPARE_BYTES = 1 << 20


class FileWriter:
    """A file under a temporary name; `written` rows are in it and readable."""

    def __init__(
        self,
        path: Path,
        *,
        lock: FileLock,
        manifest: Manifest,
        budget: Budget,
        disk: Disk,
        replaces: int = 0,
        private: bool = True,
    ) -> None:
        """Allocate the file.

        Args:
            path: final name.
            lock: the lock of `path`, held by the caller; this releases it, also when it raises.
            manifest: what the file is to hold; its `rows` is set at publication.
            budget: pays for the file.
            disk: stands in for the real one.
            replaces: bytes of the file that now has the name, given back to the budget at publication.
            private: nobody else may read it; without, its group may.

        Raises:
            CacheFull: it does not fit; nothing is left behind.
            CacheFault: the directory cannot be written.
        """
        self.path = path
        self.manifest = manifest
        self.written = 0
        self.published = False
        self._budget, self._disk, self._replaces, self._private = budget, disk, replaces, private
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._frame = make_frame(manifest.datasets(), manifest.attributes())
        self._keys = np.empty(manifest.capacity, np.int64)
        self._hasher = RangeHasher(manifest)
        self._lock = lock
        self._descriptor = -1
        self._reserved = 0
        try:
            self._allocate()
            self._mapped = MappedRows(
                self._descriptor,
                offset=self._frame.regions[PAYLOAD].offset,
                num_rows=manifest.capacity,
                row_bytes=manifest.row.row_bytes,
                name=str(path),
                dtype=manifest.row.stored,
            )
        except (OSError, CacheFault) as error:
            self.discard()
            raise fault_of(error, path=path) from error

    @property
    def file_bytes(self) -> int:
        """Bytes that the file takes, however many of its rows are written."""
        return self._frame.size

    def write(self, keys: Keys, rows: Tensor) -> None:
        """Append `rows` (len(keys), elements), contiguous, of the stored type.

        Raises:
            OSError: the disk refused.
        """
        content = rows.view(torch.uint8).numpy().reshape(-1).data
        self._disk.write(len(content))
        start = self._frame.regions[PAYLOAD].offset + self.written * self.manifest.row.row_bytes
        _pwrite(self._descriptor, content, start)
        self._hasher.update(content)
        self._keys[self.written : self.written + len(keys)] = keys
        self.written += len(keys)

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of written rows, given as int64 row numbers."""
        self._disk.read(rows.shape[0] * self.manifest.row.row_bytes)
        return self._mapped.read(rows)

    def is_at(self, path: Path) -> bool:
        """Tell whether `path` is this very file."""
        return self._mapped.is_at(path)

    def mark_inexact(self) -> None:
        """Let the file count as exact for no run: rows of several origins are in it."""
        self.manifest = replace(self.manifest, fingerprint=fingerprint(self.manifest.fingerprint.fields))

    def publish(self) -> None:
        """Give the file its final name, if it has not got it, once all of it is on the disk; rows stay readable.

        Raises:
            OSError: the disk refused; the file that had the name is untouched.
        """
        if self.published:
            return
        manifest = replace(self.manifest, rows=self.written)
        regions = self._frame.regions
        keys, digests = self._keys[: self.written], self._hasher.digests()
        parts = tables(manifest, keys, digests, manifest_bytes=regions["manifest"].nbytes)
        parts["manifest_sha256"] = manifest_digest(lambda name: [parts[name]], regions)
        for name, content in parts.items():
            _pwrite(self._descriptor, memoryview(content), regions[name].offset)
        os.fsync(self._descriptor)
        opened, found = find_regions(self._temporary, names=NAMES)
        os.close(opened)
        if found != regions:
            raise CacheFault(f"cache file {self.path} was changed by somebody else while it was made")
        os.replace(self._temporary, self.path)
        self._mapped.seal(partial(verify_ranges, manifest, digests))
        self.published = True
        sync_directory(self.path.parent)
        self._budget.release(self._replaces)
        self._let_go()

    def discard(self) -> None:
        """Remove the temporary file unless it was published; rows stay readable for whoever holds the writer."""
        if not self.published:
            if self._descriptor >= 0:
                remove(self._temporary)
            self._give_back()
        self._let_go()

    def delete(self) -> None:
        """Remove the file, published or not, unless another one has taken its name; rows stay readable as above."""
        self.discard()
        if self.published and self._reserved:
            if self._mapped.is_at(self.path):
                remove(self.path)
            self._give_back()

    def _allocate(self) -> None:
        size, directory = self._frame.size, self.path.parent
        self._budget.reserve(size, path=self.path)
        self._reserved = size
        # Left by a process that was killed: the lock says that nobody writes to it any more.
        self._temporary.unlink(missing_ok=True)
        if size + SPARE_BYTES > free_bytes(directory):
            raise CacheFull(f"cache file {self.path} needs {size} bytes, {directory} has {free_bytes(directory)} free")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o600 if self._private else 0o640)
        os.posix_fallocate(self._descriptor, 0, size)
        for offset, content in self._frame.extents.items():
            _pwrite(self._descriptor, memoryview(content), offset)

    def _give_back(self) -> None:
        self._budget.release(self._reserved)
        self._reserved = 0

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()


def fault_of(error: Exception, *, path: Path) -> CacheFault:
    """Return `error` as a cache fault that names the file; a full disk and a cache fault keep their kind."""
    if isinstance(error, CacheFault):
        return error
    full = isinstance(error, OSError) and error.errno in FULL
    kind = CacheFull if full else CacheFault
    return kind(f"cache file {path} cannot be written ({error})")


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pwrite(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of `content`, however much a single call takes."""
    while len(content):
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count
