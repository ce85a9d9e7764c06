"""`hvfreeze runs`: lists the run directories in a folder, one per line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.report.tables import accuracy_of, describe_run, epochs_done, seconds, table_of
from hvfreeze.runs.files import check_unlocked
from hvfreeze.runs.reading import Run, load_run, named_apart, read_config

COLUMNS = ("Run", "State", "Model", "Data", "Ranks", "Freeze", "Cache", "Accuracy", "Training time", "Final cut")


def list_runs(folder: Path) -> int:
    """Print a table of the runs in a folder, or of the folder itself if it is a run, and return exit code 0.

    Raises RefusedError if the folder cannot be read, or contains no run.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be read: {error.strerror}; name a folder of runs, such as runs/"
        ) from error
    places = [place for place in ([folder] if folder / "config.yaml" in entries else entries) if is_run(place)]
    if not places:
        raise RefusedError(f"{folder} contains no run directory; give the folder that contains them, such as runs/")
    print(table_of([dict.fromkeys(COLUMNS, "") | row_of(place) for place in places]).to_text(), end="")
    return 0


def is_run(place: Path) -> bool:
    """Return True if a directory contains a run; False for another user's directory that cannot be read."""
    try:
        return (place / "config.yaml").is_file()
    except OSError:
        return False


def has_epoch(place: Path) -> bool:
    """Return True if a run has completed an epoch."""
    return is_run(place) and progress_of(place)[0] > 0


def progress_of(place: Path) -> tuple[int, ...]:
    """Return the sizes of a run's growing files, metrics.jsonl first; 0 for unreadable ones."""

    def size(file: Path) -> int:
        try:
            return file.stat().st_size if file.is_file() else 0
        except OSError:
            return 0

    return tuple(size(place / name) for name in ("metrics.jsonl", "decisions.jsonl", "summary.json"))


def row_of(place: Path) -> dict[str, str]:
    """Return a run's table row; for an unreadable run, the reason instead of numbers."""
    name = place.resolve().name
    try:
        config = read_config(place / "config.yaml")
        if not has_epoch(place):
            leaves = {leaf.title(): str(value) for section in config.values() for leaf, value in section.items()}
            known = {title: leaves[title] for title in ("Model", "Data", "Freeze")}
            return {"Run": name, "State": f"{doing(place)}, no epoch yet", **known}
        run = load_run(place)
    except RefusedError as error:
        return {"Run": name, "State": f"damaged: {error}"}
    return {
        "Run": name,
        "State": state_of(run),
        **describe_run(run),
        "Accuracy": accuracy_of(run),
        "Training time": seconds(run.train_seconds),
        "Final cut": str(run.final_cut),
    }


def state_of(run: Run) -> str:
    """Return a run's progress, and whether a job is working on it."""
    if run.finished:
        return "finished"
    return f"{doing(run.directory)}, {epochs_done(run)}"


def doing(place: Path) -> str:
    """Return `running` if a job on this machine holds the directory's lock, else `stopped`."""
    try:
        check_unlocked(place)
    except UsageError:
        return "running"
    except OSError:
        return "unknown"
    return "stopped"


def readable_runs(places: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Return the runs in the directories that contain an epoch; print a note on standard error for each other one.

    Raises RefusedError if none does; the message is about the first.
    """
    found, refusals = [], []
    for place in places:
        try:
            found.append(load_run(place))
        except RefusedError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    for refusal in refusals:
        print(f"hvfreeze: note: skipped: {refusal}", file=sys.stderr)
    return named_apart(found)
