"""An experiment's rows, with what a sentence or a figure needs of them, and the front that they are held against."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.sweeps.front import Budget, Front
from analysis.sweeps.kept import kept_run
from analysis.sweeps.rows import Row, read_rows
from analysis.sweeps.statistics import Interval, mean_interval, of_seeds, paired_difference, paired_ratio, within
from hvfreeze.runs.reading import Run


@dataclass(frozen=True)
class Results:
    """The rows of an experiment, with what a sentence or a figure needs of them."""

    directory: Path
    rows: list[Row] = field(default_factory=list)
    front: Front = field(default_factory=Front)
    """Full fine-tuning at several budgets of epochs, of these rows where they have some, else of the baseline's."""
    fronts: Mapping[int, Front] = field(default_factory=dict)
    """The same for each seed alone, which is what differences are taken against."""
    reference: str = ""
    """The label of full fine-tuning among these rows."""

    @property
    def labels(self) -> list[str]:
        """The labels in the order of their first row."""
        return list(dict.fromkeys(str(row["label"]) for row in self.rows))

    def of(self, label: str) -> list[Row]:
        """Return the rows of a label."""
        return [row for row in self.rows if row["label"] == label]

    def shown_as(self, label: str) -> str:
        """Return a label as a person reads it: runs that were allowed a cache and stored nothing have none."""
        rows = self.of(label)
        idle = [row for row in rows if row["cache"] != "off" and not row["cache_bytes"]]
        if not idle:
            return label
        if len(idle) < len(rows):
            return f"{label} (cached in {len(rows) - len(idle)} of {len(rows)} runs)"
        return f"{label.removesuffix('-cached')}, {rows[0]['augment']} (nothing cached)"

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
        rows = [(int(row["seed"]), row) for row in self.of(self.reference)]
        known = ((seed, row, self.fronts[seed].seconds(row["epochs"])) for seed, row in rows if seed in self.fronts)
        return {seed: row["train_seconds"] / seconds for seed, row, seconds in known if seconds}

    def over_front(self, label: str) -> Interval:
        """Return accuracy minus that of full fine-tuning trained for as long: same pace, same seed."""
        paces, leads = self.paces(), []
        for row in self.of(label):
            seed = int(row["seed"])
            if seed in paces:
                leads.append(row["test_accuracy"] - self.fronts[seed].accuracy(row["train_seconds"] / paces[seed]))
        return mean_interval(leads)

    def count(self, labels: Sequence[str]) -> str:
        """Return n as a caption has it: the seeds of these labels, from the fewest to the most."""
        counts = sorted({len(self.of(label)) for label in labels})
        return f"n = {' to '.join(str(n) for n in (counts[:1] + counts[1:][-1:]))} seeds"

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The kept runs by name, those of the rows only."""
        return {str(row["run"]): kept_run(self.directory / "runs" / str(row["run"])) for row in self.rows}

    def runs_of(self, *labels: str) -> list[Run]:
        """Return the kept runs of some labels, of all where none is named."""
        wanted = labels or tuple(self.labels)
        return [
            replace(self.runs[str(row["run"])], name=f"{self.shown_as(label)}-s{row['seed']}")
            for label in wanted
            for row in self.of(label)
        ]


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
        return with_front(own, own, [*budgets_of(own), reference])
    baseline = Results(root / "baseline", read_rows(root / "baseline"))
    return with_front(own, baseline, budgets_of(baseline))


def with_front(results: Results, measured: Results, labels: Sequence[str]) -> Results:
    """Return results with the fronts that these labels of the results `measured` make, on average and seed by seed."""
    seeds = sorted({int(row["seed"]) for label in labels for row in measured.of(label)})
    alone = {seed: [row for row in measured.rows if int(row["seed"]) == seed] for seed in seeds}
    fronts = {seed: front_of(replace(measured, rows=rows), labels) for seed, rows in alone.items()}
    front = front_of(measured, labels)
    whole = {seed: own for seed, own in fronts.items() if len(own.budgets) == len(front.budgets)}
    return replace(results, front=front, fronts=whole)


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
