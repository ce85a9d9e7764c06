"""Writing behind the training's back: batches are copied into staging buffers, and one thread carries them to disk.

The file is begun under its lock, with the rows of the one that it will replace.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheBusy, CacheFault
from hvfreeze.cache.file.disk import Budget, Disk
from hvfreeze.cache.file.lock import FileLock
from hvfreeze.cache.file.manifest import Manifest
from hvfreeze.cache.file.names import LOCK_SUFFIX
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys, RowFormat
from hvfreeze.cache.file.writer import FileWriter, fault_of
from hvfreeze.cache.fingerprint import Fingerprint, fingerprint

logger = logging.getLogger(__name__)

STAGED_BATCHES = 3


class BackgroundWriter:
    """Feeds a `FileWriter`. All but `read` belong to one thread; row numbers are given out in the order of `append`."""

    def __init__(self, file: FileWriter, *, staging_rows: int) -> None:
        """Expect at most `staging_rows` rows an `append`; up to three times that is kept in memory."""
        self.file = file
        self.appended = 0
        self._error: CacheFault | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._last: Future[None] | None = None
        self._free: queue.LifoQueue[Tensor] = queue.LifoQueue()
        self._staging_rows = staging_rows
        # The one used last comes first: while the disk keeps up, the others are never touched and take no memory.
        for _ in range(STAGED_BATCHES):
            self._free.put(torch.empty(staging_rows, file.manifest.row.num_elements, dtype=file.manifest.row.stored))

    @property
    def path(self) -> Path:
        """The final name of the file."""
        return self.file.path

    @property
    def manifest(self) -> Manifest:
        """What the file is to hold."""
        return self.file.manifest

    def is_at(self, path: Path) -> bool:
        """Tell whether `path` is the file that this has published."""
        return self.file.is_at(path)

    def delete(self, budget: Budget) -> None:
        """Remove the file, published or not; rows stay readable from here."""
        self.file.delete()

    def append(self, keys: Keys, rows: Tensor, *, select: Tensor) -> float:
        """Take a copy of rows `select` of `rows` (batch, elements); the batch may be changed afterwards.

        Returns:
            Seconds for which the caller was held up.

        Raises:
            CacheFault: an earlier write has failed.
        """
        self.check()
        start = time.perf_counter()
        staged = self._free.get()
        taken = staged[: len(select)]
        torch.index_select(rows, 0, select, out=taken)
        self.appended += len(keys)

        self._submit(lambda: self.file.write(keys, taken), staged=staged)
        return time.perf_counter() - start

    def copy(self, source: ActivationFile) -> None:
        """Take over all rows of `source`, in its order, once they are verified."""
        self.appended += len(source.keys)

        def copy() -> None:
            source.verify()
            for first in range(0, len(source.keys), self._staging_rows):
                rows = torch.arange(first, min(first + self._staging_rows, len(source.keys)))
                self.file.write(source.keys[first : first + len(rows)], source.read(rows))

        self._submit(copy)

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of appended rows, by int64 row numbers; waits until they are written.

        Raises:
            CacheFault: a write has failed.
        """
        last = self._last
        if last is not None and self.file.written < self.appended:
            last.result()
        self.check()
        return self.file.read(rows)

    def publish(self) -> None:
        """Let the file be published once everything appended so far is in it."""
        self._submit(self.file.publish)

    def close(self, *, keep: bool) -> None:
        """Wait for what was asked for; an unpublished file is published if `keep` and it has rows, else removed.

        Raises:
            CacheFault: something has failed that no call has reported yet.
        """
        if keep and self.appended:
            self.publish()
        self._worker.shutdown(wait=True)
        self.file.discard()
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._error is not None:
            raise self._error

    def _submit(self, task: Callable[[], None], *, staged: Tensor | None = None) -> None:
        self._last = self._worker.submit(self._run, task, staged)

    def _run(self, task: Callable[[], None], staged: Tensor | None) -> None:
        # Whatever fails here has no caller to reach: the next call raises it.
        try:
            if self._error is None:
                task()
        except Exception as error:
            self._error = fault_of(error, path=self.file.path)
        finally:
            if staged is not None:
                self._free.put(staged)


@dataclass(frozen=True)
class Generations:
    """Begins the files of one name, each with the rows of the one before and space for more.

    Attributes:
        path: the name.
        mark: the fingerprint of every row.
        batch_rows: the most rows that are added at once.
        owner: names the run.
        budget: pays for what is allocated.
        disk: the real one, or what stands in for it.
        private: refuse files that are not this user's own.
    """

    path: Path
    mark: Fingerprint
    batch_rows: int
    owner: str
    budget: Budget
    disk: Disk
    private: bool

    def lock(self) -> FileLock | None:
        """Return the lock that `begin` needs; None, and tell the user, where another process is making the file."""
        try:
            return FileLock(self.path.with_name(self.path.name + LOCK_SUFFIX), owner=self.owner)
        except CacheBusy as busy:
            logger.warning("%s; its rows are computed until they are there", busy)
            return None

    def begin(
        self, lock: FileLock, row: RowFormat, *, missing: int, own: ActivationFile | None, exact: bool
    ) -> BackgroundWriter:
        """Return what writes a file with the rows of `own`, which it will replace, and space for `missing` more.

        Args:
            lock: let go of by the writer; by the caller where this raises.
            row: what a row is.
            missing: rows that are to come.
            own: the file of the name, if there is one; its rows are `row`'s.
            exact: whether all files in use have the bits that this run would compute.

        Raises:
            CacheFault: the file cannot be made.
        """
        exact = exact and (own is None or self.mark.is_exact(own.manifest.fingerprint))
        manifest = Manifest(
            fingerprint=self.mark if own is None or exact else fingerprint(self.mark.fields),
            row=row,
            capacity=(len(own.keys) if own else 0) + missing,
            rows=0,
            owner=own.manifest.owner if own else self.owner,
        )
        file = FileWriter(
            self.path,
            lock=lock,
            manifest=manifest,
            budget=self.budget,
            disk=self.disk,
            replaces=own.file_bytes if own else 0,
            private=self.private,
        )
        writer = BackgroundWriter(file, staging_rows=self.batch_rows)
        if own is not None:
            writer.copy(own)
        return writer
