"""Files that are written whole or not at all, are private, and never lie where a link leads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hvfreeze.errors import RefusedError

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


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
        temporary.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, PRIVATE_FILE), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
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


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_own(path: Path, flags: int) -> int:
    """Open or make a file to write to and return its descriptor; a link, a pipe or a device is refused.

    In a folder that others could write to, these would lead elsewhere, or never answer. `flags` must not truncate,
    which would happen before the file is looked at.

    Raises:
        OSError: it is no plain file of one name, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(0, "it is a link or no plain file", str(path))
    return descriptor


def reason_of(error: Exception) -> str:
    """Return the first line of an error's reason."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text.splitlines()[0] if text else type(error).__name__
