"""What the measurements of `analysis.growth` came to: figure and README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis.sweeps.charts import FIGURE_WIDTH, OTHERS
from analysis.sweeps.kept import machines_of
from hvfreeze.heads.kernel import ALL_COMPARED
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import Table, factor, megabytes, percent, seconds
from hvfreeze.wording import plural

Line = Mapping[str, Any]
"""A run: its plan, seconds by phase, peak bytes by rank, and what came of it."""
MEASURED = "measured.jsonl"
"""Not the name of kept runs of `hvfreeze train`, which other experiments look for."""
AUTO = "--freeze auto"
UNSTAMPED = "AMD EPYC, 2 cores, one thread a rank; torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept lines that name none."""
MARKERS = {1: "^", 2: "o", 4: "s"}
"""By number of ranks."""
KINDS = {"made": "made rows, the solver", "images": "images, --freeze auto"}


def kept(path: Path) -> list[Line]:
    """Return the lines of runs that were made; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def growth_figure(lines: Sequence[Line]) -> Figure:
    """Return seconds and peak memory over rows: a colour for each kind and number of centres, a marker for ranks.

    Of images those that `--freeze auto` has without any other flag.
    """
    drawn = [line for line in lines if line["kind"] == "made" or line["way"] == AUTO]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(FIGURE_WIDTH, 1.4 * FIGURE_WIDTH), layout="constrained")
        time, memory = figure.subplots(2, 1)
        groups = {key: list(mine) for key, mine in groupby(in_order(drawn), key=of_a_line)}
        colours = dict(zip(dict.fromkeys((kind, centres) for kind, _, centres in groups), OTHERS))
        for (kind, ranks, centres), mine in groups.items():
            rows = [line["rows"] for line in mine]
            drawing: dict[str, Any] = {"color": colours[kind, centres], "marker": MARKERS[ranks], "markersize": 4}
            time.plot(rows, [took(line) for line in mine], **drawing)
            memory.plot(rows, [max(line["peak_bytes"]) / 1e9 for line in mine], **drawing)
        for axes, what in ((time, "seconds"), (memory, "peak memory of a rank (GB)")):
            axes.set(xscale="log", yscale="log", xlabel="rows of all ranks", ylabel=what)
            for axis in (axes.xaxis, axes.yaxis):
                # Powers of ten would be formulas, which an SVG shows as their source.
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
                axis.set_minor_formatter(NullFormatter())
        handles = [
            *(
                Line2D([], [], color=colour, label=KINDS[kind] + (f", {centres} centres" if centres else ""))
                for (kind, centres), colour in colours.items()
            ),
            *(
                Line2D([], [], color="grey", linestyle="", marker=MARKERS[ranks], label=plural(ranks, "rank"))
                for ranks in sorted({ranks for _, ranks, _ in groups})
            ),
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=1)
    return figure


def in_order(lines: Sequence[Line]) -> list[Line]:
    """Return the lines by kind, ranks, centres, rows and way."""
    return sorted(lines, key=lambda line: (*of_a_line(line), line["rows"], line.get("way", "")))


def of_a_line(line: Line) -> tuple[str, int, int]:
    """Return what the runs on one line of the figure have in common; 0 centres where the solver chose."""
    return line["kind"], line["ranks"], line["centres_asked"] or 0


def took(line: Line) -> float:
    """Return the seconds of the solver for made rows, of the whole command for images."""
    return float(sum(line["seconds"].values()) if line["kind"] == "made" else line["command_seconds"])


def readme(lines: Sequence[Line], *, preset: str) -> str:
    """Return README.md; the commands that it names make the runs that there are, with a preset that has them."""
    made = [line for line in in_order(lines) if line["kind"] == "made"]
    images = [line for line in in_order(lines) if line["kind"] == "images"]
    parts = ["# How time, memory and bytes grow with the rows that a head is solved on\n", *map(verdict, largest(made))]
    parts += image_verdicts(images)
    parts.append("\n![growth](figures/growth.svg)\n")
    if made:
        parts.append(made_table(made).to_text())
    if images:
        parts += [image_table(images).to_text(), phase_table(images).to_text()]
    sources = ", ".join(dict.fromkeys(str(line["commit"]) for line in lines))
    parts += [
        "## Limits\n",
        "- Made rows are Gaussian around the means of their classes; features of images are less regular.",
        "- One run each; other work on the machine would show. From hour to hour its speed differs by up to a fifth.",
        *note_on_both(images),
        "",
        "## How it was made\n",
        *(f"- `{command(some, preset=preset)}`" for some in (made, images) if some),
        f"- {machines_of(lines, unstamped=UNSTAMPED)}; source: {sources}",
        f"- every run: [{MEASURED}]({MEASURED})\n",
    ]
    return "\n".join(parts)


MANY = ALL_COMPARED // 2
"""Images from which on a solved head takes the mean over mirror images."""


def note_on_both(lines: Sequence[Line]) -> list[str]:
    """Return that auto's head of many images looks at each twice, and how right full fine-tuning is by both answers."""
    if all(line["rows"] <= MANY for line in lines):
        return []
    note = (
        f"- Of more than {MANY:,} images auto's head answers by the mean over an image and its mirror image, in two "
        "passes; full fine-tuning answers for the image alone"
    )
    known = [line for line in lines if "accuracy_for_both" in line]
    if not known:
        return [f"{note}. What it gains by both was not measured."]
    most = max(known, key=lambda line: line["rows"])
    both = f"{percent(most['accuracy'])}, and {percent(most['accuracy_for_both'])} by the mean of both answers"
    return [f"{note}. On {most['rows']:,} images it has {both}."]


