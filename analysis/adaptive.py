"""Can the frozen prefix be chosen online? All criteria against full fine-tuning. (Table 1 and Figure 6 of the study.)

    python -m analysis.adaptive --preset reduced --data-dir DIR --weights FILE

`study` is the study's own rule as its text states it: the gradient-norm test on averaged gradients, without a bound.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from matplotlib.figure import Figure

from analysis.sweeps import paper
from analysis.sweeps.charts import METHOD_COLOURS, Line, accuracy_time_chart, line_chart, method_of
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, shown, signed_points
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import NARROW, plot_cuts
from hvfreeze.report.tables import Table, factor, percent, seconds

FULL = "full"
STUDY = "study"
CRITERIA: dict[str, dict[str, Value]] = {
    FULL: {},
    STUDY: {"freeze": "gradient-norm", "signal": "averaged", "eta_max": float("inf")},
    "gradient-norm": {"freeze": "gradient-norm"},
    "percentile": {"freeze": "percentile", "eta_max": 1.0},
    "linear": {"freeze": "linear"},
    "geometric": {"freeze": "geometric"},
}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return a run for every criterion; a seed's runs follow each other in time."""
    chosen = {label: CRITERIA[label] for label in ((FULL, "linear") if preset.is_smoke else CRITERIA)}
    return preset.runs(chosen, {"blocks": preset.fine})


def table_1(results: Results) -> str:
    """Return the study's Table 1 and the same quantities of our run of the study's rule."""
    labels, rows = (STUDY, FULL), []
    for name, column in (("forward", "forward"), ("backward", "backward"), ("optimizer step", "optimizer")):
        cells = [
            mean_interval([row[f"seconds_{column}"] / row["epochs"] for row in results.of(label)]) for label in labels
        ]
        theirs = [getattr(paper.ADAPTIVE, column), getattr(paper.FULL, column)]
        ratio = results.ratio(STUDY, FULL, f"seconds_{column}")
        written = (*(shown(cell, seconds) for cell in cells), shown(ratio, factor))
        rows.append((f"{name}, an epoch", *written, *map(seconds, theirs), factor(theirs[1] / theirs[0])))
    totals = (paper.ADAPTIVE.total, paper.FULL.total)
    ours = (*map(results.time, labels), results.gain(STUDY))
    rows.append(("total", *ours, *map(seconds, totals), factor(totals[1] / totals[0])))
    accuracies = (paper.ADAPTIVE.accuracy, paper.FULL.accuracy)
    ours = (*map(results.accuracy, labels), results.change(STUDY))
    rows.append(("test accuracy", *ours, *map(percent, accuracies), signed_points(accuracies[0] - accuracies[1])))
    columns = ("", STUDY, FULL, "ratio", "study: adaptive", "study: full", "study: ratio")
    return Table(columns=columns, rows=tuple(rows)).to_text()


def words(results: Results) -> Words:
    return {"table_1": table_1(results), "paper": paper}


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return accuracy by epoch with the freezes (Figure 6), the cuts, and accuracy against time."""
    methods = {label: method_of(results.of(label)[0]) for label in CRITERIA}
    lines = [
        Line(label=method, points=by_epoch(results, label), colour=METHOD_COLOURS[method])
        for label, method in methods.items()
    ]
    first = [results.runs_of(label)[0] for label in CRITERIA if label != FULL]
    return {
        "accuracy-epochs": line_chart(lines, x="epoch", y="test accuracy (%)", scale=100, from_zero=False),
        "cuts": plot_cuts(first, width=NARROW),
        "accuracy-time": accuracy_time_chart(results, results.labels),
    }


def by_epoch(results: Results, label: str) -> dict[int, Interval]:
    """Return the mean test accuracy after each epoch."""
    found = [[line["test_accuracy"] for line in run.metrics] for run in results.runs_of(label)]
    return {epoch: mean_interval(values) for epoch, values in enumerate(zip(*found), 1) if None not in values}


EXPERIMENT = Experiment(name="adaptive", runs=runs, words=words, drawings=drawings, reference=FULL)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
