"""Files of a run directory, and the lock that keeps it to one job at a time."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hvfreeze import files
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.files import PRIVATE_FOLDER, FileLock, LockedError, open_new, replace_file, sync_folder


@contextmanager
def publishing(target: Path) -> Iterator[BinaryIO]:
    """Open a file that becomes `target` at the end of the block: readers see the old file or the whole new one.

    What was written is on the disk when the block is left: a crash at any moment leaves one of the two. A link at
    `target` is replaced, not followed.

    Raises:
        RefusedError: the file cannot be written; what was there before is untouched.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        with open(open_new(temporary), "w+b") as file:
            yield file
            file.flush()
            replace_file(file.fileno(), temporary, target)
        sync_folder(target.parent)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError where a write fails
        with suppress(OSError):
            temporary.unlink()
        raise RefusedError(
            f"{target} cannot be written ({reason_of(error)}); nothing that was there before is lost; "
            "free space or choose another --run-dir, then start again with --resume"
        ) from error
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def publish(target: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write `parts`, one after the other, as `target`; see `publishing`.

    Raises:
        RefusedError: the file cannot be written; what was there before is untouched.
    """
    with publishing(target) as file:
        for part in parts:
            file.write(part)


def reason_of(error: Exception) -> str:
    """Return the first line of an error's reason that says something."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)


NAME = ".lock"
PAUSE_SECONDS = 0.2


def lock_directory(directory: Path) -> FileLock:
    """Return the lock of a directory that this process alone may use.

    Raises:
        UsageError: another process has it.
        OSError: the lock's file cannot be made.
    """
    try:
        lock = FileLock(directory / NAME)
    except LockedError as locked:
        raise in_use(directory, locked) from None
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


def check_unlocked(directory: Path, *, patience_seconds: tuple[float, float] = (0.0, 0.0)) -> None:
    """Refuse a directory that another job is using, still after some patience; nothing is changed.

    Args:
        directory: which one.
        patience_seconds: with a job on this host, and with one on another, of which a note is printed.

    Raises:
        UsageError: another process has locked it.
    """
    path = directory / NAME
    if not path.exists():
        return None
    start, told = time.monotonic(), False
    while True:
        try:
            return files.check_unlocked(path)
        except LockedError as locked:
            other = other_host(locked)
            limit = patience_seconds[bool(other)]
            if time.monotonic() - start >= limit:
                raise in_use(directory, locked) from None
            if other and not told:
                told = True
                note = f"--run-dir ({directory}) is locked by {locked.holder}; waiting up to {limit:.0f} s for its end"
                print(f"hvfreeze: note: {note}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)


def other_host(locked: LockedError) -> str:
    """Return the host that a lock's note names; nothing where that is this one, or there is no such note."""
    host = locked.holder.partition(" on ")[2]
    return "" if host == socket.gethostname() else host


def in_use(directory: Path, locked: LockedError) -> UsageError:
    """Return the refusal of a locked directory."""
    other = other_host(locked)
    gone = f"; where {other} is down for good, remove {directory / NAME}" if other else ""
    return UsageError(
        f"--run-dir ({directory}) is in use by {locked.holder}; wait for its end, or choose another{gone}"
    )
