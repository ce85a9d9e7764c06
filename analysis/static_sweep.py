"""How much time does freezing k groups save, and what does it cost in accuracy? (Figures 3 to 5 of the study.)

    python -m analysis.static_sweep --preset reduced --data-dir DIR --weights FILE

Two splits: the study's seven groups, and a group per residual block. A cut of the finer split that falls on a boundary
of the coarser one is the same computation, and is run once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from analysis.sweeps import paper
from analysis.sweeps.charts import PAPER_COLOUR, Line, accuracy_time_chart, line_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.statistics import Interval
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import factor, percent

GROUPS = range(7)
INNER = (2, 4, 6, 8)
"""Cuts of the residual split inside a group of the study's."""


def runs(preset: Preset) -> list[PlannedRun]:
    """Return a run for every cut of both splits; a seed's runs follow each other in time."""
    planned = []
    for seed in preset.seeds:
        for cut in preset.few(GROUPS[:6]) if preset.is_smoke else GROUPS:
            planned.append(preset.run(f"groups{cut}", seed, {"blocks": preset.coarse, "freeze": "static", "cut": cut}))
        for cut in preset.few(INNER):
            planned.append(preset.run(f"residual{cut}", seed, {"blocks": preset.fine, "freeze": "static", "cut": cut}))
    return planned


def words(results: Results) -> Words:
    theirs = (
        Metric("Study: speed-up", lambda r, label, _: factor(paper.SPEED_UP[int(label[-1])])),
        Metric("Study: accuracy", lambda r, label, _: percent(paper.STATIC_ACCURACY[int(label[-1])])),
    )
    return {"groups": {f"groups{cut}": str(cut) for cut in GROUPS}, "theirs": theirs, "paper": paper}


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return speed-up and accuracy by cut, and accuracy against time."""
    frozen = "frozen groups (of 7)"
    here = Line(label="here", colour=COLOURS[0], points={cut: results.ratio(f"groups{cut}") for cut in GROUPS})
    accurate = {cut: results.mean(f"groups{cut}", "test_accuracy") for cut in GROUPS}
    both = [
        Line(label="here", colour=COLOURS[0], points=accurate),
        of_study("study (Figures 4, 5), other setting", paper.STATIC_ACCURACY),
    ]
    speed = [here, of_study("study (Figure 3)", paper.SPEED_UP)]
    labels = [*(f"groups{cut}" for cut in GROUPS), *(f"residual{cut}" for cut in INNER)]
    return {
        "speed-up": line_chart(speed, x=frozen, y="speed-up over training all layers"),
        "accuracy": line_chart(both, x=frozen, y="test accuracy (%)", scale=100),
        "accuracy-time": accuracy_time_chart(results, labels),
    }


def of_study(label: str, values: Sequence[float]) -> Line:
    """Return the study's numbers by cut as a line without a spread."""
    points = {cut: Interval(value, value, value, 1) for cut, value in enumerate(values)}
    return Line(label=label, points=points, colour=PAPER_COLOUR, dash="--")


EXPERIMENT = Experiment(name="static_sweep", runs=runs, words=words, drawings=drawings, reference="groups0")

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
