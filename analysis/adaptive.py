"""Can the frozen prefix be chosen online? All criteria against full fine-tuning. (Table 1 and Figure 6 of the study.)

    python -m analysis.adaptive --preset reduced --data-dir DIR --weights FILE

`study` is the study's own rule as its text states it: the gradient-norm test on averaged gradients, without a bound.
"""

from __future__ import annotations

import sys

from analysis.sweeps.experiment import main
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.questions import Answer, Drawing, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, mean_interval, shown, signed_points, time_saved
from analysis.writing import paper
from analysis.writing.cells import COMPARED, FINAL_CUT, SAME_TIME, compared, final_cut, same_time
from analysis.writing.charts import IN_TIME, Line, accuracy_time_chart, line_chart
from hvfreeze.report.figures import plot_cuts
from hvfreeze.report.style import BASELINE, COLOURS
from hvfreeze.report.tables import Table
from hvfreeze.report.units import factor, percent, seconds

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
    chosen = [FULL, "linear"] if preset.is_smoke else list(CRITERIA)
    return [
        preset.run(label, seed, {"blocks": preset.fine, **CRITERIA[label]}) for seed in preset.seeds for label in chosen
    ]


def frozen_labels(results: Results) -> list[str]:
    """Return the criteria that have rows."""
    return [label for label in results.labels if label != FULL]


def answers(results: Results) -> list[Answer]:
    """Return the answer to question 3: our default criterion, which was chosen beforehand, then all others."""
    if not results.of(OURS) or not results.of(FULL):
        return []
    gain, change, ahead = results.gain(OURS, FULL), results.change(OURS, FULL), results.over_front(OURS)
    others = "; ".join(
        f"{label} {shown(results.gain(label, FULL), factor)} for {shown(results.change(label, FULL), signed_points)}"
        for label in frozen_labels(results)
        if label != OURS
    )
    text = (
        f"{OURS} with its default bound has a speed-up of {shown(gain, factor, count=True)}, "
        f"{shown(time_saved(gain), percent)} less time, for {shown(change, signed_points)} of accuracy; against "
        f"full fine-tuning trained for as many seconds: {shown(ahead, signed_points)}. Others: {others}. "
        f"{without_signal(results)}The "
        f"study has {factor(paper.ADAPTIVE_SPEED_UP)} for "
        f"{signed_points(paper.ADAPTIVE.accuracy - paper.FULL.accuracy)} ({paper.TABLE_1_SOURCE})."
    )
    question = "3. Can the prefix be chosen online?"
    return [Answer(question=question, text=text, n=gain.n, negative=is_below(gain, 1) or is_below(ahead, 0))]


def without_signal(results: Results) -> str:
    """Return where the schedules lie that look at no gradient: what a vote must be better than to be worth it."""
    known = [label for label in WITHOUT_SIGNAL if results.over_front(label).n]
    if not known:
        return ""
    leads = ", ".join(f"{label} {shown(results.over_front(label), signed_points)}" for label in known)
    return f"Schedules that look at no gradient, against the same: {leads}. "


def tables(results: Results) -> list[Table]:
    """Return all criteria, and Table 1 beside the study's."""
    if not results.of(FULL):
        return []
    columns = ("Criterion", *COMPARED, SAME_TIME, FINAL_CUT)
    rows = tuple(
        (label, *compared(results, label, FULL), same_time(results, label), final_cut(results, label))
        for label in results.labels
    )
    return [Table(title="Criteria", columns=columns, rows=rows), table_1(results)]


