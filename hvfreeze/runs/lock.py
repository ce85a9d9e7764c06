"""One job at a time in a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from hvfreeze.errors import UsageError
from hvfreeze.runs.publishing import open_own

NAME = ".lock"
PAUSE_SECONDS = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems say that know no locks, such as Lustre mounted without them."""


class Lock:
    """A directory that this process alone may use; the kernel gives it back when the process is gone, however it ends.

    Raises:
        UsageError: another process has it.
        OSError: the lock's file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = open_own(directory / NAME, os.O_RDWR)
        self.notes: list[str] = []
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_in(self._descriptor)
            self.release()
            raise in_use(directory, holder) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                self.release()
                raise
            self.notes.append(f"{directory} cannot be locked on this file system: keep other jobs out of it")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory back; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_unlocked(directory: Path, *, patience_seconds: float = 0.0) -> None:
    """Refuse a directory that another job is using, still after some patience; nothing is changed.

    Raises:
        UsageError: another process has locked it.
    """
    path = directory / NAME
    if not path.exists():
        return None
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return try_lock(path)
        except UsageError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE_SECONDS)


def try_lock(path: Path) -> None:
    """Refuse a lock's file that another process has locked.

    Raises:
        UsageError: it is so.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise in_use(path.parent, holder_in(descriptor)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)


def holder_in(descriptor: int) -> str:
    """Return who holds a lock, as far as its file says."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"


def in_use(directory: Path, holder: str) -> UsageError:
    """Return the refusal of a locked directory."""
    return UsageError(f"--run-dir ({directory}) is in use by {holder}; wait for its end, or choose another")
