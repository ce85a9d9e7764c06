"""The disk under a cache: its room and speed, who may be believed there, and one builder per file."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hvfreeze.cache.faults import CacheBusy, CacheFault, CacheFull
from hvfreeze.files import FileLock, LockedError, is_at

logger = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says when a disk, or a share of it, has no room left."""


@dataclass(frozen=True)
class Disk:
    """The disk as it is, or slowed down to these rates, each transfer on its own, in bytes per second."""

    read_rate: float | None = None
    write_rate: float | None = None

    def read(self, num_bytes: int) -> None:
        """Hold the caller up for as long as reading takes beyond the real disk's time."""
        if self.read_rate:
            time.sleep(num_bytes / self.read_rate)

    def write(self, num_bytes: int) -> None:
        """Hold the caller up for as long as writing takes beyond the real disk's time."""
        if self.write_rate:
            time.sleep(num_bytes / self.write_rate)


class Budget:
    """Bytes of the files that this process has allocated, never above `limit_bytes` (None: unlimited)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may still be reserved; None is unlimited."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)

    def reserve(self, num_bytes: int, *, path: Path) -> None:
        """Take `num_bytes` for `path`; CacheFull where they would exceed the limit, and nothing is taken."""
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
                raise CacheFull(
                    f"cache file {path} needs {num_bytes} bytes: {self.used_bytes} of this process's share "
                    f"of --cache-limit, {self.limit_bytes}, are taken; raise it or take a deeper cut"
                )
            self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give back what `reserve` took, or what a removed file of an earlier run had been using."""
        with self._lock:
            self.used_bytes -= num_bytes


def free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged process may still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def prepare_directory(directory: Path, *, private: bool = True, way_out: str = "give another --cache-dir") -> None:
    """Make `directory` and the folders above it where they are missing, and try to make a file in it.

    What is made is for this user alone if `private`, else as the umask says. A full disk is no reason to refuse: the
    rows there may still be read. `way_out` ends a refusal.

    Raises:
        CacheFault: it cannot be used, or anybody may replace what lies in it.
    """
    mode = 0
    try:
        # One by one: `parents=True` gives its mode to the last folder only.
        for folder in (*reversed(directory.parents), directory):
            # What is there may be a file, which is told by what is tried below it.
            if not folder.exists():
                folder.mkdir(exist_ok=True, mode=0o700 if private else 0o777)
        mode = directory.stat().st_mode
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno not in FULL:
            raise CacheFault(
                f"cache directory {directory} cannot be used ({error.strerror or error}); {way_out}"
            ) from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheFault(
            f"cache directory {directory} has mode {stat.S_IMODE(mode):o}: anybody may replace what lies in it; "
            "chmod o-w it"
        )


def distrust(status: os.stat_result, *, private: bool) -> str:
    """Return why a file's owner and mode forbid to believe what is in it, or nothing.

    Its digests show damage, not intent: whoever can write the file can fit them. If `private`, this user's own files
    only are believed, else also those of others, as who shares a directory must.
    """
    mode, mine = stat.S_IMODE(status.st_mode), os.geteuid()
    if mode & stat.S_IWOTH:
        return f"anybody may write to it (mode {mode:o}); chmod o-w it if its rows are yours, or remove it"
    if private and status.st_uid != mine:
        return (
            f"it belongs to user {status.st_uid}, and this is user {mine}; remove it, or give hvfreeze train "
            "--cache-shared if you trust whoever may write there"
        )
    if private and mode & stat.S_IWGRP:
        return (
            f"its group may write to it (mode {mode:o}); chmod g-w it, or give hvfreeze train --cache-shared if you "
            "trust them"
        )
    return ""


def remove(path: Path, *, only: int | None = None) -> None:
    """Remove a file of the cache, if that can be done: what is left behind costs space, and must not end a run.

    With `only`, a descriptor, nothing but the file that is open there.
    """
    try:
        if only is None or is_at(only, path):
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cache file %s cannot be removed (%s)", path, error.strerror or error)


def take_lock(path: Path, *, owner: str) -> FileLock:
    """Return the lock at `path`, which says who holds it.

    Raises:
        CacheBusy: another process holds it; the message says which.
        CacheFault: the lock file cannot be made, or the file system has no locks.
    """
    try:
        lock = FileLock(path, temporary=True)
    except LockedError as locked:
        raise CacheBusy(f"cache file {path.with_suffix('')} is being built by {locked.holder}") from None
    except OSError as error:
        raise CacheFault(
            f"cache lock {path} cannot be made ({error}); give another --cache-dir or directory="
        ) from error
    if not lock.held:
        lock.release()
        raise CacheFault(
            f"cache lock {path} cannot be taken: this file system may have no locks; give a --cache-dir or "
            "directory= on another"
        )
    # For people alone: a full disk has no room for it, and the lock holds without.
    with contextlib.suppress(OSError):
        lock.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "run": owner}))
    return lock
