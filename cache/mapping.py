"""Rows of an open file, read by mapping it: shuffled rows at the speed of memory."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault

HUGE_BYTES = 4 << 20
"""From here on numpy asks for huge pages: a batch of 8 MiB on small ones takes six times as long, for their faults."""
ALIGNMENT = 64
"""As torch's own memory: kernels may give other bits elsewhere."""


def _room(num_bytes: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


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
        """Maps the rows.

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
        self._end = offset + num_rows * row_bytes
        self._descriptor = -1
        self._descriptor = os.dup(descriptor)
        self._sealed: int | None = None
        try:
            self._check()
            mapped = mmap.mmap(self._descriptor, self._end, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self._descriptor)
            raise CacheFault(f"cache file {name} cannot be mapped ({error})") from error
        except CacheFault:
            os.close(self._descriptor)
            raise
        with warnings.catch_warnings():
            # The mapping is read-only, and so is what is made of it here.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            count = num_rows * row_bytes // dtype.itemsize
            self._rows = torch.frombuffer(mapped, dtype=dtype, offset=offset, count=count).view(num_rows, -1)

    def seal(self) -> None:
        """From now on the file counts as finished: a later change of it is a fault."""
        self._sealed = os.fstat(self._descriptor).st_mtime_ns

    def read(self, rows: Tensor) -> Tensor:
        """A copy (len(rows), elements) of these rows, given as int64 row numbers.

        Raises:
            CacheFault: the file was truncated, or changed after it was sealed.
        """
        self._check()
        num_rows, num_elements = rows.shape[0], self._rows.shape[1]
        if num_rows * self.row_bytes < HUGE_BYTES:
            return torch.index_select(self._rows, 0, rows)
        copy = torch.from_numpy(_room(num_rows * self.row_bytes)).view(self._rows.dtype).view(num_rows, num_elements)
        return torch.index_select(self._rows, 0, rows, out=copy)

    def pread(self, first: int, last: int) -> bytes:
        """Rows first..last-1 through the descriptor, which cannot kill the process on a truncated file."""
        self._check()
        length, start = (last - first) * self.row_bytes, self._end - (self.num_rows - first) * self.row_bytes
        content = os.pread(self._descriptor, length, start)
        if len(content) != length:
            raise CacheFault(f"cache file {self._name} ends {length - len(content)} bytes early")
        return content

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this very file."""
        try:
            return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Releases the descriptor; the mapping goes with the last tensor that refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_size < self._end:
            raise CacheFault(f"cache file {self._name} was truncated to {status.st_size} bytes, needs {self._end}")
        if self._sealed not in (None, status.st_mtime_ns):
            raise CacheFault(f"cache file {self._name} was changed while it was in use")
