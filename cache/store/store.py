"""The rows of one fingerprint: those in published files, whoever made them, and those that this process adds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget, Disk, LocalDisk, prepare_directory
from hvfreeze.cache.file.names import path_of
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys, RowFormat
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.cache.store.background import BackgroundWriter, Generations
from hvfreeze.cache.store.index import MISSING, Mask, RowIndex, contains
from hvfreeze.cache.store.parts import Part, Place
from hvfreeze.cache.store.published import Published

logger = logging.getLogger(__name__)


class Store:
    """The rows of one fingerprint: those in published files, and those that this process adds.

    `read` may be called from any thread, everything else from one. Row order is never the caller's business.
    """

    def __init__(
        self,
        directory: Path,
        mark: Fingerprint,
        universe: Keys,
        *,
        shard: str,
        batch_rows: int,
        stored: torch.dtype | None = None,
        shared: bool = False,
        private: bool = True,
        budget: Budget | None = None,
        owner: str = "",
        disk: Disk | None = None,
    ) -> None:
        """Open what is there; files start to be verified in the background.

        Args:
            directory: made if absent.
            mark: the fingerprint of every row.
            universe: keys (rows,) that this process may add; a file is allocated for as many as are missing.
            shard: "RofN", names the file that this process writes.
            batch_rows: rows of a forward, for the strides of what is read.
            stored: type in the file; None is the type that is appended.
            shared: also serve rows outside of `universe`, from files of other ranks.
            private: refuse files that are not this user's own.
            budget: pays for what is allocated.
            owner: names the run; `delete` removes files of the same owner only, and without one what this object made.
            disk: stands in for the real one.

        Raises:
            CacheFault: a file of this fingerprint is damaged, unsafe or belongs to another one, or the directory
                cannot be made.
        """
        self.mark, self.directory, self.shared = mark, directory, shared
        self.waiting = False
        self.path = path_of(directory, mark, shard=shard)
        self.row: RowFormat | None = None
        self._batch_rows, self._stored, self._owner = batch_rows, stored, owner
        self._budget, disk = budget or Budget(), disk or LocalDisk()
        self._generations = Generations(
            self.path, mark, batch_rows=batch_rows, owner=owner, budget=self._budget, disk=disk, private=private
        )
        self._index = RowIndex(universe)
        self.universe = self._index.keys
        self._num_missing = len(self.universe)
        self._parts: tuple[Part, ...] = ()
        self._writer: BackgroundWriter | None = None
        prepare_directory(directory, private=private)
        self.published = Published(
            directory, mark, first=self.path, batch_rows=batch_rows, late=shared, private=private, disk=disk
        )
        self.refresh()

    @property
    def exact(self) -> bool:
        """Whether every file in use has the bits that this run would compute."""
        return all(self.mark.is_exact(part.manifest.fingerprint) for part in self._parts)

    @property
    def complete(self) -> bool:
        """Whether no row of the universe is missing."""
        return self._num_missing == 0

    @property
    def writing(self) -> bool:
        """Whether this process has a file open to which missing rows can be added."""
        return self._writer is not None

    @property
    def num_present(self) -> int:
        """Rows of the universe that are there."""
        return len(self.universe) - self._num_missing

    @property
    def stored_bytes(self) -> int:
        """Bytes of the universe's rows that are there."""
        return self.num_present * self.row.row_bytes if self.row else 0

    def missing(self, keys: Keys) -> Mask:
        """Tell for each of `keys` (rows,) whether its row is not there."""
        return self._index.missing(keys)

    def read(self, keys: Keys) -> Tensor | None:
        """Return the activations (rows, ...) of `keys` with the strides of a forward, or None when a row is missing.

        Raises:
            CacheFault: a file is damaged, truncated or changed, or an earlier write has failed.
        """
        place = self.locate(keys)
        return None if place is None else self.read_at(place)

    def locate(self, keys: Keys) -> Place | None:
        """Return where the rows of `keys` lie, for good; None when one is missing."""
        parts, rows = self._index.locate(keys)
        return None if (rows == MISSING).any() else Place.of(parts, rows, among=self._parts)

    def locate_batches(self, batches: Sequence[Keys]) -> list[Place | None]:
        """Return what `locate` gives for each of `batches`, looked up at once, which is several times faster."""
        parts, rows = self._index.locate(np.concatenate(batches))
        stops = np.cumsum([len(keys) for keys in batches]).tolist()
        starts = [0, *stops[:-1]]
        incomplete = np.logical_or.reduceat(rows == MISSING, starts)
        return [
            None if missing else Place.of(parts[start:stop], rows[start:stop], among=self._parts)
            for start, stop, missing in zip(starts, stops, incomplete, strict=True)
        ]

    def read_at(self, place: Place) -> Tensor:
        """Return the activations (rows, ...) that `locate` has found; raise as `read` does."""
        assert self.row is not None
        return self.row.unpack(place.read(), batch_rows=self._batch_rows)

    def append(self, keys: Keys, batch: Tensor, *, exact: bool = True) -> int:
        """Add those of `keys` (rows,) that are missing and in the universe; return how many.

        `batch` is a whole forward (batch_rows, ...), of which the first rows belong to `keys` and the rest to nobody;
        the caller may change it as soon as this returns. A full file is published. While another process is making
        the file nothing is added: `waiting` is true until `refresh` looks again.

        Raises:
            CacheFault: the file cannot be made, or an earlier write has failed.
        """
        chosen = self._wanted(keys)
        if self.waiting or len(chosen) == 0:
            return 0
        row = RowFormat.of(batch, stored=self._stored)
        self._refuse_unlike(row, self.row)
        if self._writer is None:
            self._start_writer(row)
            # Another job may have published them since the last look.
            chosen = self._wanted(keys)
        writer = self._writer
        if writer is None or len(chosen) == 0:
            return 0
        if not exact:
            writer.file.mark_inexact()
        first = writer.appended
        writer.append(keys[chosen], row.pack(batch), select=torch.from_numpy(chosen))
        rows = np.arange(first, writer.appended)
        self._index.place(keys[chosen], part=self._parts.index(writer), rows=rows)
        self._num_missing -= len(chosen)
        if writer.appended == writer.manifest.capacity:
            writer.publish()
        return len(chosen)

    def refresh(self) -> None:
        """Take in files published since; other ranks' only where rows are missing, or all of them if shared."""
        self.waiting = False
        if self.shared:
            files = list(self.published.new(self._parts))
            # Once for all files: their number times all keys would be too much.
            self._index.extend([file.keys for file in files])
            for file in files:
                self._adopt(file)
        elif not self.complete:
            for file in self.published.new(self._parts):
                self._adopt(file)
                if self.complete:
                    return

    def publish(self) -> None:
        """Publish the rows added so far, even if more are to come; return when they are safe.

        Raises:
            CacheFault: something could not be written.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close(keep=True)

    def close(self) -> None:
        """Publish what was added and stop; raise as `publish` does."""
        self.published.stop(wait=True)
        self.publish()

    def delete(self) -> None:
        """Stop and remove what this owner has made; rows stay readable from this object."""
        self.discard()
        for part in self._parts:
            named = bool(self._owner) or isinstance(part, BackgroundWriter)
            if named and part.path == self.path and part.manifest.owner == self._owner:
                part.delete(self._budget)

    def discard(self) -> None:
        """Stop and remove what is not published yet; whatever is wrong with it no longer matters."""
        self.published.stop(wait=False)
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with contextlib.suppress(CacheFault):
                writer.close(keep=False)

    def _wanted(self, keys: Keys) -> npt.NDArray[np.intp]:
        """Return the positions in `keys` (rows,) of the rows that are to be added, each once."""
        new = self.missing(keys) & contains(self.universe, keys)
        first: npt.NDArray[np.intp] = np.flatnonzero(new)[np.unique(keys[new], return_index=True)[1]]
        return first

    def _adopt(self, file: ActivationFile) -> None:
        """Use the rows of `file` that are missing here, if there are any."""
        wanted = np.flatnonzero(self.missing(file.keys) & contains(self._index.keys, file.keys))
        if len(wanted) == 0:
            return
        if self.row is not None and not self.row.same_rows(file.manifest.row):
            logger.info("cache file %s not used: its rows are laid out in another way", file.path)
            return
        self.row = self.row or file.manifest.row
        own = wanted[contains(self.universe, file.keys[wanted])]
        self.published.use(file, file.keys[own], own)
        # In this order: a reader in another thread may look the part up as soon as its rows are placed.
        self._parts = (*self._parts, file)
        self._index.place(file.keys[wanted], part=len(self._parts) - 1, rows=wanted)
        self._num_missing -= len(own)

    def _start_writer(self, row: RowFormat) -> None:
        """Begin the file for what is missing, unless another job is doing so or has published all of it meanwhile.

        Only under the lock is it certain which file has the name. A row of it that counted as missing would be stored
        twice, and the new file be refused for good.
        """
        lock = self._generations.lock()
        if lock is None:
            self.waiting = True
            return
        try:
            self.refresh()
            self._refuse_unlike(row, self.row)
            if self.complete:
                lock.release()
                return
            own, exact = self.published.open(self.path), self.exact
            self._refuse_unlike(row, own.manifest.row if own else None)
            self._writer = self._generations.begin(lock, row, missing=self._num_missing, own=own, exact=exact)
            self.row = self.row or row
            self._parts = (*self._parts, self._writer)
        except BaseException:
            lock.release()
            raise

    def _refuse_unlike(self, row: RowFormat, known: RowFormat | None) -> None:
        if known is not None and not known.same_rows(row):
            raise CacheFault(f"cache file {self.path} holds rows of {known}, this run computes {row}: remove it")
