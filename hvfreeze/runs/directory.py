"""The run directory: its name, whether a run may use it, and what is written there first."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs.publishing import publish
from hvfreeze.runs.record import Record

HARMLESS = (
    "run_dir",
    "resume",
    "json",
    "data_dir",
    "cache",
    "cache_dir",
    "cache_limit",
    "cache_shared",
    "cache_failure",
)
"""Leaves of the configuration that may differ between a run and its resumption: they never change a result."""
PER_RANK = ("run_dir", "json", "data_dir", "cache_dir")
"""Leaves that may differ between ranks: rank 0's counts, or every machine has its own path."""
Settings = Mapping[str, Mapping[str, Any]]
"""A configuration as nested dicts, by section and leaf."""


def directory_name(*words: str) -> str:
    """Return a name for a run directory: the time, and words that tell runs apart for a person."""
    return "-".join([time.strftime("%Y%m%d-%H%M%S"), *(re.sub(r"[^A-Za-z0-9_.-]+", "_", word) for word in words)])


def claim_directory(directory: Path, settings: Settings, *, resume: bool) -> None:
    """Make sure that the run can use `directory`, which is made where it is missing; nothing in it is changed.

    Raises:
        UsageError: the directory holds another run, or cannot be written.
        RefusedError: --resume with another configuration; the message shows the difference.
    """
    known = directory / "config.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if known.exists():
            check_same_run(directory, yaml.safe_load(known.read_text(encoding="utf-8")), settings, resume=resume)
        probe = directory / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(directory, error) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged(known) from error


def check_same_run(directory: Path, held: Any, settings: Settings, *, resume: bool) -> None:
    """Refuse a directory that holds another run than the one that `settings` resume."""
    if not resume:
        raise UsageError(f"--run-dir ({directory}) holds a run; continue it with --resume, or choose another directory")
    if not isinstance(held, dict) or not all(isinstance(section, dict) for section in held.values()):
        raise damaged(directory / "config.yaml")
    differences = [
        f"{leaf}: {held.get(section, {}).get(leaf)!r} there, {value!r} here"
        for section, leaves in settings.items()
        for leaf, value in leaves.items()
        if leaf not in HARMLESS and held.get(section, {}).get(leaf) != value
    ]
    if differences:
        raise RefusedError(f"--resume: {directory} holds another run ({'; '.join(differences)})")


def unwritable(directory: Path, error: OSError) -> UsageError:
    """Return the refusal of a run directory that the operating system does not let us write."""
    return UsageError(f"--run-dir ({directory}) cannot be written: {error.strerror}; choose another")


def damaged(known: Path) -> RefusedError:
    """Return the refusal of a run whose configuration cannot be read."""
    return RefusedError(f"{known} is damaged; choose another --run-dir")


def open_record(directory: Path, settings: Settings, *, environment: Mapping[str, Any]) -> Record:
    """Write what the run is into a directory that `claim_directory` accepts, and open its logs.

    Raises:
        UsageError: the directory cannot be written.
        RefusedError: the disk is full.
    """
    known = directory / "config.yaml"
    plain = {section: dict(leaves) for section, leaves in settings.items()}
    try:
        if not known.exists():
            publish(known, [yaml.safe_dump(plain, sort_keys=False).encode()])
        publish(directory / "environment.json", [json.dumps(environment, indent=1).encode() + b"\n"])
        return Record(directory)
    except OSError as error:
        raise unwritable(directory, error) from error
