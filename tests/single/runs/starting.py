"""Runs begun in a directory as rank 0 does, and what they leave there."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from hvfreeze.config.tree import from_dict, to_dict
from hvfreeze.runs.directory import check_directory, open_record
from hvfreeze.runs.record import Record

ENVIRONMENT: dict[str, Any] = {
    "size": 2,
    "hosts": ["a", "a"],
    "processor": "Some CPU",
    "capability": "AVX2",
    "threads": 2,
    "versions": {"torch": "2.13.0", "numpy": "2.0.0", "h5py": "3.16.0"},
}


def settings(**flags: Any) -> dict[str, dict[str, Any]]:
    return to_dict(from_dict({"run_dir": "somewhere", **flags}))


def start(directory: Path, environment: dict[str, Any] | None = None, **flags: Any) -> Record:
    """Begin a run, as rank 0 does."""
    check_directory(directory, settings(**flags), environment or ENVIRONMENT)
    record = open_record(directory, settings(**flags), environment=environment or ENVIRONMENT)
    record.begin()
    return record


def changed(**changes: Any) -> dict[str, Any]:
    environment = copy.deepcopy(ENVIRONMENT)
    environment["versions"].update(changes.pop("versions", {}))
    return {**environment, **changes}


def kept(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the environment that a directory holds."""
    held = yaml.safe_load((directory / "config.yaml").read_text())
    return held, json.loads((directory / "environment.json").read_text())
