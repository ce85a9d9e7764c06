"""One builder per file, over processes and hosts that share the directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path

from hvfreeze.cache.faults import CacheBusy, CacheFault
from hvfreeze.cache.file.disk import remove

OWNER_BYTES = 4096
TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES})
"""What the system says of a lock that another process holds; anything else means that there is none to be had."""


class FileLock:
    """Held from construction to `release`; the kernel drops it when the process ends, however it ends."""

    def __init__(self, path: Path, *, owner: str) -> None:
        """Take the lock at `path` and write into it who holds it.

        Raises:
            CacheBusy: another process holds it; the message says which.
            CacheFault: the lock file cannot be made, or the file system has no locks.
        """
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise CacheFault(f"cache lock {path} cannot be opened ({error})") from error
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in TAKEN:
                    os.close(self._descriptor)
                    raise CacheFault(
                        f"cache lock {path} cannot be taken ({error.strerror}): this file system may have no locks; "
                        "give a --cache-dir on another"
                    ) from error
                holder = os.pread(self._descriptor, OWNER_BYTES, 0).decode(errors="replace")
                os.close(self._descriptor)
                raise CacheBusy(
                    f"cache file {path.with_suffix('')} is being built by {holder or 'another process'}"
                ) from None
            # A holder that has just released removes the name: then this lock is on a file that nobody else sees.
            if self._is_current():
                break
            os.close(self._descriptor)
        note = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "run": owner})
        # For people alone: a full disk has no room for it, and the lock holds without.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note.encode()[:OWNER_BYTES], 0)

    def release(self) -> None:
        """Remove the lock file and let go; harmless when already released."""
        if self._descriptor >= 0:
            remove(self._path)
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock at `path`; a lock file alone, left by a killed process, does not count."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in TAKEN
    finally:
        os.close(descriptor)
    return False
