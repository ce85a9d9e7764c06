"""What memory this process has resident: the most of it, and giving back what is free."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path


def give_back() -> None:
    """Give freed memory back to the system: the C library keeps it in pieces between what is in use. Only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def end_set_up() -> None:
    """Give back what set-up has freed, and count `peak_memory_bytes` from now on.

    Where the kernel does not allow to count anew, the peak goes on as before.
    """
    give_back()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident so far, in bytes; 0 where the kernel does not say."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
