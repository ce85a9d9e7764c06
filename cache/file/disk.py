"""The disk of a cache: free space, speed, trust in file owners, and one writer per file."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

from hvfreeze.cache.faults import CacheBusy, CacheFault, CacheFull
from hvfreeze.files import FileLock, LockedError, is_at

logger = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean a full disk or quota."""


class Budget:
    """Bytes of the files that this process has allocated, at most `limit_bytes` (None: unlimited)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may still be reserved; None is unlimited."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)

    def reserve(self, num_bytes: int, *, path: Path) -> None:
        """Reserve `num_bytes` for `path`; raises CacheFull, without reserving, if they exceed the limit."""
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
                raise CacheFull(
                    f"cache file {path} needs {num_bytes} bytes, but {self.used_bytes} of this process's share of "
                    f"--cache-limit ({self.limit_bytes} bytes) are used; raise --cache-limit, or choose a deeper "
                    "cut with smaller rows"
                )
            self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Release bytes that `reserve` reserved, or those of a removed file of an earlier run."""
        with self._lock:
            self.used_bytes -= num_bytes


def free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged process may still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def prepare_directory(directory: Path, *, private: bool = True, way_out: str = "give another --cache-dir") -> None:
    """Create `directory` and its missing parents, and try to create a file in it.

    New folders are readable for this user only if `private`, else according to the umask. A full disk is accepted,
    because existing rows can still be read. `way_out` is the last clause of the message.

    Raises:
        CacheFault: it cannot be used, or any user may replace its files.
    """
    mode = 0
    try:
        # One by one: `parents=True` gives its mode to the last folder only.
        for folder in (*reversed(directory.parents), directory):
            # An existing path may be a file; the attempt below reports that.
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
            f"cache directory {directory} has mode {stat.S_IMODE(mode):o}, so any user may replace its files; run "
            "chmod o-w on it"
        )


def distrust(status: os.stat_result, *, private: bool) -> str:
    """Return why a file's owner and mode make it untrustworthy, or "".

    The file's digests detect damage, not intent: a user who can write the file can adapt them. With `private`, only
    this user's own files are trusted; without, also those of others, as in a shared directory.
    """
    mode, local = stat.S_IMODE(status.st_mode), os.geteuid()
    if mode & stat.S_IWOTH:
        return f"any user may write to it (mode {mode:o}); run chmod o-w on it if its rows are yours, else remove it"
    if private and status.st_uid != local:
        return (
            f"it belongs to user {status.st_uid}, not to this user ({local}); remove it, or pass --cache-shared to "
            "hvfreeze train if you trust everybody who may write there"
        )
    if private and mode & stat.S_IWGRP:
        return (
            f"its group may write to it (mode {mode:o}); run chmod g-w on it, or pass --cache-shared to hvfreeze "
            "train if you trust the group"
        )
    return ""


def remove(path: Path, *, only: int | None = None) -> None:
    """Remove a cache file if possible; a failure costs space but must not end a run.

    With `only`, a file descriptor, remove nothing but the file that is open there.
    """
    try:
        if only is None or is_at(only, path):
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cache file %s cannot be removed (%s)", path, error.strerror or error)


def take_lock(path: Path, *, owner: str, private: bool = True) -> FileLock:
    """Return the lock at `path`, which records its holder. Without `private`, its group may take it later.

    Raises:
        CacheBusy: another process holds it, or another user owns it and this process may not open it; the message names
            the process or the user.
        CacheFault: the lock file cannot be created, or the file system has no locks.
    """
    try:
        lock = FileLock(path, temporary=True, private=private)
    except LockedError as locked:
        raise CacheBusy(f"another process is writing cache file {path.with_suffix('')}: {locked.holder}") from None
    except OSError as error:
        # Another user has created the lock, perhaps for that user alone.
        with contextlib.suppress(OSError):
            if isinstance(error, PermissionError):
                raise CacheBusy(
                    f"user {path.lstat().st_uid} is writing cache file {path.with_suffix('')}, or has left the lock "
                    f"{path} behind; if no job of that user runs, the user can remove it"
                ) from error
        raise CacheFault(
            f"cache lock {path} cannot be created ({error}); choose another --cache-dir or directory="
        ) from error
    if not lock.held:
        lock.release()
        raise CacheFault(
            f"cache lock {path} cannot be locked: the file system may not support locks; choose a --cache-dir or "
            "directory= on another"
        )
    # For people alone: a full disk has no room for it, and the lock holds without.
    with contextlib.suppress(OSError):
        lock.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "run": owner}))
    return lock
