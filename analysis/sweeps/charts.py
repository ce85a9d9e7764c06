"""The kinds of figures that experiments share. Each takes numbers with their intervals, and says n in its caption."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.sweeps.kept import Row
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval
from hvfreeze.report.figures import BASELINE, COLOURS, STYLE

FIGURE_WIDTH = 4.8
"""Width of a figure in inches: on a phone with 390 pixels its letters are 10 pixels high."""
PAPER_COLOUR = "#999999"
FULL = "full fine-tuning"
METHOD_COLOURS = {
    FULL: BASELINE,
    "frozen from the start": COLOURS[0],
    "frozen and cached": COLOURS[1],
    "hvfreeze auto": COLOURS[2],
    "auto, --mirror off": "#88CC66",
    "linear head, fitted": "#661100",
    "head, cached": "#EE8866",
    "gradient-norm": COLOURS[3],
    "the study's own rule": "#882255",
    "percentile": "#AA4499",
    "percentile, cached": "#DDAACC",
    "linear": COLOURS[4],
    "geometric": COLOURS[5],
    "DDP": "#BBAA00",
    "DDP, frozen": "#777711",
    "labels smoothed": "#AAAAAA",
    "head, then full (LP-FT)": "#117733",
    "AutoFreeze": "#994455",
    "PipeTransformer": "#004488",
    "Composer's freezing": "#997700",
}
"""A method's colour in every figure."""
OTHERS = ("#5B7083", "#B07AA1", "#8CA252", "#9C755F", "#76B7B2", "#BAB0AC")
"""Colours of series that are no methods."""
MARKERS = "osD^vP*X"
LEGEND_COLUMNS = 2
LONGEST_NAME = 24
"""Letters of a bar's name in one line."""
LONGEST_TITLE = 26
"""Letters of a title in one line, which must not run into the next panel's."""
TICKS = (1.0, 2.0, 5.0)
MOST_BESIDE = 2
"""Panels, of which more stand in two rows."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart: its points, with intervals where there are any."""

    label: str
    points: Mapping[int, Interval]
    colour: str = OTHERS[0]
    dash: str = "-"
    marker: str | None = None
    """Label in the legend instead of the line's; empty for none."""


@dataclass(frozen=True)
class Way:
    """A line of a panel: seconds and accuracy of each budget, the shortest first."""

    label: str
    points: Sequence[tuple[Interval, Interval]]


