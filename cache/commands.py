"""The commands `hvfreeze cache ls|verify|rm DIR`: list, verify and remove the files of a cache directory."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import FILE_NAME, LOCK_SUFFIX, TEMPORARY_SUFFIX, ActivationFile, path_of
from hvfreeze.cache.fingerprint import JSON
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.files import LockedError, check_unlocked

OURS = re.compile(rf"{FILE_NAME.pattern}(?:{re.escape(TEMPORARY_SUFFIX)}|{re.escape(LOCK_SUFFIX)})?")


def ls(directory: Path) -> int:
    """Print a line for each cache file under `directory`; return the exit code."""
    lines: list[tuple[str, ...]] = [("file", "model", "data", "split", "cut", "rows", "row", "type", "MiB", "state")]
    for path in _files(directory):
        # A job may have removed it meanwhile.
        with suppress(FileNotFoundError):
            lines.append((str(path.relative_to(directory)), *_describe(path)))
    _print_table(lines)
    _check_all_listed(directory)
    return 0


def verify(directory: Path) -> int:
    """Verify every `.h5` file under `directory` completely, and print the damaged ones; return the exit code."""
    lines, refused = [("file", "rows", "verdict")], 0
    for path in _files(directory):
        if path.suffix != ".h5":
            continue
        try:
            file = ActivationFile(path)
            file.verify()
            _check_name(path, file)
            verdict = (str(file.manifest.rows), "sound")
        except CacheFault as fault:
            if not os.path.lexists(path):
                continue  # a job has removed it meanwhile
            refused += 1
            verdict = ("-", str(fault))
        lines.append((str(path.relative_to(directory)), *verdict))
    _print_table(lines)
    _check_all_listed(directory)
    return RefusedError.exit_code if refused else 0


def rm(directory: Path) -> int:
    """Remove the cache files under `directory`: regular files with a cache name that no job is writing."""
    _require_directory(directory)
    if directory.is_symlink():
        raise UsageError(
            f"DIR ({directory}) is a symbolic link, which rm does not follow; give the directory that it points to"
        )
    left = met = 0
    for folder, _, names, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in sorted(name for name in names if OURS.fullmatch(name)):
            path = Path(folder) / name
            lock = path.with_name(name[: name.index(".h5") + len(".h5")] + LOCK_SUFFIX)
            try:
                if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    verdict = "kept: it is not a regular file"
                elif _is_locked(lock):
                    verdict = "kept: a job is writing it"
                else:
                    os.unlink(name, dir_fd=descriptor)
                    verdict = "removed"
            except FileNotFoundError:
                continue  # a job has removed it, or finished it, meanwhile
            except OSError as error:
                verdict = f"kept: it cannot be removed ({error.strerror})"
            left, met = left + (verdict != "removed"), met + 1
            print(f"{verdict}  {path}")
    _check_all_listed(directory)
    if not met:
        print(f"nothing to remove: there is no cache file in {directory}")
    return RefusedError.exit_code if left else 0


def _files(directory: Path) -> Iterator[Path]:
    """Yield every `.h5` and every temporary file of a cache, including links, which are not followed."""
    _require_directory(directory)
    for folder, _, names in os.walk(directory, followlinks=False):
        for name in sorted(names):
            if name.endswith(".h5") or (OURS.fullmatch(name) and name.endswith(TEMPORARY_SUFFIX)):
                yield Path(folder) / name


def _require_directory(directory: Path) -> None:
    try:
        if not directory.is_dir():
            raise UsageError(f"DIR ({directory}) is not a directory; give the one with the cache files")
        os.scandir(directory).close()
    except OSError as error:
        raise _unlisted(directory, error) from error


def _check_all_listed(directory: Path) -> None:
    """Raise RefusedError if a part of a directory cannot be listed, after the rest has been printed."""
    errors: list[OSError] = []
    for _ in os.walk(directory, onerror=errors.append):
        pass
    # A job may have removed a folder meanwhile.
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise _unlisted(Path(error.filename), error)


def _unlisted(directory: Path, error: OSError) -> RefusedError:
    return RefusedError(
        f"{directory} cannot be listed ({error.strerror}) and may contain cache files; run the command as its "
        "owner, or give another DIR"
    )


def _describe(path: Path) -> tuple[str, ...]:
    if path.suffix != ".h5":
        lock = path.with_suffix(LOCK_SUFFIX)
        state = "being built" if _is_locked(lock) else "left over"
        return *["-"] * 7, _mib(path.lstat().st_size), state
    try:
        file = ActivationFile(path)
    except CacheFault as fault:
        return *["-"] * 7, _mib(path.lstat().st_size), str(fault)
    manifest, fields = file.manifest, file.manifest.fingerprint.fields
    return (
        _name_in(fields.get("operations")),
        _name_in(fields.get("data")),
        str(fields.get("split", "-")),
        str(fields.get("cut", "-")),
        f"{manifest.rows}/{manifest.capacity}",
        "x".join(map(str, manifest.row.shape)),
        str(manifest.row.stored).removeprefix("torch."),
        _mib(file.file_bytes),
        "complete" if manifest.rows == manifest.capacity else "partial",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _is_locked(path: Path) -> bool:
    """Return True if a job has locked the file, or if another user's lock cannot be opened to find out."""
    with suppress(OSError):
        try:
            check_unlocked(path)
        except (LockedError, PermissionError):
            return True
    return False


def _name_in(field: JSON) -> str:
    """Return the readable name of the model or data set in an identity field."""
    return str(field.get("name", "-")) if isinstance(field, Mapping) else "-"


def _check_name(path: Path, file: ActivationFile) -> None:
    """Raise CacheFault if a file's name belongs to another fingerprint, because a run would refuse the file."""
    if FILE_NAME.fullmatch(path.name):
        shard = path.stem.rpartition("-")[2]
        expected = path_of(path.parent, file.manifest.fingerprint, shard=shard)
        if expected != path:
            raise CacheFault(f"cache file {path} refused: it contains data of {expected.name}")


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip())
