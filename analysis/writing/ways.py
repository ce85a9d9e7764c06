"""Accuracy against time of many ways, each at several budgets: a line a way, a panel a number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.sweeps.statistics import Interval
from analysis.writing.charts import error_bars
from hvfreeze.report.style import BASELINE, COLOURS, STYLE, WIDE

QUIET = ("#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#999999")
MARKERS = "o^vPX"
TICKS = (1.0, 2.0, 5.0)
COLUMNS = 4


@dataclass(frozen=True)
class Way:
    """A line of a panel: seconds and accuracy of each budget, the shortest first."""

    label: str
    points: Sequence[tuple[Interval, Interval]]


def ways_chart(panels: Mapping[str, Sequence[Way]], *, reference: str, ours: Sequence[str]) -> Figure:
    """Return a panel for each title, side by side, with one legend; seconds on a logarithmic axis.

    Args:
        panels: title -> its ways; a label looks alike in every panel.
        reference: the label of what all others are held against.
        ours: the labels that are to catch the eye.
    """
    labels = list(dict.fromkeys(way.label for ways in panels.values() for way in ways))
    looks = looks_of(labels, reference=reference, ours=ours)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 0.62 * WIDE), layout="constrained")
        for axes, (title, ways) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for way in ways:
                draw(axes, way, looks[way.label])
            axes.set(title=title, xlabel="training time (s)")
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=TICKS))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        figure.axes[0].set_ylabel("test accuracy (%)")
        handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
        chosen = [label for label in labels if label in handles]
        figure.legend([handles[label] for label in chosen], chosen, loc="outside lower center", ncols=COLUMNS)
        return figure


def looks_of(labels: Sequence[str], *, reference: str, ours: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return how each label's line looks: the reference dark, ours large and bright, the others thin."""
    looks: dict[str, dict[str, object]] = {}
    for number, label in enumerate(label for label in labels if label not in (reference, *ours)):
        colour, marker = QUIET[number % len(QUIET)], MARKERS[(number + number // len(QUIET)) % len(MARKERS)]
        looks[label] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 0.9, "zorder": 2}
    looks[reference] = {"color": BASELINE, "marker": ".", "markersize": 8, "linewidth": 2.2, "zorder": 3}
    for label, colour, marker in zip(ours, (COLOURS[1], COLOURS[0], COLOURS[2]), "*DP"):
        size = 13 if marker == "*" else 7
        looks[label] = {"color": colour, "marker": marker, "markersize": size, "linewidth": 1.5, "zorder": 4}
    return looks


def draw(axes: Axes, way: Way, look: dict[str, object]) -> None:
    """Draw a way's line with the intervals of its accuracies."""
    axes.errorbar(
        [seconds.mean for seconds, _ in way.points],
        [100 * accuracy.mean for _, accuracy in way.points],
        yerr=error_bars([accuracy for _, accuracy in way.points], 100),
        elinewidth=0.7,
        label=way.label,
        **look,  # type: ignore[arg-type]
    )
