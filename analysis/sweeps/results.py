"""An experiment's rows, their evaluation for pages and figures, and the front.

The front is full fine-tuning for several numbers of epochs, the alternative to freezing. Each number of epochs is a
separate training with its own learning-rate schedule, not a longer one stopped early.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from analysis.sweeps.kept import KeptRuns, Row, machine_of
from analysis.sweeps.statistics import (
    Interval,
    mean_interval,
    of_seeds,
    paired_difference,
    paired_ratio,
    shown,
    signed_points,
    time_saved,
    within,
)
from hvfreeze.report.tables import Table, factor, megabytes, percent, seconds
from hvfreeze.runs.reading import Run

T = TypeVar("T")
BY_STEPS = "steps of an idle machine"
"""Name of the machine for training times that are computed from seconds of single steps."""


class MissingError(LookupError):
    """A page names runs that are not kept."""


@dataclass(frozen=True, order=True)
class Budget:
    """Full fine-tuning for some epochs: training time in seconds, test accuracy 0-1."""

    seconds: float
    accuracy: float
    epochs: int


@dataclass(frozen=True)
class Front:
    """The budgets that were measured."""

    budgets: tuple[Budget, ...] = ()

    def seconds(self, epochs: int) -> float | None:
        """Return the training time for that many epochs, None where it was not measured."""
        return next((budget.seconds for budget in self.budgets if budget.epochs == epochs), None)

    def accuracy(self, seconds: float) -> float:
        """Return the accuracy after so long a training: between budgets linear, beyond them that of the nearest.

        Below the shortest budget that is more than full fine-tuning reaches in the time.
        """
        points = sorted(self.budgets)
        if seconds <= points[0].seconds:
            return points[0].accuracy
        for before, after in itertools.pairwise(points):
            if seconds <= after.seconds:
                share = (seconds - before.seconds) / (after.seconds - before.seconds)
                return before.accuracy + share * (after.accuracy - before.accuracy)
        return points[-1].accuracy


@dataclass(frozen=True)
class Metric:
    """A column of a table: its title, and a label's cell compared with another label."""

    title: str
    cell: Callable[[Results, str, str], str]


def mean_of(title: str, column: str, unit: Callable[[float], str]) -> Metric:
    """Return the metric that is the mean of a column with its interval, empty where no run has it."""
    return Metric(title, lambda r, label, _: shown(r.mean(label, column), unit) if r.mean(label, column).n else "")


METRICS = {
    "time": Metric("Training time", lambda r, label, _: r.time(label)),
    "gain": Metric("Speed-up", lambda r, label, against: r.gain(label, against)),
    "saved": Metric("Time saved", lambda r, label, against: r.saved(label, against)),
    "accuracy": Metric("Test accuracy", lambda r, label, _: r.accuracy(label)),
    "accuracy+n": Metric("Test accuracy", lambda r, label, _: r.accuracy(label, n=True)),
    "change": Metric("Against full", lambda r, label, against: r.change(label, against)),
    "change+n": Metric("Against full", lambda r, label, against: r.change(label, against, n=True)),
    "lead": Metric("Full, equal duration", lambda r, label, _: r.lead(label)),
    "cut": Metric("Final cut", lambda r, label, _: r.cut(label)),
    "stored": mean_of("Stored", "cache_bytes", megabytes),
    "sent": Metric("Exchanged by a rank", lambda r, label, _: megabytes(r.mean(label, "allreduce_bytes").mean)),
}
"""Columns that several pages have, by a short name."""


