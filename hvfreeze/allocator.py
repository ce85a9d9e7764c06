"""The C library's allocator: whether freed memory is kept for the next tensors or returned to the kernel."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

from hvfreeze.memory import available_bytes, bytes_in

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's `mallopt`."""
KEEPING = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}
"""Not M_MMAP_THRESHOLD: before 2.35, glibc refuses thresholds above 32 MiB. M_MMAP_MAX comes first: any parameter ends
glibc's own adaptation, and with mmap still on at its first threshold there would be more page faults than before."""
RETURNING = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}
"""Settings that glibc's own adaptation reaches with large tensors."""
SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment variables with the effect of `KEEPING`, for a process that has not started."""
USERS_CHOICE = (*SETTINGS, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Environment variables that set how much freed memory glibc keeps."""

_kept = False


def keep_memory() -> None:
    """Keep freed memory for the next tensors while there is enough, unless the environment sets the allocator.

    By default glibc returns every large tensor to the kernel, which zeroes each of its pages again for the next one.
    That takes up to a quarter of a training step. Kept memory may fit badly: a ResNet-50 at 224 pixels holds 28 % more
    memory. `watch_memory` bounds that.
    """
    global _kept
    if not _kept and is_default():
        _kept = _set(KEEPING)


def watch_memory() -> None:
    """Return free memory to the kernel once less is available than this process uses.

    A thread does it, if `keep_memory` took effect. Call it once MPI is up: while MPI starts, no thread may use memory.
    """
    if _kept:
        threading.Thread(target=_watch, name="memory", daemon=True).start()


def is_default() -> bool:
    """Return True if the allocator is glibc's and the environment does not configure it."""
    tunables, preloaded = (os.environ.get(name, "") for name in ("GLIBC_TUNABLES", "LD_PRELOAD"))
    chosen = any(name in os.environ for name in USERS_CHOICE) or "glibc.malloc.m" in tunables or "trim" in tunables
    return not chosen and "malloc" not in preloaded and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def advice() -> str:
    """Return advice on environment variables that keep freed memory; empty if there is nothing to set."""
    if _kept or not is_default():
        return ""
    variables = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    return (
        f"freed memory returns to the kernel after each step, which may slow it down by up to a "
        f"quarter; start the script with {variables}, or with launch/"
    )


def give_back() -> None:
    """Return freed memory to the kernel now. glibc keeps fragments between used blocks; others do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _watch() -> None:
    while available_bytes() > bytes_in(Path("/proc/self/status"), "VmRSS:"):
        time.sleep(1)
    _set(RETURNING)
    give_back()


def _set(parameters: dict[int, int]) -> bool:
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in parameters.items())
