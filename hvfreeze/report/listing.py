"""`hvfreeze runs`: the run directories in a folder, a line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.report.tables import Table, describe_cache, describe_freezing
from hvfreeze.report.units import percent, plural, seconds
from hvfreeze.runs.lock import check_unlocked
from hvfreeze.runs.reading import Run, load_run, read_config

COLUMNS = ("Run", "State", "Model", "Data", "Ranks", "Freeze", "Cache", "Accuracy", "Training time", "Final cut")


def list_runs(folder: Path) -> int:
    """Print a table of the runs in a folder, or of the run that it is, and return exit code 0.

    Raises:
        RefusedError: the folder cannot be read, or holds no run.
    """
    places = run_directories(folder)
    if not places:
        raise RefusedError(f"{folder} holds no run directory; give the folder that holds them, such as runs/")
    print(Table(columns=COLUMNS, rows=tuple(row_of(place) for place in places)).to_text(), end="")
    return 0


def run_directories(folder: Path) -> list[Path]:
    """Return the run directories in a folder by name; the folder itself where it is one.

    Raises:
        RefusedError: the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise RefusedError(f"{folder} cannot be read: {error.strerror}") from error
    return [place for place in ([folder] if folder / "config.yaml" in entries else entries) if is_run(place)]


def is_run(place: Path) -> bool:
    """Tell whether a run has begun in a directory."""
    return (place / "config.yaml").is_file()


def has_epoch(place: Path) -> bool:
    """Tell whether a run has made an epoch."""
    return is_run(place) and progress_of(place)[0] > 0


def progress_of(place: Path) -> tuple[int, ...]:
    """Return the sizes of the files of a run that grow, metrics.jsonl first."""
    files = (place / name for name in ("metrics.jsonl", "decisions.jsonl", "summary.json"))
    return tuple(file.stat().st_size if file.is_file() else 0 for file in files)


def row_of(place: Path) -> tuple[str, ...]:
    """Return a run's line; one that cannot be read says why in place of numbers."""
    name = place.resolve().name
    try:
        settings = {
            leaf: value for leaves in read_config(place / "config.yaml").values() for leaf, value in leaves.items()
        }
        if not has_epoch(place):
            known = (str(settings["model"]), str(settings["data"]))
            return (name, f"{doing(place)}, no epoch yet", *known, "", str(settings["freeze"]), "", "", "", "")
        run = load_run(place)
    except RefusedError as error:
        return (name, f"damaged: {error}", *[""] * (len(COLUMNS) - 2))
    return (
        name,
        state_of(run),
        str(run.settings["model"]),
        str(run.settings["data"]),
        str(run.size),
        describe_freezing(run),
        describe_cache(run),
        percent(run.test_accuracy),
        seconds(run.train_seconds),
        str(run.final_cut),
    )


def state_of(run: Run) -> str:
    """Return how far a run is, and whether a job is at work on it."""
    if run.finished:
        return "finished"
    done, epochs = len(run.metrics), int(run.settings["epochs"])
    # What stages or a time budget make of --epochs, nobody has written down yet.
    planned = run.settings["freeze"] == "auto" or run.settings["time_budget"] != "none"
    return f"{doing(run.directory)}, {plural(done, 'epoch') if planned else f'{done} of ' + plural(epochs, 'epoch')}"


def doing(place: Path) -> str:
    """Return `running` where a job on this machine holds the directory's lock, else `stopped`."""
    try:
        check_unlocked(place)
    except UsageError:
        return "running"
    except OSError:
        return "unknown"
    return "stopped"


def readable_runs(places: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
    """Return those directories that hold a run with an epoch, after a note on standard error about each other one.

    Raises:
        RefusedError: none does; says what is wrong with the first.
    """
    found, refusals = [], []
    for place in places:
        try:
            load_run(place)
            found.append(place)
        except RefusedError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    for refusal in refusals:
        print(f"hvfreeze: note: left out: {refusal}", file=sys.stderr)
    return found