def table_1(results: Results) -> Table:
    """Return the study's Table 1 and the same quantities of our run of the study's rule."""
    adaptive = STUDY if results.of(STUDY) else frozen_labels(results)[0]
    ours, rows = results, []
    for name, column in (("forward", "forward"), ("backward", "backward"), ("optimizer step", "optimizer")):
        cells = [per_epoch(ours, label, f"seconds_{column}") for label in (adaptive, FULL)]
        theirs = [getattr(paper.ADAPTIVE, column), getattr(paper.FULL, column)]
        ratio = ours.gain(adaptive, FULL, f"seconds_{column}")
        written = (*(shown(cell, seconds) for cell in cells), shown(ratio, factor))
        rows.append((f"{name}, an epoch", *written, *map(seconds, theirs), factor(theirs[1] / theirs[0])))
    total = [shown(ours.mean(label, "train_seconds"), seconds) for label in (adaptive, FULL)]
    studied = (
        seconds(paper.ADAPTIVE.total),
        seconds(paper.FULL.total),
        factor(paper.FULL.total / paper.ADAPTIVE.total),
    )
    rows.append(("total", *total, shown(ours.gain(adaptive, FULL), factor), *studied))
    accuracy = [shown(ours.mean(label, "test_accuracy"), percent) for label in (adaptive, FULL)]
    change = shown(ours.change(adaptive, FULL), signed_points)
    theirs_change = signed_points(paper.ADAPTIVE.accuracy - paper.FULL.accuracy)
    reported = (percent(paper.ADAPTIVE.accuracy), percent(paper.FULL.accuracy), theirs_change)
    rows.append(("test accuracy", *accuracy, change, *reported))
    columns = ("", adaptive, "full", "ratio", "study: adaptive", "study: full", "study: ratio")
    return Table(title=f"{paper.TABLE_1_SOURCE} of the study", columns=columns, rows=tuple(rows))


def per_epoch(results: Results, label: str, column: str) -> Interval:
    """Return a column's mean over an epoch."""
    return mean_interval([row[column] / row["epochs"] for row in results.of(label)])


def drawings(results: Results) -> list[Drawing]:
    """Return accuracy by epoch with the freezes (Figure 6), the cuts, and accuracy against time."""
    if not results.of(FULL):
        return []
    lines = []
    for place, label in enumerate(results.labels):
        colour = BASELINE if label == FULL else COLOURS[(place - 1) % len(COLOURS)]
        lines.append(Line(label=label, points=by_epoch(results, label), colour=colour))
    epochs = line_chart(lines, x="epoch", y="test accuracy (%)", scale=100, from_zero=False)
    freezes = ", ".join(f"block {block} at epoch {epoch} of {paper.EPOCHS}" for epoch, block in paper.FIGURE_6_FREEZES)
    first = [run for label in frozen_labels(results) for run in results.runs_of(label)[:1]]
    spread = f"mean and 95 % interval, {results.count(results.labels)}"
    return [
        Drawing(
            name="accuracy-epochs",
            caption=f"Test accuracy after each epoch; {spread}. The study's adaptive run froze {freezes} (Figure 6).",
            figure=epochs,
        ),
        Drawing(
            name="cuts", caption="The cut and the ranks' proposals; n = 1, the first seed.", figure=plot_cuts(first)
        ),
        Drawing(
            name="accuracy-time",
            caption=f"{IN_TIME}; {spread}.",
            figure=accuracy_time_chart(results, results.labels),
        ),
    ]


def by_epoch(results: Results, label: str) -> dict[int, Interval]:
    """Return the mean test accuracy after each epoch."""
    found = [[line["test_accuracy"] for line in run.metrics] for run in results.runs_of(label)]
    return {epoch: mean_interval(values) for epoch, values in enumerate(zip(*found), 1) if None not in values}


EXPERIMENT = Experiment(
    name="adaptive",
    title="Choosing the frozen prefix online",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    reference=FULL,
    shown=2,
    limits=(
        "Criteria have their default parameters; none was tuned on the test set.",
        "Checkpoints, no part of training time, took 3.3 s where gradients were observed and 0.7 s elsewhere.",
        "The study's rule is the one of its text; its released code compares the last mini-batches only.",
        "The study's Table 1 is one run of 50 epochs on 4 nodes, without a spread.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
