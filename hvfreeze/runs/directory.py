"""The run directory: its name, checks before a run may use it, and the files written first."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvfreeze.config.freeze import AUTO
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.files import PRIVATE_FOLDER
from hvfreeze.runs.files import check_unlocked, lock_directory, reason_of
from hvfreeze.runs.identity import Settings, changes
from hvfreeze.runs.reading import read_config, read_object
from hvfreeze.runs.record import Record

PER_RANK = ("run_dir", "json", "quiet", "data_dir", "cache_dir")
"""Settings that may differ between ranks, because rank 0's count or every machine has its own path."""
PATIENCE_SECONDS = 12.0
"""Seconds that a resumed run waits for the previous job to end: ranks survive a killed launcher by 8 s."""
PATIENCE_ELSEWHERE_SECONDS = 150.0
"""The same for a job on another host: after a power loss, a file server keeps its lock, NFSv4 for 90 s by default."""


def directory_name(*words: str) -> str:
    """Return a name of time, words, and six random digits, which separate jobs that start in the same second."""
    # File systems allow 255 characters, and a model's name may list its layers.
    safe = (re.sub(r"[^A-Za-z0-9_.-]+", "_", word)[:64] for word in words)
    return "-".join([time.strftime("%Y%m%d-%H%M%S"), *safe, secrets.token_hex(3)])


def resuming(directory: Path, *, ranks: int) -> str:
    """Return the command that resumes a directory's run on so many ranks."""
    # Unbound, as guides start ranks: Open MPI binds each of two to one core, and with other threads no bit is the same.
    launcher = ["mpirun", "-np", str(ranks), "--bind-to", "none"] if ranks > 1 else []
    command = "train"
    with suppress(RefusedError):
        command = AUTO if read_config(directory / "config.yaml")["freeze"]["freeze"] == AUTO else command
    return shlex.join([*launcher, "hvfreeze", command, "--run-dir", str(directory), "--resume"])


def check_directory(directory: Path, settings: Settings, environment: Mapping[str, Any]) -> list[str]:
    """Check that a run may use `directory` (absolute path); return what resuming in it changes.

    Nothing on disk is changed. `environment` is the content of environment.json for this job.

    Raises:
        UsageError: it cannot be written, is in use, belongs to another user, or contains a run without --resume.
        RefusedError: --resume of another run, or of one that cannot continue exactly; the message shows the difference.
    """
    try:
        if not directory.exists():
            check_creatable(directory)
            return []
        check_owners(directory)
        check_writable(directory)
        patience = (PATIENCE_SECONDS, PATIENCE_ELSEWHERE_SECONDS) if settings["run"]["resume"] else (0.0, 0.0)
        check_unlocked(directory, patience_seconds=patience)
        return changed_settings(directory, settings, environment)
    except OSError as error:
        raise unusable(directory, f"cannot be written: {reason_of(error)}") from error


def changed_settings(directory: Path, settings: Settings, environment: Mapping[str, Any]) -> list[str]:
    """Return what resuming the run in `directory` changes; empty if there is no run."""
    known, before = directory / "config.yaml", directory / "environment.json"
    if not known.exists():
        if (left := left_over(directory)) and not settings["run"]["resume"]:
            # The lines of both would be read as one run's, and the newest checkpoint is found by its number.
            raise UsageError(
                f"--run-dir ({directory}) contains {left} of a run, but no config.yaml; restore config.yaml and "
                "continue with --resume, empty the directory, or choose another"
            )
        return []
    ran_on = read_object(before, ()) if before.exists() else {}
    return changes(read_config(known), settings, ran_on, environment, place=str(directory))


def left_over(directory: Path) -> str:
    """Return which files of an incomplete run another run would take for its own; "" if there are none.

    A run that has ended before its first step leaves empty files, which do not count.
    """
    lines = directory / "metrics.jsonl"
    found = {"lines": lines.is_file() and lines.stat().st_size > 0, "checkpoints": (directory / "checkpoints").exists()}
    return " and ".join(what for what, there in found.items() if there)


def check_creatable(directory: Path) -> None:
    """Raise UsageError if a directory cannot be created at its place."""
    above = next(parent for parent in directory.parents if parent.exists())
    if not above.is_dir():
        raise unusable(directory, f"cannot be written: {above} is not a directory")
    check_writable(above)


def check_writable(folder: Path) -> None:
    """Raise OSError if the operating system does not permit writing to a folder, without trying."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        code = errno.EROFS if read_only else errno.EACCES
        raise OSError(code, f"{folder}: {os.strerror(code)}")


def check_owners(directory: Path) -> None:
    """Raise UsageError if a directory belongs to another user, or contains a file or link of another user.

    The superuser may use any user's directory.
    """
    if not directory.is_dir():
        raise unusable(directory, "cannot be written: it is not a directory")
    owner, me = directory.stat().st_uid, os.geteuid()
    if me not in (0, owner):
        raise unusable(directory, f"belongs to another user (id {owner})")
    for path in directory.iterdir():
        theirs = path.lstat().st_uid
        if theirs not in (me, owner):
            raise unusable(directory, f"contains {path.name}, which belongs to another user (id {theirs})")


def open_record(
    directory: Path, settings: Settings, *, environment: Mapping[str, Any], file: Mapping[str, Any] | None = None
) -> Record:
    """Create a private directory that passes `check_directory`, lock it, and open the run's logs.

    config.yaml contains `file`, or the settings. A directory that cannot be used is left unchanged.

    Raises:
        UsageError: the directory cannot be written, or another job has taken it since.
        RefusedError: the disk is full.
    """
    try:
        new = make_private(directory)
        lock = lock_directory(directory)
    except OSError as error:
        raise unusable(directory, f"cannot be written: {reason_of(error)}") from error
    try:
        changed = changed_settings(directory, settings, environment)
        return Record(directory, settings, environment=environment, changed=changed, lock=lock, file=file)
    except BaseException as error:
        lock.release()
        if new and not (directory / "config.yaml").exists():
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise unusable(directory, f"cannot be written: {reason_of(error)}") from error
        raise


def make_private(directory: Path) -> bool:
    """Create a private directory, or forbid other users to write to an existing one; return True if it is new."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=PRIVATE_FOLDER)
        return True
    except FileExistsError:
        if stat.S_IMODE(directory.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            directory.chmod(PRIVATE_FOLDER)
        return False


def unusable(directory: Path, why: str) -> UsageError:
    """Return the error for an unusable run directory."""
    return UsageError(f"--run-dir ({directory}) {why}; choose another")