@dataclass(frozen=True)
class Results:
    """The rows of an experiment. Methods that return text are what pages name, with `n=True` they count seeds."""

    directory: Path
    rows: Sequence[Row] = ()
    front: Front = field(default_factory=Front)
    """Full fine-tuning at several budgets of epochs, of these rows where they have some, else of the baseline's."""
    fronts: Mapping[int, Front] = field(default_factory=dict)
    """The front of each seed, for differences paired by seed."""
    reference: str = ""
    """The label of full fine-tuning among these rows, which others are compared with."""

    @functools.cached_property
    def by_label(self) -> dict[str, list[Row]]:
        """The rows by label, in the order of the first of each."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(str(row["label"]), []).append(row)
        return found

    @property
    def labels(self) -> list[str]:
        """The labels in the order of their first row."""
        return list(self.by_label)

    def of(self, label: str) -> list[Row]:
        """Return a label's rows.

        Raises:
            MissingError: there are none.
        """
        if label not in self.by_label:
            raise MissingError(f"{self.directory} has no runs {label}")
        return self.by_label[label]

    def has(self, *labels: str) -> bool:
        """Return True if there are rows of all these labels."""
        return self.by_label.keys() >= set(labels)

    def values(self, label: str, column: str) -> dict[int, float]:
        """Return a column's number for each seed of a label."""
        return {int(row["seed"]): float(row[column]) for row in self.of(label) if row[column] is not None}

    def mean(self, label: str, column: str) -> Interval:
        """Return the mean of a column over seeds."""
        return of_seeds(self.values(label, column))

    def ratio(self, label: str, against: str = "", column: str = "train_seconds") -> Interval:
        """Return the reference's time over this label's, paired by seed."""
        return paired_ratio(self.values(against or self.reference, column), self.values(label, column))

    def difference(self, label: str, against: str = "", column: str = "test_accuracy") -> Interval:
        """Return this label's column minus the reference's, paired by seed."""
        return paired_difference(self.values(label, column), self.values(against or self.reference, column))

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

    def most_accurate(self, labels: Iterable[str]) -> str:
        """Return the label that is the most accurate on average."""
        return max(labels, key=lambda label: self.mean(label, "test_accuracy").mean)

    def time(self, label: str, *, column: str = "train_seconds", n: bool = False) -> str:
        """Return the mean training time."""
        return shown(within(self.mean(label, column), 0), seconds, count=n)

    def accuracy(self, label: str, *, n: bool = False) -> str:
        """Return the mean test accuracy."""
        return shown(within(self.mean(label, "test_accuracy"), 0, 1), percent, count=n)

    def gain(self, label: str, against: str = "", *, n: bool = False) -> str:
        """Return how many times as fast a label is as another."""
        return self.with_clocks(shown(self.ratio(label, against), factor, count=n), label, against)

    def saved(self, label: str, against: str = "") -> str:
        """Return the part of the other's time that is saved."""
        return shown(time_saved(self.ratio(label, against)), percent)

    def change(self, label: str, against: str = "", *, n: bool = False) -> str:
        """Return by how many points a label is more accurate."""
        return shown(self.difference(label, against), signed_points, count=n)

    def lead(self, label: str) -> str:
        """Return accuracy against full fine-tuning trained for as many seconds."""
        return self.with_clocks(shown(self.over_front(label), signed_points), label)

    def cut(self, label: str) -> str:
        """Return the mean of the last cut."""
        return shown(within(self.mean(label, "final_cut"), 0), lambda cut: f"{cut:.1f}")

    def with_clocks(self, text: str, label: str, against: str = "") -> str:
        """Return a comparison of times; where they were not taken on one machine it says so in its brackets."""
        told = self.unlike_clocks(label, against)
        if not told:
            return text
        return f"{text[:-1]}; {told})" if text.endswith(")") else f"{text} ({told})"

    def unlike_clocks(self, label: str, against: str = "") -> str:
        """Return in what way two labels' times were not taken on one machine, seed by seed; empty where they were."""
        ours, theirs = (self.clocks(each) for each in (label, against or self.reference))
        pairs = [{ours[seed], theirs[seed]} for seed in ours.keys() & theirs.keys()]
        if all(len(pair) == 1 for pair in pairs):
            return ""
        return "steps against clock" if any(BY_STEPS in pair for pair in pairs) else "other machine"

    def clocks(self, label: str) -> dict[int, str]:
        """Return for each seed of a label where its training time was taken: a machine, or `BY_STEPS`."""
        return {int(row["seed"]): row.get("timed_by") or self.machine(row) for row in self.of(label)}

    def machine(self, row: Row) -> str:
        """Return the machine of a row's run."""
        return self.machines.get(str(row.get("run"))) or machine_of(row)

    def shown_as(self, label: str) -> str:
        """Return a label as a person reads it: runs that were allowed a cache and stored nothing have none."""
        rows = self.of(label)
        idle = [row for row in rows if row["cache"] != "off" and not row["cache_bytes"]]
        if not idle:
            return label
        if len(idle) < len(rows):
            return f"{label} (cached in {len(rows) - len(idle)} of {len(rows)} runs)"
        return f"{label.removesuffix('-cached')}, {rows[0]['augment']} (nothing cached)"

    def compare(
        self,
        first: str,
        labels: Sequence[str] | Mapping[str, str],
        metrics: Sequence[str | Metric],
        *,
        against: str = "",
        prose: Sequence[str] = (),
        **titles: str,
    ) -> str:
        """Return a table with a row for each label, by metrics or their short names.

        Args:
            first: title of the column that names the rows.
            labels: shown as they are, or by the words that they map to.
            metrics: the other columns.
            against: what labels are compared with, where that is not the reference.
            prose: titles of columns that hold text.
            titles: titles of metrics by their short name, replacing the metrics' own.
        """
        chosen = [
            replace(METRICS[each], title=titles.get(each, METRICS[each].title)) if isinstance(each, str) else each
            for each in metrics
        ]
        words = labels if isinstance(labels, Mapping) else {label: label for label in labels}
        rows = ((told, *(metric.cell(self, label, against) for metric in chosen)) for label, told in words.items())
        columns = (first, *(metric.title for metric in chosen))
        return Table(columns=columns, rows=tuple(rows), prose=frozenset(prose)).to_text()

    def seeds(self, labels: Sequence[str] = ()) -> str:
        """Return n as a caption has it: the seeds of these labels, of all by default, from the fewest to the most."""
        counts = sorted({len(self.of(label)) for label in labels or self.labels})
        return f"n = {' to '.join(str(n) for n in (counts[:1] + counts[1:][-1:]))} seeds"

    @functools.cached_property
    def machines(self) -> dict[str, str]:
        """The machines of the kept runs by name."""
        kept = KeptRuns(self.directory)
        known = {name: machine_of(environment) for name, environment in kept.environments.items()}
        return {name: known[line["environment"]] for name, line in kept.lines.items() if line["environment"] in known}

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The kept runs by name, those of the rows only."""
        kept = KeptRuns(self.directory)
        return {str(row["run"]): kept.run(str(row["run"])) for row in self.rows}

    def of_runs(self, label: str, value: Callable[[Run], T]) -> dict[int, T]:
        """Return something of each kept run of a label, by seed."""
        return {int(run.settings["seed"]): value(run) for run in self.runs_of(label)}

    def runs_of(self, *labels: str) -> list[Run]:
        """Return the kept runs of some labels."""
        return [
            replace(self.runs[str(row["run"])], name=f"{self.shown_as(label)}-s{row['seed']}")
            for label in labels
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
    own = Results(root / name, KeptRuns(root / name).rows(), reference=reference)
    if budgets_of(own):
        return with_front(own, own, [*budgets_of(own), reference])
    baseline = Results(root / "baseline", KeptRuns(root / "baseline").rows())
    return with_front(own, baseline, budgets_of(baseline))


def with_front(results: Results, measured: Results, labels: Sequence[str]) -> Results:
    """Return results with the fronts that these labels of the results `measured` make, on average and seed by seed."""
    labels = [label for label in labels if measured.has(label)]
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
        if results.has(label)
    ]
    return Front(tuple(sorted(points)))
