"""How much time does freezing k groups save, and what does it cost in accuracy? (Figures 3 to 5 of the study.)

    python -m analysis.static_sweep --preset reduced --data-dir DIR --weights FILE

Two splits: the study's seven groups, and a group per residual block. A cut of the finer split that falls on a boundary
of the coarser one is the same computation, and is run once. How much a prefix costs depends on the image size: the
study's groups are timed at 224 pixels too, for a few steps.
"""

from __future__ import annotations

import sys

from analysis.parts import larger_images
from analysis.sweeps.experiment import main
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.questions import Answer, Drawing, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, is_below, shown, signed_points, time_saved
from analysis.writing import paper
from analysis.writing.cells import COMPARED, SAME_TIME, compared, same_time
from analysis.writing.charts import IN_TIME, PAPER_COLOUR, Line, accuracy_time_chart, line_chart
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.figures import plot_phases
from hvfreeze.report.style import COLOURS
from hvfreeze.report.tables import Table, phase_table
from hvfreeze.report.units import factor, percent

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
    return planned if preset.is_smoke else [*planned, *larger_images.runs(preset)]


def coarse(cut: int) -> str:
    """Return the label of a cut of the study's split."""
    return f"groups{cut}"


def fine(cut: int) -> str:
    """Return the label of a cut of the residual split."""
    return coarse(SAME[cut]) if cut in SAME else f"residual{cut}"


def answers(results: Results) -> list[Answer]:
    """Return the answers to questions 1 and 2."""
    label, full = coarse(HEADLINE), coarse(0)
    gain, change = results.gain(label, full), results.change(label, full)
    if gain.n == 0:
        return []
    saved, ahead = time_saved(gain), results.over_front(label)
    larger = "".join(
        f"; a step alone at {size} pixels is {shown(larger_images.gain(results, size, HEADLINE), factor)} as fast here"
        for size in larger_images.sizes(results)
    )
    first = (
        f"With {HEADLINE} of 7 groups frozen, training is {shown(gain, factor, count=True)} as fast, "
        f"{shown(saved, percent)} less time; the study has {factor(paper.SPEED_UP[HEADLINE])} "
        f"({paper.STATIC_SOURCE}){larger}."
    )
    theirs = paper.STATIC_ACCURACY[HEADLINE] - paper.STATIC_ACCURACY[0]
    second = (
        f"Freezing {HEADLINE} of 7 groups changes test accuracy by {shown(change, signed_points, count=True)}, in "
        f"the study by {signed_points(theirs)}; against full fine-tuning trained for as many seconds: "
        f"{shown(ahead, signed_points)}."
    )
    return [
        Answer(
            question="1. How much training time does a frozen prefix save?",
            text=first,
            n=gain.n,
            negative=is_below(gain, 1),
        ),
        Answer(
            question="2. What does a frozen prefix cost in accuracy?",
            text=second,
            n=change.n,
            negative=is_below(ahead, 0),
        ),
    ]


def tables(results: Results) -> list[Table]:
    """Return time and accuracy by cut for both splits, and the phases."""
    found = []
    for title, cuts, label in (("The study's groups", GROUPS, coarse), ("Residual blocks", range(10), fine)):
        known = [cut for cut in cuts if results.of(label(cut))]
        theirs = label is coarse
        rows = tuple(cut_row(results, label(cut), cut, theirs=theirs) for cut in known)
        columns = ("Frozen", *COMPARED, SAME_TIME)
        more = ("Study: speed-up", "Study: accuracy") if theirs else ()
        found.append(Table(title=title, columns=(*columns, *more), rows=rows))
    if larger_images.sizes(results):
        found.append(larger_images.table(results))
    phases = phase_table(group_by_seed(results.runs_of(*[coarse(cut) for cut in GROUPS])))
    return [*found, Table(title="Seconds by phase", columns=phases.columns, rows=phases.rows)]


def cut_row(results: Results, label: str, cut: int, *, theirs: bool) -> tuple[str, ...]:
    """Return a cut's row."""
    paper_cells = (factor(paper.SPEED_UP[cut]), percent(paper.STATIC_ACCURACY[cut])) if theirs else ()
    return (
        str(cut),
        *compared(results, label, coarse(0)),
        same_time(results, label),
        *paper_cells,
    )


def drawings(results: Results) -> list[Drawing]:
    """Return speed-up and accuracy by cut, phases, and accuracy against time."""
    if not results.of(coarse(0)):
        return []
    known = [cut for cut in GROUPS if results.of(coarse(cut))]
    theirs = {cut: Interval(value, value, value, 1) for cut, value in enumerate(paper.SPEED_UP)}
    speed = line_chart(
        [
            Line(label="here", points={cut: results.gain(coarse(cut), coarse(0)) for cut in known}),
            *larger_images.lines(results),
            Line(label="study (Figure 3)", points=theirs, colour=PAPER_COLOUR, dash="--"),
        ],
        x="frozen groups (of 7)",
        y="speed-up over training all layers",
    )
    reported = {cut: Interval(value, value, value, 1) for cut, value in enumerate(paper.STATIC_ACCURACY)}
    accuracy = line_chart(
        [
            Line(label="here", points={cut: results.mean(coarse(cut), "test_accuracy") for cut in known}),
            Line(label="study (Figures 4, 5), other setting", points=reported, colour=PAPER_COLOUR, dash="--"),
        ],
        x="frozen groups (of 7)",
        y="test accuracy (%)",
        scale=100,
    )
    finer = {cut: results.mean(fine(cut), "test_accuracy") for cut in range(10) if results.of(fine(cut))}
    residual = line_chart(
        [Line(label="here", points=finer, colour=COLOURS[2])],
        x="frozen residual blocks, the stem counted as the first",
        y="test accuracy (%)",
        scale=100,
        from_zero=False,
    )
    spread = f"mean and 95 % interval, {results.count([coarse(cut) for cut in known])}"
    phases = plot_phases(results.runs_of(*[coarse(cut) for cut in known]))
    in_time = accuracy_time_chart(
        results, [*map(coarse, known), *(fine(cut) for cut in INNER if results.of(fine(cut)))]
    )
    return [
        Drawing(
            name="speed-up",
            caption=f"Speed-up by the number of frozen groups; {spread}; larger images: one run each, over its epochs.",
            figure=speed,
        ),
        Drawing(name="accuracy", caption=f"Test accuracy by the number of frozen groups; {spread}.", figure=accuracy),
        Drawing(name="residual", caption=f"The same, cut at residual blocks; {spread}.", figure=residual),
        Drawing(
            name="phases",
            caption=f"Training time of rank 0 by phase; mean of {results.count([coarse(0)])}.",
            figure=phases,
        ),
        Drawing(name="accuracy-time", caption=f"{IN_TIME}; {spread}.", figure=in_time),
    ]


EXPERIMENT = Experiment(
    name="static_sweep",
    title="Time and accuracy against the number of frozen groups",
    runs=runs,
    answers=answers,
    tables=tables,
    drawings=drawings,
    reference=coarse(0),
    limits=(
        "The learning rate is the one that is best without freezing.",
        "The study trained for 50 epochs on 4 nodes, without pretraining; its accuracies show a trend only.",
        "Ranks share one machine and its memory bandwidth.",
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
