"""The rows of one fingerprint: those of published files, compared before use, and rows added by this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheBusy, CacheFault
from hvfreeze.cache.file.disk import Budget, prepare_directory, take_lock
from hvfreeze.cache.file.format import Keys, Manifest, RowFormat
from hvfreeze.cache.file.reader import LOCK_SUFFIX, ActivationFile, files_of, open_listed, path_of, shard_of
from hvfreeze.cache.file.writer import FileWriter
from hvfreeze.cache.fingerprint import Fingerprint, bytes_of
from hvfreeze.cache.index import MISSING, Mask, RowIndex, contains
from hvfreeze.files import FileLock

logger = logging.getLogger(__name__)

WHOLE = slice(None)
Part = ActivationFile | FileWriter


@dataclass(frozen=True)
class RowLocation:
    """The location of a batch's rows: (part, positions in the batch, row numbers) for each part."""

    num_rows: int
    pieces: Sequence[tuple[Part, Tensor | slice, Tensor]]

    @classmethod
    def of(cls, numbers: Keys, rows: Keys, *, among: Sequence[Part]) -> RowLocation:
        """Return the location with row `rows[i]` of part `among[numbers[i]]` at each position i."""
        if len(among) == 1 or (numbers == numbers[0]).all():
            return cls(len(rows), ((among[numbers[0]], WHOLE, torch.from_numpy(rows)),))
        pieces = []
        for number in np.unique(numbers):
            where = np.flatnonzero(numbers == number)
            pieces.append((among[number], torch.from_numpy(where), torch.from_numpy(rows[where])))
        return cls(len(rows), pieces)

    def read(self) -> Tensor:
        """Return the rows (num_rows, elements) in the stored type; raises CacheFault like the parts' `read`."""
        (part, where, rows), *others = self.pieces
        raw = part.read(rows)
        if others:
            first, raw = raw, torch.empty(self.num_rows, raw.shape[1], dtype=raw.dtype)
            raw[where] = first
            for part, where, rows in others:
                raw[where] = part.read(rows)
        return raw


MOST_DIFFERENT = 1 / 32
"""Largest relative difference that other threads or batch shapes may cause; another prefix causes about 1."""


