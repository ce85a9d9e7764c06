"""Figures of runs, for any number of runs and any width, so that a page can show a narrow one on a phone."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvfreeze.report.comparison import Group, compare, group_by_seed
from hvfreeze.report.tables import factor, group_label, seconds, writing
from hvfreeze.runs.reading import TRAINING_PHASES, Run

WIDE, NARROW = 8.0, 3.7
"""Widths in inches: of a page, and of a phone in portrait mode."""

# Okabe and Ito's colours, which people with any colour vision tell apart; the baseline is dark grey.
BASELINE = "#444444"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "hvfreeze",
    "text.parse_math": False,  # a run's name may hold dollar signs
}


def save_figure(figure: Figure, base: Path) -> Path:
    """Write `base`.png (150 dpi) and `base`.svg, with equal bytes for equal figures; return the latter's path.

    Raises:
        RefusedError: they cannot be written.
    """
    svg = base.with_name(base.name + ".svg")
    with writing(base), matplotlib.rc_context(STYLE):
        figure.savefig(base.with_name(base.name + ".png"), dpi=150, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return svg


def label_lines(figure: Figure, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Label lines at their right ends (x, y, colour, label); with many lines or a small width, in a legend."""
    if not directly_labelled(len(ends), figure.get_figwidth()):
        add_legend(figure, "outside lower left", columns=2 if figure.get_figwidth() >= WIDE else 1)
        return
    axes = figure.axes[0]
    wrapped = [textwrap.fill(label, 26) for *_, label in ends]
    low, high = axes.get_ylim()
    places = [(y - low) / (high - low) for _, y, *_ in ends]
    heights = [(1 + text.count("\n")) * 0.19 / (0.8 * figure.get_figheight()) for text in wrapped]
    for (x, y, colour, _), text, place in zip(ends, wrapped, spread_out(places, heights)):
        axes.annotate(
            text,
            (x, y),
            xytext=(1.03, place),
            textcoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "linestyle": ":", "relpos": (0, 0.5)},
        )


def directly_labelled(num_lines: int, width: float) -> bool:
    """Return True if lines are labelled at their ends instead of in a legend."""
    return num_lines <= 6 and width >= WIDE


def clipped(text: str, length: int) -> str:
    """Return a text, shortened if it is too long."""
    return text if len(text) <= length else text[: length - 3] + "..."


