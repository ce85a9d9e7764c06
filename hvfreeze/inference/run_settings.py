"""Read the settings of a finished run that prediction and evaluation need."""

from __future__ import annotations

from pathlib import Path

from hvfreeze.config.data import is_table
from hvfreeze.config.tree import Config, from_dict
from hvfreeze.data.tables import Columns, columns_of
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs.reading import read_config
from hvfreeze.user_code import HF


def config_of(run_dir: Path) -> Config:
    """Return a run's configuration. Raises RefusedError if it is unreadable."""
    path = run_dir / "config.yaml"
    try:
        return from_dict({**read_config(path), "given": []}, source=str(path))
    except UsageError as error:
        raise RefusedError(f"{path} is damaged or of another version: {error}") from error


def columns_in(run_dir: Path) -> Columns:
    """Return the table columns of a run's settings; the usual ones for a mere copy of its model."""
    if not (run_dir / "config.yaml").exists():
        return Columns()
    data = config_of(run_dir).data
    return columns_of(data) if is_table(data.data) or data.data.startswith(HF) else Columns()
