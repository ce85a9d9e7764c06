"""Can the frozen prefix be chosen online? All criteria against full fine-tuning. (Table 1 and Figure 6 of the study.)

    python -m analysis.adaptive --preset reduced --data-dir DIR --weights FILE

`study` is the study's own rule as its text states it: the gradient-norm test on averaged gradients, without a bound.
"""

from __future__ import annotations

import sys

from analysis.sweeps import paper
from analysis.sweeps.charts import METHOD_COLOURS, Line, in_time, line_chart, method_of
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import COMPARED, FINAL_CUT, SAME_TIME, Results
from analysis.sweeps.statistics import Interval, is_below, mean_interval, shown, signed_points, time_saved
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import NARROW, plot_cuts
from hvfreeze.report.tables import Table, factor, percent, seconds

FULL = "full"
STUDY = "study"
OURS = "gradient-norm"
WITHOUT_SIGNAL = ("linear", "geometric")
"""Criteria that know nothing but the time."""
CRITERIA: dict[str, dict[str, Value]] = {
    FULL: {},
    STUDY: {"freeze": "gradient-norm", "signal": "averaged", "eta_max": float("inf")},
    OURS: {"freeze": "gradient-norm"},
    "percentile": {"freeze": "percentile", "eta_max": 1.0},
    "linear": {"freeze": "linear"},
    "geometric": {"freeze": "geometric"},
}


def runs(preset: Preset) -> list[PlannedRun]:
    """Return a run for every criterion; a seed's runs follow each other in time."""
    chosen = {label: CRITERIA[label] for label in ((FULL, "linear") if preset.is_smoke else CRITERIA)}
    return preset.runs(chosen, {"blocks": preset.fine})


def answers(results: Results) -> list[Answer]:
    """Return the answer to question 3: our default criterion, which was chosen beforehand, then all others."""
    if not results.of(OURS) or not results.of(FULL):
        return []
    gain, ahead = results.gain(OURS), results.over_front(OURS)
    others = tuple(
        f"{label}: {results.gain_text(label)} for {results.change_text(label)}."
        for label in results.labels
        if label not in (FULL, OURS)
    )
    text = (
        f"By {OURS} with its default bound training is {results.gain_text(OURS, count=True)} as fast, and in "
        f"accuracy {results.lead_shown(OURS)} full fine-tuning trained for as many seconds."
    )
    details = (
        (
            f"That is {shown(time_saved(gain), percent)} less time, for {results.change_text(OURS)} of accuracy; "
            f"against full fine-tuning trained for as many seconds: {results.lead_text(OURS)}."
        ),
        *others,
        *without_signal(results),
        (
            f"The study has {factor(paper.ADAPTIVE_SPEED_UP)} for "
            f"{signed_points(paper.ADAPTIVE.accuracy - paper.FULL.accuracy)} ({paper.TABLE_1_SOURCE})."
        ),
    )
    question = "3. Can the prefix be chosen online?"
    negative = is_below(gain, 1) or is_below(ahead, 0)
    return [Answer(question, text, gain.n, negative=negative, details=details)]


def without_signal(results: Results) -> list[str]:
    """Return where the schedules lie that look at no gradient: what a vote must be better than to be worth it."""
    leads = [f"{label} {results.lead_text(label)}" for label in WITHOUT_SIGNAL if results.over_front(label).n]
    return [f"Schedules that look at no gradient, against the same: {', '.join(leads)}."] if leads else []


def tables(results: Results) -> list[Table]:
    """Return all criteria, and Table 1 beside the study's."""
    if not results.of(FULL):
        return []
    rows = tuple(
        (label, *results.compared(label), results.lead_text(label), results.cut_text(label)) for label in results.labels
    )
    criteria = Table(title="Criteria", columns=("Criterion", *COMPARED, SAME_TIME, FINAL_CUT), rows=rows)
    return [criteria, table_1(results)]


def table_1(results: Results) -> Table:
    """Return the study's Table 1 and the same quantities of our run of the study's rule."""
    adaptive = STUDY if results.of(STUDY) else next(label for label in results.labels if label != FULL)
    labels, rows = (adaptive, FULL), []
    for name, column in (("forward", "forward"), ("backward", "backward"), ("optimizer step", "optimizer")):
        cells = [
            mean_interval([row[f"seconds_{column}"] / row["epochs"] for row in results.of(label)]) for label in labels
        ]
        theirs = [getattr(paper.ADAPTIVE, column), getattr(paper.FULL, column)]
        ratio = results.gain(adaptive, FULL, f"seconds_{column}")
        written = (*(shown(cell, seconds) for cell in cells), shown(ratio, factor))
        rows.append((f"{name}, an epoch", *written, *map(seconds, theirs), factor(theirs[1] / theirs[0])))
    totals = (paper.ADAPTIVE.total, paper.FULL.total)
    ours = (*map(results.time_text, labels), results.gain_text(adaptive, FULL))
    rows.append(("total", *ours, *map(seconds, totals), factor(totals[1] / totals[0])))
    accuracies = (paper.ADAPTIVE.accuracy, paper.FULL.accuracy)
    ours = (*map(results.accuracy_text, labels), results.change_text(adaptive, FULL))
    rows.append(("test accuracy", *ours, *map(percent, accuracies), signed_points(accuracies[0] - accuracies[1])))
    columns = ("", adaptive, "full", "ratio", "study: adaptive", "study: full", "study: ratio")
    return Table(title=f"{paper.TABLE_1_SOURCE} of the study", columns=columns, rows=tuple(rows))


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy by epoch with the freezes (Figure 6), the cuts, and accuracy against time."""
    if not results.of(FULL):
        return []
    methods = {label: method_of(results.of(label)[0]) for label in results.labels}
    lines = [
        Line(label=method, points=by_epoch(results, label), colour=METHOD_COLOURS[method])
        for label, method in methods.items()
    ]
    epochs = line_chart(lines, x="epoch", y="test accuracy (%)", scale=100, from_zero=False)
    freezes = ", ".join(f"block {block} at epoch {epoch} of {paper.EPOCHS}" for epoch, block in paper.FIGURE_6_FREEZES)
    first = [results.runs_of(label)[0] for label in results.labels if label != FULL]
    caption = f"Test accuracy after each epoch; {results.spread(results.labels)}. The study's adaptive run froze"
    proposals = "The cut and the ranks' proposals; n = 1, the first seed."
    return [
        Drawing("accuracy-epochs", f"{caption} {freezes} (Figure 6).", epochs),
        Drawing("cuts", proposals, plot_cuts(first, width=NARROW)),
        in_time(results, results.labels),
    ]


def by_epoch(results: Results, label: str) -> dict[int, Interval]:
    """Return the mean test accuracy after each epoch."""
    found = [[line["test_accuracy"] for line in run.metrics] for run in results.runs_of(label)]
    return {epoch: mean_interval(values) for epoch, values in enumerate(zip(*found), 1) if None not in values}


LIMITS = (
    "Criteria have their default parameters; none was tuned on the test set.",
    "Checkpoints, no part of training time, took 3.3 s where gradients were observed and 0.7 s elsewhere.",
    "The study's rule is the one of its text; its released code compares the last mini-batches only.",
    "The study's Table 1 is one run of 50 epochs on 4 nodes, without a spread.",
)
EXPERIMENT = Experiment(
    "adaptive", "Choosing the frozen prefix online", runs, answers, tables, drawings, LIMITS, reference=FULL, shown=2
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
