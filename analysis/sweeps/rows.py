"""A CSV row per run, made from its kept logs.

RESULTS/<experiment>/rows.csv       seconds, bytes, accuracies 0-1; training time as in `kept`
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.sweeps.kept import COUNTED, PLAN, UNCOUNTED, kept_run
from analysis.sweeps.provenance import made_columns
from hvfreeze.ranks.reducer import UNCOMPRESSED_STEPS
from hvfreeze.report.csv_files import to_csv
from hvfreeze.runs.reading import Run, load_run

ROWS = "rows.csv"
DIGEST = 16
"""Digits of a digest that a row holds: enough to tell trainings apart."""
SETTINGS = (
    "model",
    "data",
    "train_samples",
    "validation_fraction",
    "image_size",
    "blocks",
    "epochs",
    "batch_size",
    "lr",
    "augment",
    "partition",
    "shard_sizes",
    "freeze",
    "cut",
    "signal",
    "vote_weight",
    "quorum",
    "eta_max",
    "cache",
    "cache_dtype",
    "compression",
    "precision",
)

Row = dict[str, Any]


HASHES = ("commit", "parameter_digest")
"""Columns whose text may look like a number: 9e59029 is no infinity, and 0012345 keeps its zeros."""


def publish(path: Path, text: str) -> None:
    """Replace a file at once, so that whoever reads it never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


UNVOTED = ("none", "static")
"""Ways of freezing in which nobody votes."""


def row_of(plan: Mapping[str, Any], run: Run) -> Row:
    """Return a kept run as plain numbers. `step_*` are seconds of rank 0 per step, in the epochs after `unlike`."""
    summary, settings = run.summary or {}, run.settings
    row: Row = {
        "run": run.name,
        **{key: plan[key] for key in ("label", "seed", "program", "ranks", "nodes", "bandwidth")},
    }
    row.update({name: settings.get(name) for name in SETTINGS})
    row.update(test_accuracy=run.test_accuracy, best_test_accuracy=run.best_accuracy, train_seconds=run.train_seconds)
    row.update(steps=int(run.metrics[-1]["step"]), images_per_second=run.images_per_second)
    row.update(allreduce_bytes=run.allreduce_bytes, other_bytes=summary.get("other_collective_bytes"))
    row["final_cut"] = run.final_cut
    row["cut_history"] = " ".join(f"{move.cut}@{move.step}" for move in run.cut_history)
    row.update(vote_columns(run))
    cache = summary.get("cache") or {}
    wanted = ("exact", "bytes", "rows_written", "rows_read", "seconds_saved_predicted", "seconds_saved")
    row.update({f"cache_{key}": cache.get(key) for key in wanted})
    row.update({f"seconds_{phase}": run.seconds[phase] for phase in COUNTED})
    row[f"seconds_{UNCOUNTED}"] = load_run(run.directory).seconds[UNCOUNTED]
    row.update(steady_columns(run))
    row["wire_bytes_per_step"] = wire_bytes_per_step(run)
    row["parameter_digest"] = (summary.get("parameter_digest") or "")[:DIGEST] or None
    return {**row, **made_columns(run.directory, run.environment)}


def vote_columns(run: Run) -> Row:
    """Return the number of votes, of moves, and of votes in which ranks proposed different cuts; None without votes."""
    if run.settings["freeze"] in UNVOTED:
        return dict.fromkeys(("votes", "moves", "disagreements"))
    votes = [line for line in run.decisions if line["proposals"]]
    split = sum(len(set(line["proposals"])) > 1 for line in votes)
    moves = sum(line["cut_after"] != line["cut_before"] for line in votes)
    return {"votes": len(votes), "moves": moves, "disagreements": split}


def unlike(run: Run) -> int:
    """Return how many of a run's first epochs are unlike those that follow, which are timed; one is left to be timed.

    The first, in which memory and libraries come up to speed, and those in which low rank has not set in.
    """
    steps = UNCOMPRESSED_STEPS if run.settings["compression"].startswith("powersgd") else 0
    begun = 1 + next((place for place, line in enumerate(run.metrics) if line["step"] > steps), 0)
    return min(begun, len(run.metrics) - 1)


def steady_columns(run: Run) -> Row:
    """Return seconds per step by phase over the epochs after `unlike`, over all where there is one only."""
    left_out = unlike(run)
    first, lines = (run.metrics[left_out - 1]["step"] if left_out else 0), run.metrics[left_out:]
    steps = max(1, lines[-1]["step"] - first)
    columns = {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) / steps for phase in COUNTED}
    return {"step_seconds": sum(columns.values()), **{f"step_{phase}": value for phase, value in columns.items()}}


def wire_bytes_per_step(run: Run) -> float | None:
    """Return the bytes that the busiest node sent per step after `unlike` epochs, None where nobody counted."""
    path = run.directory / "wire.json"
    if not path.exists():
        return None
    sent: dict[int, dict[str, int]] = {
        int(epochs): nodes for epochs, nodes in json.loads(path.read_text(encoding="utf-8")).items()
    }
    first, last = min((epochs for epochs in sent if epochs >= unlike(run)), default=0), max(sent)
    if not 0 < first < last:
        return None
    steps = run.metrics[last - 1]["step"] - run.metrics[first - 1]["step"]
    return float(max(sent[last][node] - sent[first][node] for node in sent[last]) / steps)


def collect(directory: Path, names: Sequence[str]) -> list[Row]:
    """Return the rows of those of these runs whose logs are kept."""
    folders = [directory / "runs" / name for name in names]
    done = [folder for folder in folders if (folder / "summary.json").exists()]
    return [row_of(json.loads((folder / PLAN).read_text(encoding="utf-8")), kept_run(folder)) for folder in done]


def write_rows(directory: Path, rows: Sequence[Row]) -> None:
    """Replace the CSV file."""
    publish(directory / ROWS, to_csv(rows) if rows else "")


def read_rows(directory: Path) -> list[Row]:
    """Return the rows of a CSV file, none where it is absent: numbers as numbers, empty cells as None."""
    return [
        {key: (text or None) if key in HASHES else cell(text) for key, text in row.items()}
        for row in texts_of(directory / ROWS)
    ]


def texts_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as they stand there, none where it is absent."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cell(text: str) -> Any:
    """Return a CSV cell's value."""
    if text in ("", "None"):
        return None
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
