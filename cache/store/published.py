"""The published files of one fingerprint: found, believed or not, verified once, and compared before they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Disk
from hvfreeze.cache.file.names import files_of, shard_of
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.cache.store.parts import Part
from hvfreeze.cache.store.proof import Sample, Unproven


class Published:
    """Files of any rank, in any run; `in_use` are those whose rows this process may read."""

    def __init__(
        self, directory: Path, mark: Fingerprint, *, first: Path, batch_rows: int, late: bool, private: bool, disk: Disk
    ) -> None:
        """Open nothing yet.

        Args:
            directory: where they lie.
            mark: the fingerprint of every row.
            first: is looked at before the others.
            batch_rows: rows of a forward.
            late: verify files when they are first read or by `verify_share`, and not in the background at once.
            private: refuse files that are not this user's own.
            disk: stands in for the real one.
        """
        self.in_use: list[ActivationFile] = []
        self._directory, self._mark, self._first = directory, mark, first
        self._late, self._private, self._disk = late, private, disk
        self._unproven = Unproven(batch_rows=batch_rows)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="cache-verifier")

    def new(self, known: Sequence[Part]) -> Iterator[ActivationFile]:
        """Yield the files that are none of `known`, opened one after another.

        Raises:
            CacheFault: a file is damaged, unsafe or belongs to another fingerprint.
        """
        for path in sorted(files_of(self._directory, self._mark), key=lambda path: path != self._first):
            if not any(part.is_at(path) for part in known) and (file := self.open(path)):
                yield file

    def open(self, path: Path) -> ActivationFile | None:
        """Return the file at `path`; None when its owner has removed it since the directory was listed."""
        try:
            return ActivationFile(path, expected=self._mark, disk=self._disk, private=self._private)
        except CacheFault:
            if path.exists():
                raise
            return None

    def use(self, file: ActivationFile, keys: Keys, rows: Keys) -> None:
        """Let rows of `file` be read; `keys` and `rows`, (rows,), are some that this process can compute."""
        if self._late:
            file.verify_when_read()
        else:
            file.verify_in(self._verifier)
        self.in_use.append(file)
        self._unproven.add(Sample(file, keys, rows, self._mark.is_exact(file.manifest.fingerprint)))

    def to_compare(self) -> Keys:
        """Return keys, at most a batch, of rows that must be computed for `compare` before files are used; or none."""
        return self._unproven.keys()

    def compare(self, batch: Tensor, *, steady: bool) -> None:
        """Compare the rows of `to_compare` with `batch`, (batch_rows, ...), as computed for them.

        Args:
            batch: rounded as it would be for a file; rows beyond those asked for are padding.
            steady: a row's bits do not depend on its place in a batch, so that an exact file must have them.

        Raises:
            CacheFault: a file holds other rows than its fingerprint says.
        """
        self._unproven.compare(batch, steady=steady)

    def verify_share(self, rank: int, size: int) -> dict[str, str]:
        """Verify this rank's share of the files in use; return their names with the digests that `accept` asks for.

        Raises:
            CacheFault: one of them is damaged.
        """
        mine = [file for file in self.in_use if shard_of(file.path) % size == rank]
        for file in mine:
            file.verify()
        return {file.path.name: file.digest for file in mine}

    def accept(self, verified: Mapping[str, str]) -> None:
        """Take files for verified that `verify_share` of other ranks has returned; others are when first read."""
        for file in self.in_use:
            file.accept(verified.get(file.path.name, ""))

    def stop(self, *, wait: bool) -> None:
        """Verify nothing more in the background."""
        self._verifier.shutdown(wait=wait, cancel_futures=True)
