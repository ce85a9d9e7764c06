"""The numbers behind a report as CSV, for programs: plain numbers in seconds and bytes, accuracies 0-1."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hvfreeze.report.comparison import Group, compare


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV with a column for every key that occurs."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def run_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return plain numbers of every run: seconds, bytes, accuracies 0-1."""
    rows = []
    for group in groups:
        for run in group.runs:
            comparison = compare(Group(run.name, (run,)), groups)
            row: dict[str, Any] = {"run": run.name, "group": group.name, "finished": run.finished, "ranks": run.size}
            row.update({leaf: run.settings[leaf] for leaf in ("model", "data", "freeze", "cut", "cache", "seed")})
            row.update(test_accuracy=run.test_accuracy, best_test_accuracy=run.best_accuracy)
            row.update(epochs=len(run.metrics), train_seconds=run.train_seconds)
            row["speed_up"] = comparison.speed_up.mean if comparison else None
            row["time_saved"] = comparison.time_saved.mean if comparison else None
            row.update(images_per_second=run.images_per_second, allreduce_bytes=run.allreduce_bytes)
            row["final_cut"] = run.final_cut
            row.update({f"seconds_{phase}": value for phase, value in run.seconds.items()})
            rows.append(row)
    return rows


def epoch_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every line of every metrics.jsonl, opened up."""
    rows = []
    for group in groups:
        for run in group.runs:
            for line in run.metrics:
                row = {"run": run.name, **{k: v for k, v in line.items() if not isinstance(v, dict)}}
                rows.append({**row, **{f"seconds_{phase}": value for phase, value in line["seconds"].items()}})
    return rows


def vote_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every line of every decisions.jsonl; lists have spaces between their entries."""
    rows = []
    for group in groups:
        for run in group.runs:
            for line in run.decisions:
                row: dict[str, Any] = {"run": run.name}
                for key, value in line.items():
                    if key != "shadow":
                        row[key] = " ".join(map(str, value)) if isinstance(value, list) else value
                row.update({f"shadow_{name}": scored["cut"] for name, scored in line.get("shadow", {}).items()})
                rows.append(row)
    return rows