def command(lines: Sequence[Line], *, preset: str) -> str:
    """Return the command line that makes these runs, all of one kind."""
    counts = " ".join(str(count) for count in dict.fromkeys(line["rows"] for line in lines))
    files = " --data-dir DIR --weights FILE" if lines[0]["kind"] == "images" else ""
    return f"python -m analysis.growth --preset {preset} --rows {counts}{files}"


def largest(lines: Sequence[Line]) -> list[Line]:
    """Return the run of the most rows, where there is one."""
    return [max(lines, key=lambda line: line["rows"])] if lines else []


def verdict(line: Line) -> str:
    """Return the largest run in a sentence."""
    return (
        f"- **{line['rows']:,} rows of 512 numbers, {plural(line['ranks'], 'rank')}:** solved in "
        f"{seconds(took(line))} (n = 1); {percent(line['accuracy'])} of rows that nobody was fitted to are right."
    )


def image_verdicts(lines: Sequence[Line]) -> list[str]:
    """Return what each way of `--freeze auto` comes to against the best full fine-tuning, for the most images."""
    if not lines:
        return []
    most = max(line["rows"] for line in lines)
    mine = [line for line in lines if line["rows"] == most]
    best = best_full(mine, most)
    found = []
    for line in mine:
        if not line["way"].startswith(AUTO):
            continue
        sentence = (
            f"- **{most:,} images of CIFAR-10, `{line['way']}`, {plural(line['ranks'], 'rank')}:** "
            f"{percent(line['accuracy'])} of the test images are right after {seconds(line['command_seconds'])} of the "
            "whole command (n = 1)"
        )
        if best is not None:
            points = 100 * (line["accuracy"] - best["accuracy"])
            sentence += f"; against the best full fine-tuning {points:+.1f} points in {against(line, best)} the time"
        found.append(sentence + ".")
    return found


def whole_commands(lines: Sequence[Line]) -> str:
    """Return, in Markdown, whole commands of `--freeze auto` beside the best full fine-tuning on as many images."""
    rows = []
    for line in sorted(lines, key=lambda line: (line["rows"], line["command_seconds"])):
        best = best_full(lines, line["rows"]) if line["way"].startswith(AUTO) else None
        if best is not None:
            both = (f"{percent(one['accuracy'])} in {seconds(one['command_seconds'])}" for one in (best, line))
            points = f"{100 * (line['accuracy'] - best['accuracy']):+.1f} points"
            cells = (str(line["rows"]), f"`{line['way']}`", *both, points, against(line, best))
            rows.append(f"| {' | '.join(cells)} |")
    heads = "| images | way | full fine-tuning | this way | difference | of its time |"
    return "\n".join([heads, "|---:|:---|---:|---:|---:|---:|", *rows]) if rows else ""


def best_full(lines: Sequence[Line], rows: int) -> Line | None:
    """Return the most accurate full fine-tuning on as many images; None where there is none."""
    full = [line for line in lines if line["rows"] == rows and not line["way"].startswith(AUTO)]
    return max(full, key=lambda line: line["accuracy"], default=None)


def against(line: Line, other: Line) -> str:
    """Return the seconds of a whole command in those of another one's."""
    return factor(line["command_seconds"] / other["command_seconds"])


def made_table(lines: Sequence[Line]) -> Table:
    """Return a row for each run of made rows."""
    phases = ("points", "choice", "solution")
    columns = ("rows", "ranks", "centres", *phases, "passes", "GB a rank", "MB exchanged", "right")
    rows = [
        (
            str(line["rows"]),
            str(line["ranks"]),
            str(line["centres"]),
            *(seconds(line["seconds"][phase]) for phase in phases),
            str(line["passes"]),
            f"{max(line['peak_bytes']) / 1e9:.2f}",
            megabytes(line["exchanged_bytes"]),
            percent(line["accuracy"]),
        )
        for line in lines
    ]
    return Table(columns=columns, rows=tuple(rows), title="Made rows: seconds of each phase")


def image_table(lines: Sequence[Line]) -> Table:
    """Return a row for each run on images: what it took, and that beside the best full fine-tuning on as many."""
    rows = []
    for line in lines:
        best = best_full(lines, line["rows"])
        beside = (
            ("", "") if best is None else (f"{100 * (line['accuracy'] - best['accuracy']):+.1f}", against(line, best))
        )
        row = (str(line["rows"]), f"`{line['way']}`", percent(line["accuracy"]), seconds(line["command_seconds"]))
        rows.append((*row, *beside, f"{max(line['peak_bytes']) / 1e9:.2f}"))
    columns = ("images", "way", "right", "whole command", "points", "time", "GB a rank")
    return Table(
        columns=columns,
        rows=tuple(rows),
        title="Images, points and time against the best full fine-tuning",
        prose=frozenset({"way"}),
    )


def phase_table(lines: Sequence[Line]) -> Table:
    """Return where the seconds of each run on images went."""
    phases = [
        phase
        for phase in dict.fromkeys(phase for line in lines for phase in line["seconds"])
        if any(line["seconds"].get(phase, 0) > 0.05 for line in lines)
    ]
    rows = [
        (
            str(line["rows"]),
            f"`{line['way']}`",
            *(seconds(line["seconds"].get(phase, 0.0)) for phase in phases),
        )
        for line in lines
    ]
    return Table(
        columns=("images", "way", *phases),
        rows=tuple(rows),
        title="Images, seconds of each phase",
        prose=frozenset({"way"}),
    )
