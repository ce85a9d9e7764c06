"""Writes one cache file in the background: allocates it, appends rows, and publishes it by a rename.

Rows are stored in the order in which they come, so every batch is one sequential write, and ranges are hashed as they
fill. Readers rely on this order: a file gets its final name only after all of it is on the disk, and a file with its
final name is never written to.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault, CacheFull
from hvfreeze.cache.file.disk import FULL, Budget, free_bytes, remove
from hvfreeze.cache.file.format import (
    MAX_ROWS,
    NAMES,
    PAYLOAD,
    Keys,
    Manifest,
    RangeHasher,
    manifest_digest,
    tables,
    verify_ranges,
)
from hvfreeze.cache.file.hdf5 import find_regions, make_frame
from hvfreeze.cache.file.reader import TEMPORARY_SUFFIX, ActivationFile, MappedRows
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.files import FileLock, open_new, replace_file, sync_folder

# A disk filled to its last byte breaks other programs first, and then this one's checkpoints.
SPARE_BYTES = 1 << 20


class FileWriter:
    """A file under a temporary name, whose rows are readable as soon as they were appended.

    Batches are copied into staging buffers, and one thread writes them to the disk. Its errors are raised by the next
    call. All methods except `read` belong to one thread; rows are numbered in the order of `append`.
    """

    def __init__(
        self,
        path: Path,
        *,
        lock: FileLock,
        manifest: Manifest,
        budget: Budget,
        staging_rows: int,
        replaces: int = 0,
        private: bool = True,
    ) -> None:
        """Allocate the file.

        Args:
            path: final name.
            lock: the lock of `path`, held by the caller; this object releases it, also if the constructor raises.
            manifest: manifest of the file; its `rows` is set at publication.
            budget: limit that the file counts towards.
            staging_rows: largest number of rows of an `append`; up to three times that is kept in memory.
            replaces: bytes of the file that now has the name, released from the budget at publication.
            private: only this user may read it; without, the group may too.

        Raises:
            CacheFull: it does not fit; no file is left behind.
            CacheFault: it has too many rows to be read, or the directory cannot be written.
        """
        if manifest.capacity > MAX_ROWS:
            lock.release()
            raise CacheFault(
                f"cache file {path} needs {manifest.capacity} rows, more than the maximum of {MAX_ROWS}; use more "
                "ranks, fewer views or --cache off"
            )
        self.path, self.manifest = path, manifest
        self.appended = 0
        self._budget, self._replaces, self._lock = budget, replaces, lock
        self._staging_rows = staging_rows
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._frame = make_frame(manifest.datasets(), manifest.attributes())
        self._keys, self._hasher = np.empty(manifest.capacity, np.int64), RangeHasher(manifest)
        self._written, self._published = 0, False
        self._descriptor, self._reserved = -1, 0
        self._error: CacheFault | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._last: Future[None] | None = None
        try:
            self._allocate(private=private)
            self._mapped = MappedRows(
                self._descriptor,
                offset=self._frame.regions[PAYLOAD].offset,
                num_rows=manifest.capacity,
                row_bytes=manifest.row.row_bytes,
                name=str(path),
                dtype=manifest.row.stored,
            )
        except (OSError, CacheFault) as error:
            self._discard()
            raise _fault_of(error, path=path) from error
        # The one used last comes first: while the disk keeps up, the others are never touched and take no memory.
        self._free: queue.LifoQueue[Tensor] = queue.LifoQueue()
        for _ in range(3):
            self._free.put(torch.empty(staging_rows, manifest.row.num_elements, dtype=manifest.row.stored))

    def append(self, keys: Keys, rows: Tensor, *, select: Tensor) -> None:
        """Append a copy of rows `select` of `rows` (batch, elements); the batch may be changed afterwards.

        Raises:
            CacheFault: an earlier write has failed.
        """
        self._check()
        staged = self._free.get()
        taken = staged[: len(select)]
        torch.index_select(rows, 0, select, out=taken)
        self.appended += len(keys)
        self._submit(lambda: self._write(keys, taken), staged=staged)

    def copy(self, source: ActivationFile) -> None:
        """Append all rows of `source`, in its order, once they are verified."""
        self.appended += len(source.keys)

        def copy() -> None:
            source.verify()
            for first in range(0, len(source.keys), self._staging_rows):
                rows = torch.arange(first, min(first + self._staging_rows, len(source.keys)))
                self._write(source.keys[first : first + len(rows)], source.read(rows))

        self._submit(copy)

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of appended rows, by int64 row numbers; waits until they are written.

        Raises:
            CacheFault: a write has failed.
        """
        last = self._last
        if last is not None and self._written < self.appended:
            last.result()
        self._check()
        return self._mapped.read(rows)

    def is_at(self, path: Path) -> bool:
        """Return True if `path` is this very file."""
        return self._mapped.is_at(path)

    def mark_inexact(self) -> None:
        """Mark the file as inexact for every run, because it contains rows of several origins."""
        self.manifest = replace(self.manifest, fingerprint=Fingerprint.of(self.manifest.fingerprint.fields))

    def publish(self) -> None:
        """Publish the file once everything appended so far is in it."""
        self._submit(self._publish)

    def close(self, *, keep: bool) -> None:
        """Wait for pending work; publish an unpublished file if `keep` and it has rows, else remove it.

        Rows of this object stay readable.

        Raises:
            CacheFault: an error that no call has reported yet.
        """
        if keep and self.appended:
            self.publish()
        self._worker.shutdown(wait=True)
        self._discard()
        self._check()

    def delete(self, budget: Budget) -> None:
        """Remove the closed file, unless another one has its name; rows of this object stay readable."""
        if self._published and self._reserved:
            if self.is_at(self.path):
                remove(self.path)
            self._give_back()

    def _allocate(self, *, private: bool) -> None:
        size, directory = self._frame.size, self.path.parent
        self._budget.reserve(size, path=self.path)
        self._reserved = size
        # A killed process left it. The lock shows that no process writes to it.
        self._temporary.unlink(missing_ok=True)
        if size + SPARE_BYTES > free_bytes(directory):
            raise CacheFull(
                f"cache file {self.path} needs {size} bytes, but {directory} has {free_bytes(directory)} free"
            )
        self._descriptor = open_new(self._temporary, mode=0o600 if private else 0o640)
        os.posix_fallocate(self._descriptor, 0, size)
        for offset, content in self._frame.extents.items():
            write_at(self._descriptor, memoryview(content), offset)

    def _submit(self, task: Callable[[], None], *, staged: Tensor | None = None) -> None:
        self._last = self._worker.submit(self._run, task, staged)

    def _run(self, task: Callable[[], None], staged: Tensor | None) -> None:
        # Whatever fails here has no caller to reach: the next call raises it.
        try:
            if self._error is None:
                task()
        except Exception as error:
            self._error = _fault_of(error, path=self.path)
        finally:
            if staged is not None:
                self._free.put(staged)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, keys: Keys, rows: Tensor) -> None:
        """Write `rows` (len(keys), elements), contiguous, of the stored type, after those already written."""
        content = rows.view(torch.uint8).numpy().reshape(-1).data
        start = self._frame.regions[PAYLOAD].offset + self._written * self.manifest.row.row_bytes
        write_at(self._descriptor, content, start)
        self._hasher.update(content)
        self._keys[self._written : self._written + len(keys)] = keys
        self._written += len(keys)

    def _publish(self) -> None:
        """Give the file its final name, if it does not have it; on failure the file with that name is untouched."""
        if self._published:
            return
        manifest = replace(self.manifest, rows=self._written)
        regions, digests = self._frame.regions, self._hasher.digests()
        parts = tables(manifest, self._keys[: self._written], digests, manifest_bytes=regions["manifest"].nbytes)
        parts["manifest_sha256"] = manifest_digest(lambda name: [parts[name]], regions)
        for name, content in parts.items():
            write_at(self._descriptor, memoryview(content), regions[name].offset)
        opened, found = find_regions(self._temporary, names=NAMES)
        os.close(opened)
        # Where locks are each machine's own, a job on another one has put its file in this one's place.
        if found != regions or not self._mapped.is_at(self._temporary):
            raise CacheFault(f"cache file {self.path} was changed by another process while it was being written")
        replace_file(self._descriptor, self._temporary, self.path)
        self._mapped.seal(partial(verify_ranges, manifest, digests))
        self._published = True
        sync_folder(self.path.parent)
        self._budget.release(self._replaces)
        self._let_go()

    def _discard(self) -> None:
        """Remove the temporary file unless it was published."""
        if not self._published:
            if self._descriptor >= 0:
                remove(self._temporary, only=self._descriptor)
            self._give_back()
        self._let_go()

    def _give_back(self) -> None:
        self._budget.release(self._reserved)
        self._reserved = 0

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()


def _fault_of(error: Exception, *, path: Path) -> CacheFault:
    """Return `error` as a cache fault that names the file; a full disk and a cache fault keep their type."""
    if isinstance(error, CacheFault):
        return error
    full = isinstance(error, OSError) and error.errno in FULL
    kind = CacheFull if full else CacheFault
    return kind(f"cache file {path} cannot be written ({error})")


def write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of `content`, in several calls if necessary."""
    while len(content):
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count