def spread_out(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return positions in 0..1 near the desired ones, in the same order, without overlap of labels this high."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found, floor, ceiling = list(places), float("-inf"), 1.0
    for i in order:
        found[i] = max(places[i], floor + heights[i] / 2)
        floor = found[i] + heights[i] / 2
    for i in reversed(order):
        found[i] = min(found[i], ceiling - heights[i] / 2)
        ceiling = found[i] - heights[i] / 2
    return found


def add_legend(figure: Figure, place: Any, *, columns: int) -> None:
    """Put one legend for all axes outside them, with every label once."""
    entries = [axes.get_legend_handles_labels() for axes in figure.axes]
    # Labels that begin with an underscore would be left out.
    named = {label.lstrip(): handle for handles, labels in entries for handle, label in zip(handles, labels)}
    labels = [f" {label}" if label.startswith("_") else label for label in named]
    figure.legend(list(named.values()), labels, loc=place, ncols=columns, handlelength=1.5, columnspacing=1.2)


PHASE_COLOURS = {
    "data": "#BBBBBB",
    "forward": "#0072B2",
    "backward": "#D55E00",
    "allreduce": "#F0E442",
    "optimizer": "#009E73",
    "vote": "#CC79A7",
    "cache_read": "#56B4E9",
    "cache_write": "#E69F00",
    "checkpoint": "#444444",
    "other": "#882255",
}
REST, MOST_PHASES = "other", 6
DARK = frozenset({"forward", "backward", "optimizer", "checkpoint", "other"})
MOST_PANELS = 12
RANK_MARKERS = "osD^vP*X"


def colours(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return a colour and a dash pattern per group."""
    grey = itertools.cycle((BASELINE, dash) for dash in DASHES)
    coloured = itertools.cycle((colour, dash) for dash in DASHES for colour in COLOURS)
    return [next(grey if group.runs[0].is_baseline else coloured) for group in groups]


def plot_accuracy_against_time(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return a plot of test accuracy against training time: a line per group of seeds, with its runs as thin lines."""
    groups = group_by_seed(runs)
    with matplotlib.rc_context(STYLE):
        height = 0.3 * width + (1.6 if directly_labelled(len(groups), width) else 1.4 + 0.2 * len(groups))
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        ends = []
        for group, (colour, dash) in zip(groups, colours(groups)):
            for run in group.runs if len(group.runs) > 1 else ():
                axes.plot(*accuracy_curve([run]), color=colour, linewidth=0.8, alpha=0.35)
            times, accuracies = accuracy_curve(group.runs)
            if times:
                label, marker = group_label(group), "o" if len(times) <= 40 else ""
                axes.plot(times, accuracies, dash, color=colour, marker=marker, markersize=3, label=label)
                ends.append((times[-1], accuracies[-1], colour, label))
        axes.set(xlabel="training time (s)", ylabel="test accuracy (%)", xlim=(0, None))
        label_lines(figure, ends)
        return figure


def accuracy_curve(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Return mean seconds since the start and mean accuracy in percent after each epoch that all runs evaluated.

    If a run's final model is not that of its last epoch, as with hvfreeze auto, the last point is the final model's.
    """
    epochs = min(len(run.metrics) for run in runs)
    times, accuracies = list[float](), list[float]()
    for epoch in range(1, epochs + 1):
        reached = [run.metrics[epoch - 1]["test_accuracy"] for run in runs]
        if None not in reached:
            times.append(sum(line["train_seconds"] for run in runs for line in run.metrics[:epoch]) / len(runs))
            accuracies.append(100 * sum(reached) / len(runs))
    known = all(run.finished and not math.isnan(run.test_accuracy) for run in runs)
    if known and any(run.accuracies[-1:] != [run.test_accuracy] for run in runs):
        times.append(sum(run.train_seconds for run in runs) / len(runs))
        accuracies.append(100 * sum(run.test_accuracy for run in runs) / len(runs))
    return times, accuracies


def plot_phases(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return training seconds by phase: a stacked bar of means per group of seeds; the smallest phases are merged."""
    groups = group_by_seed(runs)
    totals = {p: sum(run.seconds[p] for run in runs) for p in TRAINING_PHASES}
    used = [p for p in TRAINING_PHASES if totals[p] > 0]
    if len(used) > MOST_PHASES:
        largest = sorted(used, key=lambda p: totals[p])[1 - MOST_PHASES :]
        used = [*(p for p in used if p in largest), REST]
    with matplotlib.rc_context(STYLE):
        legend_columns = max(1, int(width / 1.2))
        legend_rows = -(-len(used) // legend_columns)
        figure = Figure(figsize=(width, 0.75 + 0.22 * legend_rows + 0.62 * len(groups)), layout="constrained")
        axes = figure.add_subplot()
        longest = max(group.spread(lambda run: run.train_seconds).mean for group in groups)
        for row, group in enumerate(groups):
            left = 0.0
            for phase in used:
                parts = [p for p in TRAINING_PHASES if p not in used] if phase == REST else [phase]
                mean = group.spread(lambda run, parts=parts: sum(run.seconds[p] for p in parts)).mean  # type: ignore[misc]
                add_segment(axes, row, left, mean, phase=phase, longest=longest, width=width, first=row == 0)
                left += mean
            comparison = compare(group, groups)
            against = f", speed-up {factor(comparison.speed_up.mean)}" if comparison else ""
            result = f": {seconds(left)}{against}"
            title = clipped(group_label(group), int(11.5 * width) - len(result))
            axes.text(0, row - 0.34, title + result, va="bottom", color="#222222")
        axes.set(xlabel="training time of rank 0 (s)", yticks=[], ylim=(len(groups) - 0.6, -0.75), xlim=(0, longest))
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        add_legend(figure, "outside upper left", columns=legend_columns)
        return figure


def add_segment(
    axes: Axes, row: int, left: float, value: float, *, phase: str, longest: float, width: float, first: bool
) -> None:
    """Add a phase's segment to a bar, with its seconds if there is room."""
    label = phase.replace("_", " ") if first else None
    axes.barh(row, value, 0.6, left, color=PHASE_COLOURS[phase], edgecolor="white", linewidth=0.8, label=label)
    text = seconds(value)
    if value / longest * width > 0.085 * len(text) + 0.08:
        colour = "white" if phase in DARK else "#222222"
        axes.text(left + value / 2, row, text, ha="center", va="center", color=colour, fontsize=8)


def plot_panels(
    runs: Sequence[Run], draw: Callable[[Axes, Run], None], *, width: float, height: float, label: str
) -> Figure:
    """Return a figure with a panel of `height` inches for each run, for at most `MOST_PANELS` runs."""
    chosen = list(runs)[:MOST_PANELS]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 0.75 + height * len(chosen)), layout="constrained")
        panels = figure.subplots(len(chosen), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, run in zip(panels, chosen):
            draw(axes, run)
            axes.set_title(clipped(run.name, int(11.5 * width)), loc="left", fontsize=9)
        panels[-1].set(xlabel="epochs of training", xlim=(0, None))
        figure.supylabel(label, fontsize=9)
        add_legend(figure, "outside upper left", columns=4 if width >= WIDE else 2)
        return figure


def plot_cuts(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return the cut over time with every rank's proposals, a panel per run, for the first `MOST_PANELS` runs."""
    deepest = max([1, *(deepest_cut(run) for run in runs[:MOST_PANELS])])

    def draw(axes: Axes, run: Run) -> None:
        plot_cut(axes, run)
        axes.set_ylim(-0.4, deepest + 0.4)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))

    height = 0.85 + 0.19 * (deepest + 1)
    return plot_panels(runs, draw, width=width, height=height, label="cut (number of frozen blocks)")


def deepest_cut(run: Run) -> int:
    """Return the deepest cut of the run or of a rank's proposal."""
    proposed = [cut for line in run.decisions for cut in line["proposals"]]
    shadows = [scored["cut"] for line in run.decisions for scored in line.get("shadow", {}).values()]
    return int(max([run.final_cut, *(move.cut for move in run.cut_history), *proposed, *shadows]))


def plot_cut(axes: Axes, run: Run) -> None:
    """Draw one run's cut, proposals and shadow criteria."""
    per_epoch = run.steps_per_epoch
    end = run.metrics[-1]["step"] / per_epoch
    times = [move.step / per_epoch for move in run.cut_history]
    cuts = [move.cut for move in run.cut_history]
    axes.step([*times, end], [*cuts, cuts[-1]], where="post", color="#222222", linewidth=1.8, label="cut")
    axes.fill_between([*times, end], [*cuts, cuts[-1]], step="post", color="#DDDDDD", linewidth=0)
    votes = [line for line in run.decisions if line["proposals"]]
    num_ranks = max((len(line["proposals"]) for line in votes), default=0)
    for rank in range(min(num_ranks, len(RANK_MARKERS))):
        # Side by side, so that equal proposals do not hide each other.
        shift = 0.011 * end * (rank - (num_ranks - 1) / 2) / max(1, num_ranks / 4)
        # A run may have gone on with another number of ranks.
        own = [line for line in votes if rank < len(line["proposals"])]
        x = [line["step"] / per_epoch + shift for line in own]
        y = [line["proposals"][rank] for line in own]
        colour = COLOURS[rank % len(COLOURS)]
        axes.plot(x, y, RANK_MARKERS[rank], color=colour, markersize=4, label=f"proposal of rank {rank}")
    for place, name in enumerate(sorted({name for line in run.decisions for name in line.get("shadow", {})})):
        x = [line["step"] / per_epoch for line in run.decisions]
        y = [line["shadow"][name]["cut"] for line in run.decisions]
        axes.step(x, y, DASHES[1 + place % 3], where="post", color="#888888", linewidth=1, label=f"shadow {name}")


def plot_gains(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return each block's share of the gain of a step over time, mean over ranks, a panel per run."""
    return plot_panels(runs, plot_gain, width=width, height=1.9, label="share of a step's gain")


def plot_gain(axes: Axes, run: Run) -> None:
    """Draw one run's shares by block, front blocks first; without a line for frozen or unknown blocks."""
    votes = [line for line in run.decisions if line.get("gains")]
    times = [line["step"] / run.steps_per_epoch for line in votes]
    shades = matplotlib.colormaps["viridis"]
    count = max(len(line["gains"][0]) for line in votes)
    for block in range(count):
        known = [[row[block] for row in line["gains"] if row[block] is not None] for line in votes]
        means = [sum(values) / len(values) if values else float("nan") for values in known]
        colour = shades(0.9 * block / max(1, count - 1))
        axes.plot(times, means, "-", marker=".", color=colour, linewidth=1.4, label=f"block {block}")
    axes.set_ylim(-0.05, 1.0)
