"""The figure of which class was taken for which."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

from hvfreeze.report.style import STYLE, WIDE, clipped

MOST_NAMED, MOST_NUMBERED, LONGEST = 60, 20, 24


def plot_confusion(confusion: Tensor, classes: Sequence[str], *, width: float = WIDE) -> Figure:
    """Return a picture of the (classes, classes) counts, true classes in rows, each row shaded as parts of its sum.

    Cells carry their counts where there are few classes; with many, axes are numbered instead of named.
    """
    parts = confusion.double() / confusion.sum(1, keepdim=True).clamp(min=1)
    number = len(classes)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(width, 0.85 * width), layout="constrained")
        axes = figure.add_subplot()
        picture = axes.imshow(100 * parts.numpy(), cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
        axes.set(xlabel="answer", ylabel="true class")
        if number <= MOST_NAMED:
            names = [clipped(name, LONGEST) for name in classes]
            axes.set_xticks(
                range(number), names, rotation=45 if number <= 10 else 90, ha="right" if number <= 10 else "center"
            )
            axes.set_yticks(range(number), names)
        if number <= MOST_NUMBERED:
            for row, counts in enumerate(confusion.tolist()):
                for column, count in enumerate(counts):
                    colour = "white" if parts[row, column] > 0.55 else "#222222"
                    axes.text(column, row, str(count) if count else "", ha="center", va="center", color=colour)
        figure.colorbar(picture, ax=axes, shrink=0.8, label="part of the true class (%)")
        return figure
