"""How much time does freezing k groups save, and what does it cost in accuracy? (Figures 3 to 5 of the study.)

    python -m analysis.static_sweep --preset reduced --data-dir DIR --weights FILE

Two splits: the study's seven groups, and a group per residual block. A cut of the finer split that falls on a boundary
of the coarser one is the same computation, and is run once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from analysis.sweeps import paper
from analysis.sweeps.charts import PAPER_COLOUR, Line, in_time, line_chart
from analysis.sweeps.experiment import Answer, Drawing, Experiment
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import COMPARED, SAME_TIME, Results
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points, time_saved
from analysis.sweeps.sweep import main
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import Table, factor, percent, phase_table

GROUPS = range(7)
INNER = (2, 4, 6, 8)
"""Cuts of the residual split inside a group of the study's."""
SAME = {0: 0, 1: 2, 3: 3, 5: 4, 7: 5, 9: 6}
"""Cut of the residual split -> cut of the study's split with the same frozen layers."""
HEADLINE = 4
"""The number of frozen groups that the study recommends."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return a run for every cut of both splits; a seed's runs follow each other in time."""
    planned = []
    for seed in preset.seeds:
        for cut in preset.few(GROUPS[:6]) if preset.is_smoke else GROUPS:
            planned.append(preset.run(coarse(cut), seed, {"blocks": preset.coarse, "freeze": "static", "cut": cut}))
        for cut in preset.few(INNER):
            planned.append(preset.run(fine(cut), seed, {"blocks": preset.fine, "freeze": "static", "cut": cut}))
    return planned


def coarse(cut: int) -> str:
    """Return the label of a cut of the study's split."""
    return f"groups{cut}"


def fine(cut: int) -> str:
    """Return the label of a cut of the residual split."""
    return coarse(SAME[cut]) if cut in SAME else f"residual{cut}"


def answers(results: Results) -> list[Answer]:
    """Return the answers to questions 1 and 2."""
    label = coarse(HEADLINE)
    gain, change = results.gain(label), results.change(label)
    if gain.n == 0:
        return []
    first = f"With {HEADLINE} of 7 groups frozen, training is {results.gain_text(label, count=True)} as fast."
    saved = (
        f"That is {shown(time_saved(gain), percent)} less time.",
        f"The study has {factor(paper.SPEED_UP[HEADLINE])} ({paper.STATIC_SOURCE}).",
    )
    theirs = paper.STATIC_ACCURACY[HEADLINE] - paper.STATIC_ACCURACY[0]
    second = f"Freezing {HEADLINE} of 7 groups changes test accuracy by {results.change_text(label, count=True)}."
    costs = (
        f"In the study by {signed_points(theirs)}.",
        f"Against full fine-tuning trained for as many seconds: {results.lead_text(label)}.",
    )
    time, cost = (
        "1. How much training time does a frozen prefix save?",
        "2. What does a frozen prefix cost in accuracy?",
    )
    behind = is_below(results.over_front(label), 0)
    return [
        Answer(time, first, gain.n, negative=is_below(gain, 1), details=saved),
        Answer(cost, second, change.n, negative=behind, details=costs),
    ]


def tables(results: Results) -> list[Table]:
    """Return time and accuracy by cut for both splits, and the phases."""
    found = []
    for title, cuts, label in (("The study's groups", GROUPS, coarse), ("Residual blocks", range(10), fine)):
        rows = []
        for cut in (cut for cut in cuts if results.of(label(cut))):
            theirs = (factor(paper.SPEED_UP[cut]), percent(paper.STATIC_ACCURACY[cut])) if label is coarse else ()
            rows.append((str(cut), *results.compared(label(cut)), results.lead_text(label(cut)), *theirs))
        more = ("Study: speed-up", "Study: accuracy") if label is coarse else ()
        found.append(Table(title=title, columns=("Frozen", *COMPARED, SAME_TIME, *more), rows=tuple(rows)))
    phases = phase_table(group_by_seed(results.runs_of(*map(coarse, GROUPS))))
    return [*found, replace(phases, title="Seconds by phase")]


def drawings(results: Results) -> list[Drawing]:
    """Return speed-up and accuracy by cut, and accuracy against time."""
    if not results.of(coarse(0)):
        return []
    known = [cut for cut in GROUPS if results.of(coarse(cut))]
    labels = [coarse(cut) for cut in known]
    frozen, spread = "frozen groups (of 7)", results.spread(labels)
    here = Line(label="here", colour=COLOURS[0], points={cut: results.gain(coarse(cut)) for cut in known})
    theirs = of_study("study (Figure 3)", paper.SPEED_UP)
    lines = [here, theirs]
    speed = line_chart(lines, x=frozen, y="speed-up over training all layers")
    here = Line(
        label="here", colour=COLOURS[0], points={cut: results.mean(coarse(cut), "test_accuracy") for cut in known}
    )
    theirs = of_study("study (Figures 4, 5), other setting", paper.STATIC_ACCURACY)
    accuracy = line_chart([here, theirs], x=frozen, y="test accuracy (%)", scale=100)
    inner = [fine(cut) for cut in INNER if results.of(fine(cut))]
    fastest = f"Speed-up by the number of frozen groups; {spread}."
    return [
        Drawing("speed-up", fastest, speed),
        Drawing("accuracy", f"Test accuracy by the number of frozen groups; {spread}.", accuracy),
        in_time(results, [*labels, *inner], counted=labels),
    ]


def of_study(label: str, values: Sequence[float]) -> Line:
    """Return the study's numbers by cut as a line without a spread."""
    points = {cut: Interval(value, value, value, 1) for cut, value in enumerate(values)}
    return Line(label=label, points=points, colour=PAPER_COLOUR, dash="--")


LIMITS = (
    "The learning rate is the one that is best without freezing.",
    "The study trained for 50 epochs on 4 nodes, without pretraining; its accuracies show a trend only.",
    "Ranks share one machine and its memory bandwidth.",
)
EXPERIMENT = Experiment(
    "static_sweep",
    "Time and accuracy against the number of frozen groups",
    runs,
    answers,
    tables,
    drawings,
    LIMITS,
    reference=coarse(0),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