@dataclass(frozen=True)
class Sample:
    """A sample of a file's rows: keys and row numbers, (rows,), and whether they must have the bits of this run."""

    file: ActivationFile
    keys: Keys
    rows: Keys
    exact: bool

    def compare(self, computed: Tensor, *, like: Tensor, batch_invariant: bool) -> None:
        """Raise CacheFault if the file's rows differ from `computed`, a part of the whole forward pass `like`."""
        row_format = self.file.manifest.row
        ours = RowFormat.of(like, stored=row_format.stored)
        if not row_format.same_rows(ours):
            raise CacheFault(
                f"cache file {self.file.path} refused: it stores rows of {row_format}, this run computes {ours}; "
                "remove it, or choose another --cache-dir or directory="
            )
        theirs, local = self.file.read(torch.from_numpy(self.rows)), row_format.pack(computed)
        if torch.equal(bytes_of(local), bytes_of(theirs)):
            return
        difference = _relative_difference(local, theirs)
        if (batch_invariant and self.exact) or not difference <= MOST_DIFFERENT:
            raise CacheFault(
                f"cache file {self.file.path} refused: its fingerprint matches, but its rows differ from those of "
                f"this run (relative difference {difference:.2g} in {len(self.rows)} compared rows); remove it, or "
                "choose another --cache-dir or directory="
            )


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of a row relative to its norm; NaN if either contains NaN."""
    ours, theirs = ours.double(), theirs.double()
    norms = ours.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return float(((ours - theirs).norm(dim=1) / norms).max())


class Store:
    """The rows of one fingerprint: those of published files, and rows added by this process.

    `locate` and `read_at` may be called from any thread, everything else from one. Callers need not know the row order.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        owned_keys: Keys,
        *,
        shard: str,
        batch_rows: int,
        stored: torch.dtype | None = None,
        shared: bool = False,
        private: bool = True,
        budget: Budget | None = None,
        owner: str = "",
    ) -> None:
        """Open the existing files; each is verified when it is first read.

        Args:
            directory: created if absent.
            fingerprint: the fingerprint of every row.
            owned_keys: keys (rows,) that this process may add; a file is allocated for the missing ones.
            shard: "RofN", part of the name of the file that this process writes.
            batch_rows: rows of a forward pass, for the strides of the rows that are read.
            stored: type in the file; None is the type of appended rows.
            shared: also use rows outside of `owned_keys`, from files of other ranks.
            private: refuse files of other users.
            budget: limit that allocated files count towards.
            owner: the run's name; `delete` removes files of the same owner only, and without a name those of this
                object.

        Raises:
            CacheFault: a file with this fingerprint is damaged, unsafe or belongs to another one, or the directory
                cannot be created.
        """
        self.fingerprint, self.shared, self.waiting = fingerprint, shared, False
        self.path = path_of(directory, fingerprint, shard=shard)
        self.row: RowFormat | None = None
        self._directory, self._batch_rows, self._stored, self._owner = directory, batch_rows, stored, owner
        self._private, self._budget = private, budget or Budget()
        self._index = RowIndex(owned_keys)
        self.owned_keys = self._index.keys
        self._num_missing = len(self.owned_keys)
        self._parts: tuple[Part, ...] = ()
        self._writer: FileWriter | None = None
        self._adopted: list[ActivationFile] = []
        self._to_compare: list[Sample] = []
        prepare_directory(directory, private=private)
        self.refresh()

    @property
    def cut(self) -> int:
        """The cut of the rows."""
        cut = self.fingerprint.fields["cut"]
        assert isinstance(cut, int)
        return cut

    @property
    def exact(self) -> bool:
        """Whether every file in use has the bits that this run would compute."""
        return all(self.fingerprint.is_exact(part.manifest.fingerprint) for part in self._parts)

    @property
    def complete(self) -> bool:
        """Whether all owned rows are stored."""
        return self._num_missing == 0

    @property
    def writing(self) -> bool:
        """Whether this process has a file open to which missing rows can be added."""
        return self._writer is not None

    @property
    def num_present(self) -> int:
        """Number of owned rows that are stored."""
        return len(self.owned_keys) - self._num_missing

    @property
    def rows_to_complete(self) -> int:
        """Rows in this process's own incomplete file, which are rewritten when it is completed."""
        own = [part for part in self._adopted if part.path == self.path]
        return 0 if self.complete else sum(len(file.keys) for file in own)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the owned rows that are stored."""
        return self.num_present * self.row.row_bytes if self.row else 0

    def missing(self, keys: Keys) -> Mask:
        """Return for each of `keys` (rows,) whether its row is missing."""
        return self._index.missing(keys)

    def missing_owned(self, keys: Keys) -> Mask:
        """Return for each of `keys` (rows,) whether its row is missing and may be added."""
        return self.missing(keys) & contains(self.owned_keys, keys)

    def locate(self, keys: Keys) -> RowLocation | None:
        """Return the location of the rows of `keys`, which stays valid; None if one is missing."""
        return self.locate_batches([keys])[0]

    def locate_batches(self, batches: Sequence[Keys]) -> list[RowLocation | None]:
        """Return the location of each of `batches`, in one lookup, which is several times faster."""
        parts, rows = self._index.locate(np.concatenate(batches))
        stops = np.cumsum([len(keys) for keys in batches]).tolist()
        starts = [0, *stops[:-1]]
        incomplete = np.logical_or.reduceat(rows == MISSING, starts)
        return [
            None if missing else RowLocation.of(parts[start:stop], rows[start:stop], among=self._parts)
            for start, stop, missing in zip(starts, stops, incomplete, strict=True)
        ]

    def read_at(self, place: RowLocation) -> Tensor:
        """Return the located activations (rows, ...), with the strides of a forward.

        Raises:
            CacheFault: a file is damaged, truncated or changed, or an earlier write has failed.
        """
        assert self.row is not None
        return self.row.unpack(place.read(), batch_rows=self._batch_rows)

    def append(self, keys: Keys, batch: Tensor, *, exact: bool = True) -> int:
        """Add the rows of `keys` (rows,) that are missing and owned; return how many.

        `batch` is a whole forward pass (batch_rows, ...). Its first rows belong to `keys`, the rest is padding. The
        caller may change it as soon as this returns. A complete file is published. If another process is writing the
        file, or has published rows of it since the last refresh, nothing is added, and `waiting` is True until
        `refresh`.

        Raises:
            CacheFault: the file cannot be created, or an earlier write has failed.
        """
        chosen = self._wanted(keys)
        if self.waiting or len(chosen) == 0:
            return 0
        row = RowFormat.of(batch, stored=self._stored)
        self._check_row_format(row, self.row)
        if self._writer is None:
            self._start_writer(row)
        writer = self._writer
        if writer is None:
            return 0
        if not exact:
            writer.mark_inexact()
        first = writer.appended
        writer.append(keys[chosen], row.pack(batch), select=torch.from_numpy(chosen))
        rows = np.arange(first, writer.appended)
        self._index.place(keys[chosen], part=self._parts.index(writer), rows=rows)
        self._num_missing -= len(chosen)
        if writer.appended == writer.manifest.capacity:
            writer.publish()
        return len(chosen)

    def refresh(self) -> None:
        """Open files published meanwhile; those of other ranks only if rows are missing, or all if shared."""
        self.waiting = False
        if self.shared:
            files = list(self._new_files())
            # Once for all files: their number times all keys would be too much.
            self._index.extend([file.keys for file in files])
            for file in files:
                self._adopt(file)
        elif not self.complete:
            for file in self._new_files():
                self._adopt(file)
                if self.complete:
                    return

    def to_compare(self) -> Keys:
        """Return the keys, at most a batch, of rows to compute for `compare` before files are used; may be empty."""
        return np.concatenate([np.empty(0, np.int64), *(sample.keys for sample in self._next_samples())])

    def compare(self, batch: Tensor, *, batch_invariant: bool) -> None:
        """Compare the rows of `to_compare` with `batch`, (batch_rows, ...), their computed values and padding.

        Args:
            batch: rounded as for a file.
            batch_invariant: a row's bits do not depend on its place in a batch, so an exact file must have them.

        Raises:
            CacheFault: the rows of a file do not match its fingerprint.
        """
        first = 0
        for sample in self._next_samples():
            computed = batch[first : first + len(sample.keys)]
            sample.compare(computed, like=batch, batch_invariant=batch_invariant)
            first += len(sample.keys)
        del self._to_compare[: self._batch_rows]

    def verify_share(self, rank: int, size: int) -> dict[str, str]:
        """Verify this rank's share of the files in use; return their names and digests for `accept`.

        Raises:
            CacheFault: one of them is damaged.
        """
        local = [file for file in self._adopted if shard_of(file.path) % size == rank]
        for file in local:
            file.verify()
        return {file.path.name: file.digest for file in local}

    def accept(self, verified: Mapping[str, str]) -> None:
        """Mark files that `verify_share` of other ranks returned as verified; others are at the first read."""
        for file in self._adopted:
            file.accept(verified.get(file.path.name, ""))

    def publish(self) -> None:
        """Publish the rows added so far, even if more will follow; return when they are safe.

        Raises:
            CacheFault: a row could not be written.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close(keep=True)

    def close(self) -> None:
        """Publish the added rows and stop; raises like `publish`."""
        self.publish()

    def delete(self) -> None:
        """Stop and remove the files of this owner; rows stay readable from this object."""
        self.discard()
        for part in self._parts:
            named = bool(self._owner) or isinstance(part, FileWriter)
            if named and part.path == self.path and part.manifest.owner == self._owner:
                part.delete(self._budget)

    def discard(self) -> None:
        """Stop, and remove unpublished files. Errors are ignored."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with contextlib.suppress(CacheFault):
                writer.close(keep=False)

    def _wanted(self, keys: Keys) -> npt.NDArray[np.intp]:
        """Return the positions in `keys` (rows,) of the rows to add, each once."""
        new = self.missing_owned(keys)
        first: npt.NDArray[np.intp] = np.flatnonzero(new)[np.unique(keys[new], return_index=True)[1]]
        return first

    def _next_samples(self) -> list[Sample]:
        """Return files to compare, with a few rows of each, spread over the file and at most a batch in all."""
        samples = self._to_compare[: self._batch_rows]
        chosen = []
        for sample in samples:
            count = min(len(sample.keys), self._batch_rows // len(samples))
            at = np.linspace(0, len(sample.keys) - 1, count).astype(np.int64)
            chosen.append(replace(sample, keys=sample.keys[at], rows=sample.rows[at]))
        return chosen

    def _new_files(self) -> Iterator[ActivationFile]:
        """Open and yield the files that are not in use yet, this process's own first."""
        for path in sorted(files_of(self._directory, self.fingerprint), key=lambda path: path != self.path):
            if not any(part.is_at(path) for part in self._parts) and (file := self._open(path)):
                yield file

    def _open(self, path: Path) -> ActivationFile | None:
        return open_listed(path, self.fingerprint, private=self._private)

    def _adopt(self, file: ActivationFile) -> None:
        """Use the rows of `file` that are missing here, if there are any."""
        wanted = np.flatnonzero(self.missing(file.keys) & contains(self._index.keys, file.keys))
        if len(wanted) == 0:
            return
        if self.row is not None and not self.row.same_rows(file.manifest.row):
            logger.info("cache file %s not used: its rows have another memory layout", file.path)
            return
        self.row = self.row or file.manifest.row
        own = wanted[contains(self.owned_keys, file.keys[wanted])]
        self._adopted.append(file)
        if len(own):
            # A file with none of them is compared by the ranks that can compute its rows.
            exact = self.fingerprint.is_exact(file.manifest.fingerprint)
            self._to_compare.append(Sample(file, file.keys[own], own, exact))
        # In this order: a reader in another thread may look the part up as soon as its rows are placed.
        self._parts = (*self._parts, file)
        self._index.place(file.keys[wanted], part=len(self._parts) - 1, rows=wanted)
        self._num_missing -= len(own)

    def _start_writer(self, row: RowFormat) -> None:
        """Start the file for missing rows, unless another job is writing it or has published some of them meanwhile.

        Only under the lock it is certain which file has the name. Otherwise a published row could be stored twice, and
        the new file would be refused forever. Published rows must also be compared before use, which `refresh` starts.
        """
        try:
            path = self.path.with_name(self.path.name + LOCK_SUFFIX)
            lock = take_lock(path, owner=self._owner, private=self._private)
        except CacheBusy as busy:
            logger.warning("%s; its rows are computed until the file is complete", busy)
            self.waiting = True
            return
        try:
            if self._has_news(row):
                lock.release()
                self.waiting = True
                return
            self._writer = self._new_writer(lock, row)
            self.row = self.row or row
            self._parts = (*self._parts, self._writer)
        except BaseException:
            lock.release()
            raise

    def _has_news(self, row: RowFormat) -> bool:
        """Return True if other jobs have published missing rows since the last refresh."""
        alike = (file for file in self._new_files() if file.manifest.row.same_rows(row))
        return any(self.missing_owned(file.keys).any() for file in alike)

    def _new_writer(self, lock: FileLock, row: RowFormat) -> FileWriter:
        """Return a writer for a file with the rows of the one that it replaces, and room for the missing ones."""
        own = self._open(self.path)
        self._check_row_format(row, own.manifest.row if own else None)
        exact = self.exact and (own is None or self.fingerprint.is_exact(own.manifest.fingerprint))
        manifest = Manifest(
            fingerprint=self.fingerprint if own is None or exact else Fingerprint.of(self.fingerprint.fields),
            row=row,
            capacity=(len(own.keys) if own else 0) + self._num_missing,
            rows=0,
            owner=own.manifest.owner if own else self._owner,
        )
        writer = FileWriter(
            self.path,
            lock=lock,
            manifest=manifest,
            budget=self._budget,
            staging_rows=self._batch_rows,
            replaces=own.file_bytes if own else 0,
            private=self._private,
        )
        if own is not None:
            writer.copy(own)
        return writer

    def _check_row_format(self, row: RowFormat, known: RowFormat | None) -> None:
        if known is not None and not known.same_rows(row):
            raise CacheFault(f"cache file {self.path} stores rows of {known}, this run computes {row}; remove it")
