"""Command-line options that are checked before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvfreeze.runs.directory import check_writable


def folder_to_write(text: str) -> Path:
    """Return a folder that is there or can be made.

    Raises:
        ArgumentTypeError: it cannot be written.
    """
    folder = Path(text).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        if not above.is_dir():
            raise NotADirectoryError(f"{above} is no folder")
        check_writable(above)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error}; choose another") from error
    return Path(text)


def file_to_write(text: str) -> Path:
    """Return a file that can be written or replaced.

    Raises:
        ArgumentTypeError: it is a folder, or its folder cannot be written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder, and must be a file")
    folder_to_write(str(path.parent))
    return path
