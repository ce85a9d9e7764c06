"""Rows of an open file, read by mapping it: shuffled rows at the speed of memory."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault

HUGE_BYTES = 4 << 20
"""From here on memory is kept: the page faults of new memory take longer than the copy."""
ReadRows = Callable[[int, int], bytes]
"""Gives rows, from the first to before the second number, as bytes."""
MOST_KEPT = 8
"""Pieces of memory that wait for the next read."""
ALIGNMENT = 64
"""As torch's own memory: kernels may give other bits elsewhere."""


class Room:
    """Memory for large batches, which is used again as soon as nobody holds what it held. Any thread may take some."""

    def __init__(self) -> None:
        # Its methods are atomic: memory comes back wherever the last view of it dies, also while some is being taken.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=MOST_KEPT)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return uninitialised, aligned memory (num_bytes,) that no other array or tensor refers to."""
        size = num_bytes + ALIGNMENT
        try:
            whole = self._free.pop()
        except IndexError:
            whole = np.empty(size, np.uint8)
        if whole.nbytes != size:
            # Batches have another size now: what waits is of no more use.
            self._free.clear()
            whole = np.empty(size, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        # Behind a memoryview every view of the loan, and every tensor made of one, refers to the loan itself and not to
        # what is under it: when the loan dies, nobody sees the memory any more.
        loan: npt.NDArray[np.uint8] = np.frombuffer(memoryview(whole)[start : start + num_bytes], np.uint8)
        weakref.finalize(loan, self._free.append, whole).atexit = False
        return loan


class MappedRows:
    """Fixed-size rows inside a file. The file may be deleted while it is mapped, and stays readable.

    A read looks at the file's size first, because touching a mapping beyond a truncated file's end kills the process.
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

        Args:
            descriptor: of the open file; a duplicate is taken, and it stays the caller's.
            offset: of the first row, in bytes.
            num_rows: rows in the file, written or not.
            row_bytes: of one row.
            name: for messages.
            dtype: of the elements.

        Raises:
            CacheFault: the rows do not lie inside the file, or there is no address space for them.
        """
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._name = name
        self._room = Room()
        self._end = offset + num_rows * row_bytes
        self._descriptor = -1
        self._descriptor = os.dup(descriptor)
        self._sealed: tuple[int, int] | None = None
        self._verify: Callable[[ReadRows], None] = lambda read: None
        self._looking, self._is_looking = threading.RLock(), False
        try:
            self._check()
            mapped = mmap.mmap(self._descriptor, self._end, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise CacheFault(f"cache file {name} cannot be mapped ({error})") from error
        except CacheFault:
            self.close()
            raise
        with warnings.catch_warnings():
            # The mapping is read-only, and so is what is made of it here.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            count = num_rows * row_bytes // dtype.itemsize
            self._rows = torch.frombuffer(mapped, dtype=dtype, offset=offset, count=count).view(num_rows, -1)

    def seal(self, verify: Callable[[ReadRows], None]) -> None:
        """Take the file for finished: from now on a change of it is a fault.

        Times can be put back after a change, but not the time of that. So where the entry of the file has changed
        (its name or mode, or it was removed), `verify` is given `pread`, reads all rows again, and raises CacheFault
        where they have. It must not hold this object: its memory is to go with the last tensor that refers to it.
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
        num_rows, num_elements = rows.shape[0], self._rows.shape[1]
        if num_rows * self.row_bytes < HUGE_BYTES:
            return torch.index_select(self._rows, 0, rows)
        copy = (
            torch.from_numpy(self._room.take(num_rows * self.row_bytes))
            .view(self._rows.dtype)
            .view(num_rows, num_elements)
        )
        return torch.index_select(self._rows, 0, rows, out=copy)

    def pread(self, first: int, last: int) -> bytes:
        """Return rows first..last-1 through the descriptor, which cannot kill the process on a truncated file."""
        self._check()
        length, start = (last - first) * self.row_bytes, self._end - (self.num_rows - first) * self.row_bytes
        content = os.pread(self._descriptor, length, start)
        if len(content) != length:
            raise CacheFault(f"cache file {self._name} ends {length - len(content)} bytes early")
        return content

    def is_at(self, path: Path) -> bool:
        """Tell whether `path` is this very file."""
        try:
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the descriptor; the mapping goes with the last tensor that refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_size < self._end:
            raise CacheFault(f"cache file {self._name} was truncated to {status.st_size} bytes, needs {self._end}")
        if self._sealed is None:
            return
        modified, touched = self._sealed
        if status.st_mtime_ns != modified:
            raise CacheFault(f"cache file {self._name} was changed while it was in use")
        if status.st_ctime_ns != touched:
            self._look_again()

    def _look_again(self) -> None:
        """Verify the rows, in one thread; the others wait."""
        with self._looking:
            status = os.fstat(self._descriptor)
            sealed = status.st_mtime_ns, status.st_ctime_ns
            # The verification itself reads rows, in this thread.
            if self._is_looking or self._sealed == sealed:
                return
            self._is_looking = True
            try:
                self._verify(self.pread)
            except CacheFault as fault:
                raise CacheFault(f"cache file {self._name} was changed while it was in use ({fault})") from fault
            finally:
                self._is_looking = False
            self._sealed = sealed
