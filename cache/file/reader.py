"""Published cache files: their names, and how they are found, verified and read."""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault, CacheMismatch
from hvfreeze.cache.file.disk import Budget, remove
from hvfreeze.cache.file.format import (
    MAX_MANIFEST_BYTES,
    MAX_ROWS,
    NAMES,
    PAYLOAD,
    TABLES,
    Keys,
    Manifest,
    manifest_digest,
    pack_keys,
    verify_ranges,
)
from hvfreeze.cache.file.hdf5 import Region, find_regions
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.files import LockedError, hold_unlocked, is_at

ReadRows = Callable[[int, int], bytes]
"""Returns rows first..last-1 as bytes."""


class MappedRows:
    """Memory-mapped rows of fixed size in a file, which stay readable if the file is deleted.

    A read checks the file's size first, because access beyond the end of a truncated file kills the process.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        offset: int,
        num_rows: int,
        row_bytes: int,
        name: str,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        """Map the rows.

        Raises:
            CacheFault: the rows exceed the file, or the address space is exhausted.
        """
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._name = name
        self._end = offset + num_rows * row_bytes
        self._descriptor = os.dup(descriptor)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Closes the descriptor; the mapping is freed with the last tensor that refers to it."""
        self._sealed: tuple[int, int] | None = None
        self._verify: Callable[[ReadRows], None] = lambda read: None
        self._looking, self._is_looking = threading.RLock(), False
        try:
            self._check()
            mapped = mmap.mmap(self._descriptor, self._end, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise CacheFault(f"cache file {name} cannot be memory-mapped ({error})") from error
        except CacheFault:
            self.close()
            raise
        with warnings.catch_warnings():
            # The mapping is read-only, and so is the tensor.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            count = num_rows * row_bytes // dtype.itemsize
            self._rows = torch.frombuffer(mapped, dtype=dtype, offset=offset, count=count).view(num_rows, -1)

    def seal(self, verify: Callable[[ReadRows], None]) -> None:
        """Mark the file as finished: a later change of it is a fault.

        A process can restore the modification time of a file, but not its change time. So if the inode changed (name,
        mode or removal), `verify` is called with `pread`, reads all rows again, and raises CacheFault if they differ.
        It must not refer to this object, whose memory is freed with the last tensor that refers to it.
        """
        self._verify = verify
        status = os.fstat(self._descriptor)
        self._sealed = status.st_mtime_ns, status.st_ctime_ns

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of these rows, given as int64 row numbers.

        Raises:
            CacheFault: the file was truncated, or changed after it was sealed.
        """
        self._check()
        return torch.index_select(self._rows, 0, rows)

    def pread(self, first: int, last: int) -> bytes:
        """Return rows first..last-1 through the descriptor, which cannot kill the process on a truncated file."""
        self._check()
        length, start = (last - first) * self.row_bytes, self._end - (self.num_rows - first) * self.row_bytes
        try:
            content = os.pread(self._descriptor, length, start)
        except OSError as error:
            raise CacheFault(f"cache file {self._name} cannot be read ({error.strerror})") from error
        if len(content) != length:
            raise CacheFault(f"cache file {self._name} is {length - len(content)} bytes too short")
        return content

    def is_at(self, path: Path) -> bool:
        """Return True if `path` is this very file; False if that cannot be determined."""
        with suppress(OSError):
            return is_at(self._descriptor, path)
        return False

    def _check(self) -> None:
        status = self._status()
        if status.st_size < self._end:
            raise CacheFault(
                f"cache file {self._name} was truncated to {status.st_size} bytes; it must have {self._end}"
            )
        if self._sealed is None:
            return
        modified, touched = self._sealed
        if status.st_mtime_ns != modified:
            raise CacheFault(f"cache file {self._name} was changed while in use")
        if status.st_ctime_ns != touched:
            self._look_again()

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._descriptor)
        except OSError as error:
            # On a network file system also of a file that another machine has removed.
            raise CacheFault(f"cache file {self._name} cannot be read ({error.strerror})") from error

    def _look_again(self) -> None:
        """Verify the rows in one thread; other threads wait."""
        with self._looking:
            status = self._status()
            sealed = status.st_mtime_ns, status.st_ctime_ns
            # The verification itself reads rows, in this thread.
            if self._is_looking or self._sealed == sealed:
                return
            self._is_looking = True
            try:
                self._verify(self.pread)
            except CacheFault as fault:
                raise CacheFault(f"cache file {self._name} was changed while in use ({fault})") from fault
            finally:
                self._is_looking = False
            self._sealed = sealed


MAX_TABLE_BYTES = 32 * MAX_ROWS


class ActivationFile:
    """The rows of one published file. `keys` (rows,) int64 belong to rows 0, 1, ... of the file."""

    def __init__(
        self,
        path: Path,
        *,
        expected: Fingerprint | None = None,
        private: bool = False,
    ) -> None:
        """Open `path` and check its frame, manifest and tables.

        Raises:
            CacheMismatch: the file has another fingerprint; the differing fields are named.
            CacheFault: the file is damaged or unsafe.
        """
        self.path = path
        self._verified = False
        self._verifying = threading.Lock()
        descriptor, regions = find_regions(path, names=NAMES, private=private)
        try:
            self.file_bytes = os.fstat(descriptor).st_size
            self.manifest, self.keys, self._digests, self.digest = _read_tables(descriptor, regions)
            if expected is not None and expected.differences(self.manifest.fingerprint):
                raise CacheMismatch(f"it was made for something else: {expected.explain(self.manifest.fingerprint)}")
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
            raise CacheMismatch(f"cache file {path} refused: {mismatch}") from None
        except (CacheFault, OSError, MemoryError) as fault:
            raise CacheFault(f"cache file {path} refused: {fault}") from fault
        finally:
            os.close(descriptor)

    def verify(self) -> None:
        """Read the whole file, once, and compare every range.

        Raises:
            CacheFault: the contents of a range do not match its digest.
        """
        with self._verifying:
            if not self._verified:
                try:
                    self._compare()
                except CacheFault as fault:
                    raise CacheFault(f"cache file {self.path} refused: {fault}") from fault
                self._verified = True

    def accept(self, digest: str) -> None:
        """Mark the rows as verified if another process has verified the file with this digest."""
        self._verified = self._verified or digest == self.digest

    def _compare(self) -> None:
        """Read all rows and compare them with the digests."""
        verify_ranges(self.manifest, self._digests, self._rows.pread)

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy (len(rows), elements) of these rows, given as int64 row numbers; verifies the file first.

        Raises:
            CacheFault: the file is damaged, or was truncated or changed since it was opened.
        """
        if not self._verified:
            self.verify()
        return self._rows.read(rows)

    def is_at(self, path: Path) -> bool:
        """Return True if `path` is this very file, and not another generation of it."""
        return self._rows.is_at(path)

    def delete(self, budget: Budget) -> None:
        """Remove the file, unless another one has its name; rows of this object stay readable."""
        if self.is_at(self.path):
            remove(self.path)
            budget.release(self.file_bytes)


def _read_tables(descriptor: int, regions: dict[str, Region]) -> tuple[Manifest, Keys, list[bytes], str]:
    for name in ("manifest", *TABLES):
        most = MAX_MANIFEST_BYTES if name == "manifest" else MAX_TABLE_BYTES
        if regions[name].nbytes > most:
            raise CacheFault(f"its '{name}' has {regions[name].nbytes} bytes, more than the maximum of {most}")
    expected = _pread(descriptor, regions["manifest_sha256"])
    if manifest_digest(lambda name: _pieces(descriptor, regions[name]), regions) != expected:
        raise CacheFault("its manifest or tables are damaged")
    manifest = Manifest.from_json(_pread(descriptor, regions["manifest"]))
    for name, (shape, dtype) in manifest.datasets().items():
        region = regions[name]
        if name != "manifest" and (region.shape, region.dtype) != (shape, dtype):
            raise CacheFault(f"'{name}' is {region.dtype} {region.shape}, but the manifest says {dtype} {shape}")
    parts = {name: _pread(descriptor, regions[name]) for name in TABLES}
    ids, views = np.frombuffer(parts["sample_ids"], "<i8"), np.frombuffer(parts["views"], "<i4")
    try:
        keys = pack_keys(ids[: manifest.rows], views[: manifest.rows])
    except ValueError as error:
        raise CacheFault(f"its tables cannot be used: {error}") from error
    if len(np.unique(keys)) != len(keys):
        raise CacheFault("a pair of sample and view occurs twice")
    digests = [parts["range_sha256"][at : at + 32] for at in range(0, len(parts["range_sha256"]), 32)]
    return manifest, keys, digests, expected.hex()


def _pieces(descriptor: int, region: Region) -> Iterator[bytes]:
    """Return the region's bytes; few, because they are read before the file is trusted."""
    piece = 1 << 20
    for start in range(0, region.nbytes, piece):
        yield os.pread(descriptor, min(piece, region.nbytes - start), region.offset + start)


def _pread(descriptor: int, region: Region) -> bytes:
    content = os.pread(descriptor, region.nbytes, region.offset)
    if len(content) != region.nbytes:
        raise CacheFault("it is too short")
    return content


DIGEST_CHARACTERS = 16
FILE_NAME = re.compile(r"activations-[0-9a-f]{16}-\d+of\d+\.h5")
TEMPORARY_SUFFIX = ".tmp"
LOCK_SUFFIX = ".lock"


def path_of(directory: Path, fingerprint: Fingerprint, *, shard: str) -> Path:
    """Return the path for the rows of `fingerprint` that rank R of N writes; `shard` is "RofN"."""
    return directory / f"activations-{fingerprint.digest[:DIGEST_CHARACTERS]}-{shard}.h5"


def shard_of(path: Path) -> int:
    """Return the rank that has written the file at `path`, from its name."""
    return int(path.stem.rpartition("-")[2].partition("of")[0])


def files_of(directory: Path, fingerprint: Fingerprint) -> list[Path]:
    """Return the files of `fingerprint` by all ranks, and by runs of any size."""
    pattern = f"activations-{fingerprint.digest[:DIGEST_CHARACTERS]}-*.h5"
    return sorted(path for path in directory.glob(pattern) if FILE_NAME.fullmatch(path.name))


def open_listed(path: Path, fingerprint: Fingerprint, *, private: bool) -> ActivationFile | None:
    """Return the file at `path`; None if its owner has removed it since the directory was listed."""
    try:
        return ActivationFile(path, expected=fingerprint, private=private)
    except CacheFault:
        if os.path.lexists(path):
            raise
        return None


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all cache files in `directory`, finished or not, without links and locks."""
    total = 0
    for path in (*directory.glob("activations-*.h5"), *directory.glob(f"activations-*.h5{TEMPORARY_SUFFIX}")):
        # Another job may have removed it meanwhile.
        with suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def remove_left_over(directory: Path) -> None:
    """Remove files of killed writers on this machine, because they fill the disk and count towards a limit.

    Files of other machines are kept, because some file systems have locks per machine only.
    """
    for temporary in directory.glob(f"activations-*.h5{TEMPORARY_SUFFIX}"):
        lock = temporary.with_suffix(LOCK_SUFFIX)
        # Locked, gone meanwhile, or without a note that can be read.
        with suppress(LockedError, OSError, ValueError, LookupError, TypeError), hold_unlocked(lock) as note:
            if FILE_NAME.fullmatch(temporary.stem) and json.loads(note)["host"] == os.uname().nodename:
                remove(temporary)
                remove(lock)


def refusals(directory: Path, fingerprint: Fingerprint) -> list[str]:
    """Return a message per fingerprint of files with the same split and cut that are not used; names the differences.

    Files of one fingerprint, which ranks have written together, are opened once for all of them.
    """
    lines, seen = [], {fingerprint.digest[:DIGEST_CHARACTERS]}
    for path in sorted(path for path in directory.glob("activations-*.h5") if FILE_NAME.fullmatch(path.name)):
        digest = path.name.split("-")[1]
        if digest in seen:
            continue
        seen.add(digest)
        try:
            other = ActivationFile(path).manifest.fingerprint
        except CacheFault as fault:
            lines.append(str(fault))
            continue
        alike = all(other.fields.get(name) == fingerprint.fields.get(name) for name in ("split", "cut"))
        if alike and fingerprint.differences(other):
            lines.append(f"cache file {path} not used: {fingerprint.explain(other)}")
    return lines
