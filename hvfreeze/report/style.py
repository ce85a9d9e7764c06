"""How every figure looks, is labelled and is saved."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

WIDE, NARROW = 8.0, 3.7
"""Widths in inches: of a page, and of a phone held upright."""

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
MOST_DIRECT_LABELS = 6


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write `path`.png (150 dpi) and `path`.svg, the same bytes for the same figure; return both paths."""
    base = Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    png, svg = base.with_name(base.name + ".png"), base.with_name(base.name + ".svg")
    with matplotlib.rc_context(STYLE):
        figure.savefig(png, dpi=150, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def label_lines(figure: Figure, ends: Sequence[tuple[float, float, str]], labels: Sequence[str]) -> None:
    """Write each line's label to the right of its end; with many lines or little width, in a legend below."""
    if not directly_labelled(len(ends), figure.get_figwidth()):
        add_legend(figure, "outside lower left", columns=2 if figure.get_figwidth() >= WIDE else 1)
        return
    axes = figure.axes[0]
    wrapped = [textwrap.fill(label, 26) for label in labels]
    low, high = axes.get_ylim()
    places = [(y - low) / (high - low) for _, y, _ in ends]
    heights = [(1 + text.count("\n")) * 0.19 / (0.8 * figure.get_figheight()) for text in wrapped]
    for (x, y, colour), text, place in zip(ends, wrapped, spread_out(places, heights)):
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
    """Return whether lines have their labels beside them rather than in a legend."""
    return num_lines <= MOST_DIRECT_LABELS and width >= WIDE


def clipped(text: str, length: int) -> str:
    """Return a text with its end left out where it is too long."""
    return text if len(text) <= length else text[: length - 3] + "..."


def spread_out(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return places in 0..1 near those wanted, in the same order, at which labels of these heights do not overlap."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = list(places)
    floor = float("-inf")
    for i in order:
        found[i] = max(places[i], floor + heights[i] / 2)
        floor = found[i] + heights[i] / 2
    ceiling = 1.0
    for i in reversed(order):
        found[i] = min(found[i], ceiling - heights[i] / 2)
        ceiling = found[i] - heights[i] / 2
    return found


def add_legend(figure: Figure, place: Any, *, columns: int) -> None:
    """Put a legend of all axes outside them, every label once."""
    entries = [axes.get_legend_handles_labels() for axes in figure.axes]
    # Labels that begin with an underscore would be left out.
    named = {label.lstrip(): handle for handles, labels in entries for handle, label in zip(handles, labels)}
    labels = [f" {label}" if label.startswith("_") else label for label in named]
    figure.legend(list(named.values()), labels, loc=place, ncols=columns, handlelength=1.5, columnspacing=1.2)
