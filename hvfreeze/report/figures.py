"""Figures from runs. Each takes any number of runs and a width, so that a page can show a narrow one on a phone."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvfreeze.report.comparison import Group, compare, group_by_seed
from hvfreeze.report.style import (
    BASELINE,
    COLOURS,
    DASHES,
    STYLE,
    WIDE,
    add_legend,
    clipped,
    directly_labelled,
    label_lines,
)
from hvfreeze.report.tables import group_label
from hvfreeze.report.units import factor, seconds
from hvfreeze.runs.reading import TRAINING_PHASES, Run

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
}
DARK = frozenset({"forward", "backward", "optimizer", "checkpoint"})
MOST_PANELS = 12
RANK_MARKERS = "osD^vP*X"


def colours(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return a colour and a dash pattern per group."""
    chosen: list[tuple[str, str]] = []
    count = 0
    for group in groups:
        if group.runs[0].is_baseline:
            chosen.append((BASELINE, DASHES[sum(c == BASELINE for c, _ in chosen) % len(DASHES)]))
        else:
            chosen.append((COLOURS[count % len(COLOURS)], DASHES[count // len(COLOURS) % len(DASHES)]))
            count += 1
    return chosen


def plot_accuracy_against_time(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return test accuracy against seconds of training: a line per group of seeds, its runs thin behind it."""
    groups = group_by_seed(runs)
    with matplotlib.rc_context(STYLE):
        height = 0.3 * width + (1.6 if directly_labelled(len(groups), width) else 1.4 + 0.2 * len(groups))
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        ends = []
        for group, (colour, dash) in zip(groups, colours(groups)):
            for run in group.runs:
                if len(group.runs) > 1:
                    axes.plot(*accuracy_curve([run]), color=colour, linewidth=0.8, alpha=0.35)
            times, accuracies = accuracy_curve(group.runs)
            if not times:
                continue
            marker = "o" if len(times) <= 40 else ""
            axes.plot(times, accuracies, dash, color=colour, marker=marker, markersize=3, label=group_label(group))
            ends.append((times[-1], accuracies[-1], colour))
        axes.set(xlabel="training time (s)", ylabel="test accuracy (%)", xlim=(0, None))
        label_lines(figure, ends, [group_label(group) for group in groups if accuracy_curve(group.runs)[0]])
        return figure


def accuracy_curve(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Return mean seconds since the start and mean accuracy in percent after each epoch that all runs evaluated."""
    epochs = min(len(run.metrics) for run in runs)
    times, accuracies = [], []
    for epoch in range(1, epochs + 1):
        reached = [run.metrics[epoch - 1]["test_accuracy"] for run in runs]
        if None in reached:
            continue
        times.append(sum(line["train_seconds"] for run in runs for line in run.metrics[:epoch]) / len(runs))
        accuracies.append(100 * sum(reached) / len(runs))
    return times, accuracies


def plot_phases(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return training seconds by phase: a stacked bar per group of seeds, its mean."""
    groups = group_by_seed(runs)
    used = [p for p in TRAINING_PHASES if any(run.seconds[p] > 0 for run in runs)]
    with matplotlib.rc_context(STYLE):
        legend_rows = -(-len(used) // legend_columns(width))
        figure = Figure(figsize=(width, 0.75 + 0.22 * legend_rows + 0.62 * len(groups)), layout="constrained")
        axes = figure.add_subplot()
        longest = max(group.spread(lambda run: run.train_seconds).mean for group in groups)
        for row, group in enumerate(groups):
            left = 0.0
            for phase in used:
                mean = group.spread(lambda run, phase=phase: run.seconds[phase]).mean  # type: ignore[misc]
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
        add_legend(figure, "outside upper left", columns=legend_columns(width))
        return figure


def legend_columns(width: float) -> int:
    """Return how many phases fit into a row of the legend."""
    return max(1, int(width / 1.2))


def add_segment(
    axes: Axes, row: int, left: float, value: float, *, phase: str, longest: float, width: float, first: bool
) -> None:
    """Add a phase's segment to a bar, with its seconds where they fit."""
    label = phase.replace("_", " ") if first else None
    axes.barh(row, value, 0.6, left, color=PHASE_COLOURS[phase], edgecolor="white", linewidth=0.8, label=label)
    text = seconds(value)
    if value / longest * width > 0.085 * len(text) + 0.08:
        colour = "white" if phase in DARK else "#222222"
        axes.text(left + value / 2, row, text, ha="center", va="center", color=colour, fontsize=8)


def plot_cuts(runs: Sequence[Run], *, width: float = WIDE) -> Figure:
    """Return the cut over time with every rank's proposals, a panel per run, for the first `MOST_PANELS` runs."""
    chosen = list(runs)[:MOST_PANELS]
    deepest = max([1, *(deepest_cut(run) for run in chosen)])
    with matplotlib.rc_context(STYLE):
        height = 0.55 + 0.19 * (deepest + 1)
        figure = Figure(figsize=(width, 0.75 + (height + 0.3) * len(chosen)), layout="constrained")
        panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
        for axes, run in zip(panels, chosen):
            plot_cut(axes, run)
            axes.set_title(clipped(run.name, int(11.5 * width)), loc="left", fontsize=9)
            axes.set_ylim(-0.4, deepest + 0.4)
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        panels[-1].set(xlabel="epochs of training", xlim=(0, None))
        figure.supylabel("cut (frozen blocks)", fontsize=9)
        add_legend(figure, "outside upper left", columns=4 if width >= WIDE else 2)
        return figure


def deepest_cut(run: Run) -> int:
    """Return the deepest cut that the run had or a rank proposed."""
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
        x = [line["step"] / per_epoch + shift for line in votes]
        y = [line["proposals"][rank] for line in votes]
        colour = COLOURS[rank % len(COLOURS)]
        axes.plot(x, y, RANK_MARKERS[rank], color=colour, markersize=4, label=f"proposal of rank {rank}")
    for place, name in enumerate(sorted({name for line in run.decisions for name in line.get("shadow", {})})):
        x = [line["step"] / per_epoch for line in run.decisions]
        y = [line["shadow"][name]["cut"] for line in run.decisions]
        axes.step(x, y, DASHES[1 + place % 3], where="post", color="#888888", linewidth=1, label=f"shadow {name}")
