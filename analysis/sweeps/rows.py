"""A CSV row per run, made from its kept logs, and what a sentence or a figure needs of an experiment's rows.

RESULTS/<experiment>/rows.csv       seconds, bytes, accuracies 0-1
"""

from __future__ import annotations

import csv
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.sweeps.front import Budget, Front
from analysis.sweeps.kept import PLAN
from analysis.sweeps.statistics import Interval, mean_interval, of_seeds, paired_difference, paired_ratio, within
from hvfreeze.report.csv_files import to_csv
from hvfreeze.runs.reading import TRAINING_PHASES, Run, load_run

ROWS = "rows.csv"
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


def publish(path: Path, text: str) -> None:
    """Replace a file at once, so that whoever reads it never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def row_of(plan: Mapping[str, Any], run: Run) -> Row:
    """Return a run as plain numbers. `step_*` are seconds of rank 0 per step, in the epochs after the first."""
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
    row["cut_history"] = " ".join(f"{cut}@{step}" for _, step, cut in run.cut_history)
    row.update(vote_columns(run))
    cache = summary.get("cache") or {}
    wanted = ("exact", "bytes", "rows_written", "rows_read", "seconds_saved_predicted", "seconds_saved")
    row.update({f"cache_{key}": cache.get(key) for key in wanted})
    row.update({f"seconds_{phase}": run.seconds[phase] for phase in TRAINING_PHASES})
    row.update(steady_columns(run))
    row["wire_bytes_per_step"] = wire_bytes_per_step(run)
    return row


def vote_columns(run: Run) -> Row:
    """Return the number of votes, of moves, and of votes in which ranks proposed different cuts."""
    votes = [line for line in run.decisions if line["proposals"]]
    split = sum(len(set(line["proposals"])) > 1 for line in votes)
    moves = sum(line["cut_after"] != line["cut_before"] for line in votes)
    return {"votes": len(votes), "moves": moves, "disagreements": split}


def steady_columns(run: Run) -> Row:
    """Return seconds per step by phase over the epochs after the first, over all where there is one only."""
    first, lines = (run.metrics[0]["step"], run.metrics[1:]) if len(run.metrics) > 1 else (0, run.metrics)
    steps = max(1, lines[-1]["step"] - first)
    columns = {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) / steps for phase in TRAINING_PHASES}
    return {"step_seconds": sum(columns.values()), **{f"step_{phase}": value for phase, value in columns.items()}}


def wire_bytes_per_step(run: Run) -> float | None:
    """Return the bytes that the busiest node sent per step after the first epoch, None where nobody counted."""
    path = run.directory / "wire.json"
    if not path.exists():
        return None
    sent: dict[int, dict[str, int]] = {
        int(epochs): nodes for epochs, nodes in json.loads(path.read_text(encoding="utf-8")).items()
    }
    first, last = min(sent), max(sent)
    if first == last:
        return None
    steps = run.metrics[last - 1]["step"] - run.metrics[first - 1]["step"]
    return float(max(sent[last][node] - sent[first][node] for node in sent[last]) / steps)


def collect(directory: Path, names: Sequence[str]) -> list[Row]:
    """Return the rows of those of these runs whose logs are kept."""
    folders = [directory / "runs" / name for name in names]
    done = [folder for folder in folders if (folder / "summary.json").exists()]
    return [row_of(json.loads((folder / PLAN).read_text(encoding="utf-8")), load_run(folder)) for folder in done]


def write_rows(directory: Path, rows: Sequence[Row]) -> None:
    """Replace the CSV file."""
    publish(directory / ROWS, to_csv(rows) if rows else "")


def read_rows(directory: Path) -> list[Row]:
    """Return the rows of a CSV file, none where it is absent: numbers as numbers, empty cells as None."""
    path = directory / ROWS
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: cell(text) for key, text in row.items()} for row in csv.DictReader(file)]


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


@dataclass(frozen=True)
class Results:
    """The rows of an experiment, with what a sentence or a figure needs of them."""

    directory: Path
    rows: list[Row] = field(default_factory=list)
    front: Front = field(default_factory=Front)
    """Full fine-tuning at several budgets of epochs, of these rows where they have some, else of the baseline's."""
    reference: str = ""
    """The label of full fine-tuning among these rows."""

    @property
    def labels(self) -> list[str]:
        """The labels in the order of their first row."""
        return list(dict.fromkeys(str(row["label"]) for row in self.rows))

    def of(self, label: str) -> list[Row]:
        """Return the rows of a label."""
        return [row for row in self.rows if row["label"] == label]

    def values(self, label: str, column: str) -> dict[int, float]:
        """Return a column's number for each seed of a label."""
        return {int(row["seed"]): float(row[column]) for row in self.of(label) if row[column] is not None}

    def mean(self, label: str, column: str) -> Interval:
        """Return a column's mean over the seeds of a label."""
        return of_seeds(self.values(label, column))

    def cut(self, label: str) -> Interval:
        """Return the mean of the last cut over the seeds of a label."""
        return within(self.mean(label, "final_cut"), 0)

    def gain(self, label: str, reference: str, column: str = "train_seconds") -> Interval:
        """Return the reference's time over this label's, paired by seed."""
        return paired_ratio(self.values(reference, column), self.values(label, column))

    def change(self, label: str, reference: str, column: str = "test_accuracy") -> Interval:
        """Return this label's column minus the reference's, paired by seed."""
        return paired_difference(self.values(label, column), self.values(reference, column))

    def paces(self) -> dict[int, float]:
        """Return for each seed how long full fine-tuning took here, over what it took when the front was measured.

        Experiments are run at different times, perhaps on other ranks; times are compared at one pace.
        """
        known = ((row, self.front.seconds(row["epochs"])) for row in self.of(self.reference))
        return {int(row["seed"]): row["train_seconds"] / seconds for row, seconds in known if seconds}

    def over_front(self, label: str) -> Interval:
        """Return accuracy minus that of full fine-tuning for as many epochs as take equally long at the same pace."""
        paces = self.paces()
        rows = [row for row in self.of(label) if int(row["seed"]) in paces]
        return mean_interval(
            [row["test_accuracy"] - self.front.accuracy(row["train_seconds"] / paces[int(row["seed"])]) for row in rows]
        )

    def count(self, labels: Sequence[str]) -> str:
        """Return n as a caption has it: the seeds of these labels, from the fewest to the most."""
        counts = sorted({len(self.of(label)) for label in labels})
        return f"n = {' to '.join(str(n) for n in (counts[:1] + counts[1:][-1:]))} seeds"

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The kept runs by name, those of the rows only."""
        return {str(row["run"]): load_run(self.directory / "runs" / str(row["run"])) for row in self.rows}

    def runs_of(self, *labels: str) -> list[Run]:
        """Return the kept runs of some labels, of all where none is named."""
        wanted = labels or tuple(self.labels)
        return [self.runs[str(row["run"])] for label in wanted for row in self.of(label)]


def best_lr(rows: Sequence[Row]) -> float | None:
    """Return the learning rate whose runs, on held-out training samples, were best on average; None without such."""
    tried: dict[float, list[float]] = {}
    for row in rows:
        if str(row["label"]).startswith("lr") and row["validation_fraction"]:
            tried.setdefault(float(row["lr"]), []).append(float(row["test_accuracy"]))
    return max(tried, key=lambda lr: sum(tried[lr]) / len(tried[lr]), default=None)


def open_results(root: Path, name: str, reference: str = "") -> Results:
    """Return an experiment's results, with the front that its own budgets of epochs give, else the baseline's."""
    own = Results(root / name, read_rows(root / name), reference=reference)
    if budgets_of(own):
        return replace(own, front=front_of(own, [*budgets_of(own), reference]))
    baseline = Results(root / "baseline", read_rows(root / "baseline"))
    return replace(own, front=front_of(baseline, budgets_of(baseline)))


def budgets_of(results: Results) -> list[str]:
    """Return the labels of full fine-tuning for some number of epochs, the fewest first."""
    return sorted((label for label in results.labels if label.startswith("epochs")), key=lambda b: int(b[6:]))


def front_of(results: Results, labels: Sequence[str]) -> Front:
    """Return the front that these labels make, those without rows left out."""
    points = [
        Budget(
            results.mean(label, "train_seconds").mean,
            results.mean(label, "test_accuracy").mean,
            int(results.of(label)[0]["epochs"]),
        )
        for label in labels
        if results.of(label)
    ]
    return Front(tuple(sorted(points)))
