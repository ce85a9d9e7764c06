"""Files that other processes may read meanwhile: written completely, published by a rename, locked by one process."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvfreeze.errors import UsageError

PRIVATE_FOLDER, PRIVATE_FILE, GROUP_FILE = 0o700, 0o600, 0o660
NOTE_BYTES = 4096
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers of a lock that another process holds."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks, such as Lustre mounted without them."""


def cache_folder(name: str, *, way_out: str) -> Path:
    """Return hvfreeze's folder `name` in the user's cache directory: $XDG_CACHE_HOME, else ~/.cache.

    Raises:
        UsageError: there is neither $XDG_CACHE_HOME nor a home directory, e.g. for a container's user without an entry
            in
            /etc/passwd; `way_out` is the remedy.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvfreeze" / name
    except RuntimeError as error:
        raise UsageError(f"$HOME is not set and user {os.getuid()} has no home directory: {way_out}") from error


def open_own(path: Path, flags: int) -> int:
    """Open or create a file for writing and return its descriptor; raises OSError for a link, a pipe or a device.

    In a folder that other users may write to, these could lead elsewhere or block. `flags` must not truncate, which
    would happen before the check.

    Raises:
        OSError: it is not a regular file with a single name, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(0, "it is a link or not a regular file", str(path))
    return descriptor


def open_new(path: Path, *, mode: int = PRIVATE_FILE) -> int:
    """Return a descriptor of a new file, which replaces any file of that name."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def replace_file(descriptor: int, temporary: Path, target: Path) -> None:
    """Give a file its final name once all of it is on the disk: readers see the old file or the complete new one."""
    os.fsync(descriptor)
    os.replace(temporary, target)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if `path` is the very file that is open."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class LockedError(Exception):
    """Another process holds the lock; `holder` is its note."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class FileLock:
    """A file locked by this process; the kernel releases it when the process ends for any reason.

    Attributes:
        held: False if the file system has no locks.
    """

    def __init__(self, path: Path, *, temporary: bool = False, private: bool = True) -> None:
        """Lock `path`; a `temporary` file is removed at the release. Without `private`, its group may lock it too.

        Raises:
            LockedError: another process holds it.
            OSError: the file cannot be created or locked.
        """
        self._path, self._temporary = path, temporary
        while True:
            self._descriptor = open_own(path, os.O_RDWR)
            if not private:
                # The umask may have removed the bits of the group. Only the owner of the file may set them.
                with suppress(OSError):
                    os.fchmod(self._descriptor, GROUP_FILE)
            try:
                self.held = _lock(self._descriptor, fcntl.LOCK_EX)
            except (LockedError, OSError):
                os.close(self._descriptor)
                raise
            # The last holder may have removed the name. Then this lock is on a file that no other process can open.
            if not temporary or is_at(self._descriptor, path):
                break
            os.close(self._descriptor)

    def write(self, note: str) -> None:
        """Write a note about the holder to the file."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, note.encode()[:NOTE_BYTES], 0)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            if self._temporary:
                with suppress(OSError):
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def check_unlocked(path: Path) -> None:
    """Raise LockedError if a process has locked the file; a file left by a killed process is not locked.

    Raises:
        LockedError: it is locked.
        OSError: it cannot be opened.
    """
    with hold_unlocked(path):
        pass


@contextmanager
def hold_unlocked(path: Path) -> Iterator[str]:
    """Block the lock of a `FileLock` inside the context, and yield its note; raises like `check_unlocked`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        yield os.pread(descriptor, NOTE_BYTES, 0).decode(errors="replace")
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> bool:
    """Lock an open file and return True; False if the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            note = os.pread(descriptor, NOTE_BYTES, 0).decode(errors="replace").strip()
            raise LockedError(note or "another process") from None
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