def error_bars(values: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Return the distances from the means down and up, 0 where there is no interval."""

    def half(width: float) -> float:
        return scale * width if math.isfinite(width) and width > 0 else 0.0

    return [[half(value.mean - value.low) for value in values], [half(value.high - value.mean) for value in values]]


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
        figure = Figure(figsize=(FIGURE_WIDTH, 0.75 * FIGURE_WIDTH), layout="constrained")
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
        figure.legend(loc="outside upper left", ncols=LEGEND_COLUMNS)
        return figure


def bar_chart(bars: Mapping[str, Interval], *, x: str, scale: float = 1.0) -> Figure:
    """Return horizontal bars, one below the other."""
    names = [textwrap.wrap(name, LONGEST_NAME) for name in bars]
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(FIGURE_WIDTH, 0.9 + sum(0.16 + 0.16 * len(lines) for lines in names)), layout="constrained"
        )
        axes = figure.add_subplot()
        rows, values = list(range(len(bars))), list(bars.values())
        means, whiskers = [scale * value.mean for value in values], error_bars(values, scale)
        axes.barh(rows, means, 0.6, xerr=whiskers, color=OTHERS[0], ecolor="#222222", capsize=3)
        axes.set_yticks(rows, ["\n".join(lines) for lines in names])
        axes.set(xlabel=x, ylim=(len(bars) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")
        return figure


def accuracy_time_chart(results: Results, labels: Sequence[str]) -> Figure:
    """Return accuracy against training time: a point a label with its intervals, a colour and marker a method."""
    methods: dict[str, list[str]] = {FULL: []}
    for label in labels:
        methods.setdefault(method_of(results.of(label)[0]), []).append(label)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 0.85 * FIGURE_WIDTH), layout="constrained")
        axes = figure.add_subplot()
        draw_front(axes, results)
        for (method, own), marker in zip(methods.items(), MARKERS):
            times = [results.mean(label, "train_seconds") for label in own]
            accuracies = [results.mean(label, "test_accuracy") for label in own]
            axes.errorbar(
                [time.mean for time in times],
                [100 * accuracy.mean for accuracy in accuracies],
                xerr=error_bars(times),
                yerr=error_bars(accuracies, 100),
                fmt=marker,
                color=METHOD_COLOURS[method],
                capsize=2,
                label=method,
            )
        axes.set(xlabel="training time (s)", ylabel="test accuracy (%)", xlim=(0, None))
        figure.legend(loc="outside upper left", ncols=LEGEND_COLUMNS)
        return figure


def method_of(row: Row) -> str:
    """Return the method of a row's run, as `METHOD_COLOURS` has it."""
    freeze, cached = str(row["freeze"]), bool(row["cache_bytes"])
    if row["program"] == "analysis.ddp":
        return "DDP" if freeze == "none" else "DDP, frozen"
    if freeze == "gradient-norm" and row["signal"] == "averaged":
        return "the study's own rule"
    named = {"none": FULL, "static": "frozen and cached" if cached else "frozen from the start"}
    return named.get(freeze, f"{freeze}, cached" if cached else freeze)


def draw_front(axes: Axes, results: Results) -> None:
    """Draw full fine-tuning for fewer and for more epochs, its times at the pace of these runs."""
    paces = list(results.paces().values()) if results.reference else [1.0]
    if not paces or not results.front.budgets:
        return
    pace = sum(paces) / len(paces)
    times = [pace * budget.seconds for budget in results.front.budgets]
    axes.plot(times, [100 * budget.accuracy for budget in results.front.budgets], "-", color=BASELINE, marker=".")


def ways_chart(panels: Mapping[str, Sequence[Way]], *, reference: str, ours: Sequence[str]) -> Figure:
    """Return a panel for each title, at most two side by side, with one legend; seconds on a logarithmic axis.

    Args:
        panels: title -> its ways; a label looks alike in every panel.
        reference: the label of what all others are held against.
        ours: the labels that are to catch the eye.
    """
    labels = list(dict.fromkeys(way.label for ways in panels.values() for way in ways))
    looks = looks_of(labels, reference=reference, ours=ours)
    with matplotlib.rc_context(STYLE):
        rows = 1 if len(panels) <= MOST_BESIDE else 2
        figure = Figure(figsize=(FIGURE_WIDTH, (0.85 if rows == 1 else 1.1) * FIGURE_WIDTH), layout="constrained")
        places = figure.subplots(rows, -(-len(panels) // rows), squeeze=False).flat
        for (title, ways), axes in zip(panels.items(), places):
            for way in ways:
                accuracies = [accuracy for _, accuracy in way.points]
                axes.errorbar(
                    [seconds.mean for seconds, _ in way.points],
                    [100 * accuracy.mean for accuracy in accuracies],
                    yerr=error_bars(accuracies, 100),
                    elinewidth=0.7,
                    label=way.label,
                    **looks[way.label],
                )
            axes.set(title="\n".join(textwrap.wrap(title, LONGEST_TITLE)), xlabel="training time (s)")
            set_log_scale(axes)
        for axes in places:
            axes.remove()
        figure.axes[0].set_ylabel("test accuracy (%)")
        handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
        chosen = [label for label in labels if label in handles]
        figure.legend([handles[label] for label in chosen], chosen, loc="outside lower center", ncols=LEGEND_COLUMNS)
        return figure


def set_log_scale(axes: Axes) -> None:
    """Give the x axis a logarithmic scale, with numbers as they are written."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def looks_of(labels: Sequence[str], *, reference: str, ours: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return how each label's line looks: the reference dark, ours large, the others thin; a method has one colour."""
    looks: dict[str, dict[str, object]] = {}
    for label, marker in zip((label for label in labels if label not in (reference, *ours)), MARKERS):
        looks[label] = {"marker": marker, "markersize": 4, "linewidth": 0.9, "zorder": 2}
    looks[reference] = {"marker": ".", "markersize": 8, "linewidth": 2.2, "zorder": 3}
    for label, marker in zip(ours, "*DP"):
        looks[label] = {"marker": marker, "markersize": 13 if marker == "*" else 7, "linewidth": 1.5, "zorder": 4}
    return {label: {"color": METHOD_COLOURS[label], **look} for label, look in looks.items()}
