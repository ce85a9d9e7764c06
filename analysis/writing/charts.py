"""The kinds of figures that experiments share. Each takes numbers with their intervals, and says n in its caption."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval
from hvfreeze.report.style import BASELINE, COLOURS, STYLE, WIDE

PAPER_COLOUR = "#999999"
IN_TIME = "Accuracy against training time, other numbers of epochs at the pace of these runs"
MARKERS = "osD^vP*X"
MOST_INSIDE, LEGEND_COLUMNS = 4, 4
"""More lines than these have their legend above the chart, where it hides none of them."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart: its points, with intervals where there are any."""

    label: str
    points: Mapping[int, Interval]
    colour: str = COLOURS[0]
    dash: str = "-"
    marker: str | None = None
    """Instead of one of its own; empty for none."""


def finite(value: float) -> float:
    """Return a half width as an error bar takes it, 0 where there is no interval."""
    return value if math.isfinite(value) and value > 0 else 0.0


def error_bars(values: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Return the distances from the means down and up."""
    down = [scale * finite(value.mean - value.low) for value in values]
    return [down, [scale * finite(value.high - value.mean) for value in values]]


def line_chart(
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    scale: float = 1.0,
    log_x: bool = False,
    from_zero: bool = True,
) -> Figure:
    """Return lines with error bars over a number; `scale` multiplies every y."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 0.5 * WIDE), layout="constrained")
        axes = figure.add_subplot()
        for line, own in zip(lines, MARKERS * len(lines)):
            places = sorted(line.points)
            values = [line.points[place] for place in places]
            axes.errorbar(
                places,
                [scale * value.mean for value in values],
                yerr=error_bars(values, scale),
                color=line.colour,
                linestyle=line.dash,
                marker=own if line.marker is None else line.marker,
                markersize=4,
                capsize=3,
                label=line.label,
            )
        axes.set(xlabel=x, ylabel=y)
        if log_x:
            axes.set_xscale("log", base=2)
        ticks = sorted({place for line in lines for place in line.points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        if from_zero:
            axes.set_ylim(bottom=0)
        if len(lines) > MOST_INSIDE:
            figure.legend(loc="outside upper left", ncols=LEGEND_COLUMNS)
        else:
            axes.legend()
        return figure


def bar_chart(bars: Mapping[str, Interval], *, x: str, scale: float = 1.0, from_zero: bool = True) -> Figure:
    """Return horizontal bars (points with whiskers where `from_zero` is off), one below the other."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 0.9 + 0.3 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        rows, values = list(range(len(bars))), list(bars.values())
        means, whiskers = [scale * value.mean for value in values], error_bars(values, scale)
        if from_zero:
            axes.barh(rows, means, 0.6, xerr=whiskers, color=COLOURS[0], ecolor="#222222", capsize=3)
        else:
            axes.errorbar(means, rows, xerr=whiskers, fmt="o", color=COLOURS[0], capsize=3)
        axes.set_yticks(rows, list(bars))
        axes.set(xlabel=x, ylim=(len(bars) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")
        return figure


def accuracy_time_chart(results: Results, labels: Sequence[str]) -> Figure:
    """Return accuracy against training time, a point a label with its intervals, with the front of fewer epochs."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 0.6 * WIDE), layout="constrained")
        axes = figure.add_subplot()
        draw_front(axes, results)
        for place, label in enumerate(labels):
            time, accuracy = results.mean(label, "train_seconds"), results.mean(label, "test_accuracy")
            axes.errorbar(
                [time.mean],
                [100 * accuracy.mean],
                xerr=error_bars([time]),
                yerr=error_bars([accuracy], 100),
                fmt=MARKERS[place // len(COLOURS) % len(MARKERS)],
                color=COLOURS[place % len(COLOURS)],
                capsize=2,
                label=results.shown_as(label),
            )
        axes.set(xlabel="training time (s)", ylabel="test accuracy after the last epoch (%)", xlim=(0, None))
        figure.legend(loc="outside right upper")
        return figure


def draw_front(axes: Axes, results: Results) -> None:
    """Draw full fine-tuning for fewer and for more epochs, its times at the pace of these runs."""
    paces = list(results.paces().values()) if results.reference else [1.0]
    if not paces or not results.front.budgets:
        return
    pace = sum(paces) / len(paces)
    times = [pace * budget.seconds for budget in results.front.budgets]
    accuracies = [100 * budget.accuracy for budget in results.front.budgets]
    axes.plot(times, accuracies, "-", color=BASELINE, marker=".", label="all layers, other numbers of epochs")
