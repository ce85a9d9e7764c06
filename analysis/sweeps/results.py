"""An experiment's rows, with the numbers and words that a sentence or a figure needs, and the front beside them.

The front is full fine-tuning trained for several numbers of epochs: what anybody can do instead of freezing. Each
budget of epochs is a training of its own, with the learning rate's whole schedule; none is a longer one stopped early.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.sweeps.kept import KeptRuns, Row, machine_of, read_rows
from analysis.sweeps.statistics import (
    Interval,
    mean_interval,
    of_seeds,
    paired_difference,
    paired_ratio,
    shown,
    signed_points,
    time_saved,
    verdict,
    within,
)
from hvfreeze.report.tables import factor, percent, seconds
from hvfreeze.runs.reading import Run

COMPARED = ("Training time", "Speed-up", "Time saved", "Test accuracy", "Against full")
BY_STEPS = "steps of an idle machine"
"""In place of a machine, where a training time is made of the seconds of single steps."""
SAME_TIME, FINAL_CUT = "Full, trained as long", "Final cut"


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
class Results:
    """The rows of an experiment. Methods without `_text` return numbers, the others what a sentence says of them."""

    directory: Path
    rows: list[Row] = field(default_factory=list)
    front: Front = field(default_factory=Front)
    """Full fine-tuning at several budgets of epochs, of these rows where they have some, else of the baseline's."""
    fronts: Mapping[int, Front] = field(default_factory=dict)
    """The same for each seed alone, which is what differences are taken against."""
    reference: str = ""
    """The label of full fine-tuning among these rows, which others are compared with."""

    @property
    def labels(self) -> list[str]:
        """The labels in the order of their first row."""
        return list(dict.fromkeys(str(row["label"]) for row in self.rows))

    def of(self, label: str) -> list[Row]:
        return [row for row in self.rows if row["label"] == label]

    def most_accurate(self, labels: Iterable[str]) -> str:
        """Return the label that is the most accurate on average."""
        return max(labels, key=lambda label: self.mean(label, "test_accuracy").mean)

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
        return of_seeds(self.values(label, column))

    def cut(self, label: str) -> Interval:
        """Return the mean of the last cut over the seeds of a label."""
        return within(self.mean(label, "final_cut"), 0)

    def gain(self, label: str, reference: str = "", column: str = "train_seconds") -> Interval:
        """Return the reference's time over this label's, paired by seed."""
        return paired_ratio(self.values(reference or self.reference, column), self.values(label, column))

    def change(self, label: str, reference: str = "", column: str = "test_accuracy") -> Interval:
        """Return this label's column minus the reference's, paired by seed."""
        return paired_difference(self.values(label, column), self.values(reference or self.reference, column))

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

    def time_text(self, label: str, *, column: str = "train_seconds", count: bool = False) -> str:
        return shown(within(self.mean(label, column), 0), seconds, count=count)

    def accuracy_text(self, label: str, *, count: bool = False) -> str:
        return shown(within(self.mean(label, "test_accuracy"), 0, 1), percent, count=count)

    def gain_text(self, label: str, reference: str = "", *, count: bool = False) -> str:
        return self.with_clocks(shown(self.gain(label, reference), factor, count=count), label, reference)

    def change_text(self, label: str, reference: str = "", *, count: bool = False) -> str:
        return shown(self.change(label, reference), signed_points, count=count)

    def lead_text(self, label: str) -> str:
        """Return accuracy against full fine-tuning trained for as many seconds: the cell below `SAME_TIME`."""
        return self.with_clocks(shown(self.over_front(label), signed_points), label)

    def with_clocks(self, text: str, label: str, reference: str = "") -> str:
        """Return a comparison of times; where they were not taken on one machine it says so in its brackets."""
        told = self.unlike_clocks(label, reference)
        if not told:
            return text
        return f"{text[:-1]}; {told})" if text.endswith(")") else f"{text} ({told})"

    def unlike_clocks(self, label: str, reference: str = "") -> str:
        """Return in what way two labels' times were not taken on one machine, seed by seed; empty where they were."""
        ours, theirs = (self.clocks(each) for each in (label, reference or self.reference))
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

    def lead_shown(self, label: str) -> str:
        """Return in words what that lead shows, in front of what it is held against."""
        shows = verdict(self.over_front(label), "more accurate than", "less accurate than", "not shown to differ from")
        return shows.removesuffix(" (negative)")

    def cut_text(self, label: str) -> str:
        return shown(self.cut(label), lambda cut: f"{cut:.1f}")

    def compared(self, label: str, reference: str = "") -> tuple[str, ...]:
        """Return the cells below `COMPARED`."""
        saved = shown(time_saved(self.gain(label, reference)), percent)
        time, accuracy = self.time_text(label), self.accuracy_text(label)
        return time, self.gain_text(label, reference), saved, accuracy, self.change_text(label, reference)

    def count(self, labels: Sequence[str]) -> str:
        """Return n as a caption has it: the seeds of these labels, from the fewest to the most."""
        counts = sorted({len(self.of(label)) for label in labels})
        return f"n = {' to '.join(str(n) for n in (counts[:1] + counts[1:][-1:]))} seeds"

    def spread(self, labels: Sequence[str]) -> str:
        """Return what a caption says of points with whiskers."""
        return f"mean and 95 % interval, {self.count(labels)}"

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
