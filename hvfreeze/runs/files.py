"""Files of a run directory, and the lock that allows one job at a time."""

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

OTHER_RUN_DIR = "choose another --run-dir, then add --resume"


@contextmanager
def publishing(target: Path, *, otherwise: str = OTHER_RUN_DIR) -> Iterator[BinaryIO]:
    """Open a file that becomes `target` at the end of the block, atomically: readers see the old or the new file.

    The contents are on the disk when the block ends. A link at `target` is replaced, not followed. `otherwise` is what
    to do if there is no space to free.

    Raises:
        RefusedError: the file cannot be written; the previous file is untouched.
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
            f"{target} cannot be written ({reason_of(error)}); earlier files are intact; free some space or {otherwise}"
        ) from error
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def publish(target: Path, parts: Sequence[bytes | memoryview], *, otherwise: str = OTHER_RUN_DIR) -> None:
    """Write `parts`, concatenated, as `target`; see `publishing`.

    Raises:
        RefusedError: the file cannot be written; the previous file is untouched.
    """
    with publishing(target, otherwise=otherwise) as file:
        for part in parts:
            file.write(part)


def reason_of(error: Exception) -> str:
    """Return the first non-empty line of an error's reason."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)


NAME = ".lock"
PAUSE_SECONDS = 0.2


def lock_directory(directory: Path) -> FileLock:
    """Lock a directory for this process, and return the lock.

    Raises:
        UsageError: another process has it.
        OSError: the lock file cannot be created.
    """
    try:
        lock = FileLock(directory / NAME)
    except LockedError as locked:
        raise in_use(directory, locked) from None
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


def check_unlocked(directory: Path, *, patience_seconds: tuple[float, float] = (0.0, 0.0)) -> None:
    """Raise UsageError if another job is still using a directory after some waiting time; changes nothing.

    Args:
        directory: the directory.
        patience_seconds: waiting times for a job on this host, and for one on another host, which is announced.

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
                note = (
                    f"--run-dir ({directory}) is locked by {locked.holder}; waiting up to {limit:.0f} s for it to end"
                )
                print(f"hvfreeze: note: {note}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)


def other_host(locked: LockedError) -> str:
    """Return the host in a lock's note; "" if it is this host, or there is no such note."""
    host = locked.holder.partition(" on ")[2]
    return "" if host == socket.gethostname() else host


def in_use(directory: Path, locked: LockedError) -> UsageError:
    """Return the error for a locked directory."""
    other = other_host(locked)
    gone = f"; if {other} is down for good, remove {directory / NAME}" if other else ""
    return UsageError(
        f"--run-dir ({directory}) is in use by {locked.holder}; wait until it ends, or choose another{gone}"
    )
