"""How do time, memory and bytes of fitting a head grow with the rows: from 1,000 to 1,000,000, on 1, 2, 4 ranks?

    python -m analysis.growth [--preset smoke|reduced|full] [--rows N [N ...]] [--out DIR]
    python -m analysis.growth --preset full --data-dir DIR --weights FILE and images: whole commands of hvfreeze auto

Synthetic rows of 512 numbers and 100 classes are fitted by the solver alone; 40 to 50,000 images of CIFAR-10 by the
whole command, with a ResNet-18 that was trained at 32 pixels, compared with full fine-tuning. DIR gets measured.jsonl,
with one line per run, a figure and README.md. Finished runs are skipped, so the same command continues a stopped one.
Needs an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis.sweeps.charts import FIGURE_WIDTH, OTHERS
from analysis.sweeps.kept import RESULTS, publish, stamp, told_of
from analysis.sweeps.launching import follow
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.pages import Page, Words
from analysis.sweeps.sweep import SMOKE_RESULTS
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.inference.model import load_model
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import Table, factor, megabytes, percent, seconds
from hvfreeze.wording import plural

NAME, MEASURED = "growth", "measured.jsonl"
"""Not the name of kept runs of `hvfreeze train`, which other experiments look for."""
AUTO = "hvfreeze auto"
UNSTAMPED = "AMD EPYC, 2 cores, one thread a rank; torch 2.13.0+cpu, horovod 0.28.1"
"""Machine and versions of kept lines that name none."""
MARKERS = {1: "^", 2: "o", 4: "s"}
"""Plot markers by number of ranks."""
KINDS = {"made": "synthetic rows, solver alone", "images": "images, hvfreeze auto"}
Line = Mapping[str, Any]
"""A run: its plan, seconds by phase, peak bytes by rank, and what came of it."""
CLASSES = 100
MEMORY_BYTES = 6 * 10**9
"""Memory of a rank."""
SECONDS = 4 * 3600.0
"""After which a run hangs."""


@dataclass(frozen=True)
class Planned:
    """A run: `rows` of all ranks, made or images of CIFAR-10."""

    kind: str
    """`made` or `images`."""
    rows: int
    ranks: int
    centres_asked: int | None = None
    """None leaves it to the solver."""
    way: str = ""
    """For images: the flags of the command."""


PRESETS = {
    "smoke": [Planned("made", 1_000, 1, 100), Planned("made", 6_000, 2, 500)],
    "reduced": [
        *(Planned("made", rows, ranks) for rows in (1_000, 10_000) for ranks in (1, 2, 4)),
        Planned("made", 50_000, 2, 2_000),
    ],
    "full": [
        *(Planned("made", rows, ranks) for rows in (1_000, 10_000) for ranks in (1, 2, 4)),
        Planned("made", 50_000, 2, 2_000),
        *(Planned("made", 100_000, ranks, 5_000) for ranks in (1, 2, 4)),
        Planned("made", 1_000_000, 2, 5_000),
    ],
}
"""Larger numbers of rows, with 5,000 centres: equal cost per row, so that growth with rows is visible."""
DEFAULT = "reduced"
FULL = "--freeze none --epochs 16 --schedule cosine --evaluate-every 16"
"""The last epoch alone is evaluated: what a user who knows his settings would wait for."""
IMAGES = {
    40: (AUTO,),
    400: (AUTO,),
    5_000: (AUTO, f"{AUTO} --epochs 1", f"{FULL} --lr 0.05 --batch-size 64"),
    20_000: (AUTO, f"{AUTO} --epochs 1", f"{FULL} --lr 0.05 --batch-size 64"),
    50_000: (
        AUTO,
        f"{AUTO} --time-budget 320s",
        *(f"{AUTO} --epochs {count}" for count in (1, 3, 4, 8)),
        f"{FULL} --lr 0.05",
        f"{FULL} --lr 0.1",
    ),
}
"""Images of CIFAR-10, and in which ways a model is fine-tuned on them. Learning rates and batch sizes of full
fine-tuning are the best ones.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, and write them up one by one; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default=DEFAULT, help=f"which runs ({DEFAULT})")
    parser.add_argument(
        "--out",
        type=folder_to_write,
        help=f"folder for {MEASURED}; full: also README.md [{RESULTS / NAME}; smoke: {SMOKE_RESULTS / NAME}]",
    )
    parser.add_argument("--rows", type=int, nargs="+", help="only runs of so many (all)")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10; without it no images")
    parser.add_argument("--weights", type=Path, help="of a ResNet-18 trained at 32 pixels")
    options = parser.parse_args(arguments)
    if (options.data_dir is None) != (options.weights is None):
        parser.error("--data-dir and --weights go together")
    options.out = options.out or (SMOKE_RESULTS if options.preset == "smoke" else RESULTS) / NAME
    planned = [*PRESETS[options.preset]]
    if options.data_dir is not None:
        planned += [Planned("images", count, 2, way=way) for count, ways in IMAGES.items() for way in ways]
    lines = kept(options.out / MEASURED)
    try:
        for run in missing([run for run in planned if options.rows is None or run.rows in options.rows], lines):
            found = measure(run, options.data_dir, options.weights)
            lines.append({**asdict(run), **found, **stamp(), "finished": now()})
            publish(options.out / MEASURED, "".join(json.dumps(line) + "\n" for line in lines))
            print(", ".join(f"{name} {value}" for name, value in lines[-1].items()), flush=True)
        if options.preset == "full":
            PAGE.write(options.out.parent)
    except HvfreezeError as error:
        print(f"growth: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def is_of(line: Line, run: Planned) -> bool:
    """Return True if a line belongs to a run."""
    return asdict(run).items() <= {"way": "", **line}.items()


def missing(planned: Sequence[Planned], lines: Sequence[Line]) -> Iterator[Planned]:
    """Yield the runs that have no line."""
    for run in planned:
        if not any(is_of(line, run) for line in lines):
            yield run


def measure(run: Planned, data_dir: Path | None, weights: Path | None) -> dict[str, Any]:
    """Return what a run took: seconds by phase, peak memory of every rank, bytes that each gave to the others.

    Raises:
        RefusedError: it failed or hangs, or ranks have different heads.
    """
    with tempfile.TemporaryDirectory() as folder:
        module, words = (
            ("analysis.parts.growth_rows", made_words(run))
            if run.kind == "made"
            else ("analysis.parts.growth_images", image_words(run, folder, data_dir, weights))
        )
        log, program = Path(folder) / "log.txt", [sys.executable, "-m", module, folder, *words]
        launcher = ["mpirun", "-n", str(run.ranks), "--bind-to", "none", "--oversubscribe"] if run.ranks > 1 else []
        start = time.perf_counter()
        if follow([*launcher, *program], log, timeout=SECONDS) != 0:
            last = log.read_text(errors="replace").splitlines()[-3:]
            raise RefusedError(f"{run.rows} rows on {plural(run.ranks, 'rank')} failed: {' / '.join(last)}")
        whole = time.perf_counter() - start
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(run.ranks)]
        if data_dir is not None and run.way.startswith(FULL):
            ranks[0]["accuracy_for_both"] = accuracy_for_both(Path(folder, "run"), data_dir)
    if len({rank["digest"] for rank in ranks}) > 1:
        raise RefusedError(f"{run.rows} rows on {plural(run.ranks, 'rank')}: ranks have different heads")
    return {**ranks[0], "peak_bytes": [rank["peak_bytes"] for rank in ranks], "command_seconds": round(whole, 3)}


def accuracy_for_both(run_dir: Path, data_dir: Path) -> float:
    """Return the test accuracy of the mean logits of an image and its flip."""
    applied, right, count = load_model(run_dir), 0, 0
    for number, name in enumerate(applied.classes):
        paths = sorted(Path(data_dir, "test", name).iterdir())
        for first in range(0, len(paths), 250):
            some = [torch.from_numpy(applied.preparation.pixels_of(path)) for path in paths[first : first + 250]]
            images = applied.preparation.normalised(torch.stack(some))
            logits = applied.logits(images) + applied.logits(images.flip(3))
            right, count = right + int((logits.argmax(1) == number).sum()), count + len(some)
    return right / count


def made_words(run: Planned) -> list[str]:
    """Return the arguments of a rank that fits a head to synthetic rows."""
    job = {"rows": run.rows, "classes": CLASSES, "centres": run.centres_asked, "memory_bytes": MEMORY_BYTES}
    return [json.dumps(job)]


def image_words(run: Planned, folder: str, data_dir: Path | None, weights: Path | None) -> list[str]:
    """Return the arguments of a rank of `hvfreeze train` on images."""
    flags: dict[str, object] = {
        "data": "imagefolder",
        "data-dir": data_dir,
        "model": "resnet18",
        "weights": weights,
    }
    flags |= {"train-samples": run.rows} if run.rows < max(IMAGES) else {}
    words = [f"--{name}={value}" for name, value in flags.items()]
    if run.way.startswith(AUTO):
        words = ["auto", str(data_dir), *words[2:], *run.way.removeprefix(AUTO).split()]
    else:
        words = ["train", *words, *run.way.split()]
    return [*words, "--quiet", f"--run-dir={folder}/run"]


def kept(path: Path) -> list[Line]:
    """Return the lines of runs that were made; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def growth_figure(lines: Sequence[Line]) -> Figure:
    """Return seconds and peak memory over rows: a colour for each kind and number of centres, a marker for ranks.

    Images are shown for `hvfreeze auto` without other flags.
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
    """Return the seconds of the solver for synthetic rows, and of the whole command for images."""
    return float(sum(line["seconds"].values()) if line["kind"] == "made" else line["command_seconds"])


def best_full(lines: Sequence[Line], rows: int) -> Any:
    """Return the most accurate full fine-tuning on as many images; None where there is none."""
    full = [line for line in lines if line["rows"] == rows and not line["way"].startswith(AUTO)]
    return max(full, key=lambda line: line["accuracy"], default=None)


def against(line: Line, other: Line) -> str:
    """Return the seconds of a whole command in those of another one's."""
    return factor(line["command_seconds"] / other["command_seconds"])


def made_table(lines: Sequence[Line]) -> str:
    """Return a row for each run on synthetic rows."""
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
    return Table(columns=columns, rows=tuple(rows)).to_text()


def image_table(lines: Sequence[Line]) -> str:
    """Return a row for each run on images, compared with the best full fine-tuning on the same number of images."""
    rows = []
    for line in lines:
        best = best_full(lines, line["rows"])
        beside = (
            ("", "") if best is None else (f"{100 * (line['accuracy'] - best['accuracy']):+.1f}", against(line, best))
        )
        row = (str(line["rows"]), f"`{line['way']}`", percent(line["accuracy"]), seconds(line["command_seconds"]))
        rows.append((*row, *beside, f"{max(line['peak_bytes']) / 1e9:.2f}"))
    columns = ("images", "way", "right", "whole command", "points", "time", "GB a rank")
    return Table(columns=columns, rows=tuple(rows), prose=frozenset({"way"})).to_text()


def phase_table(lines: Sequence[Line]) -> str:
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
    return Table(columns=("images", "way", *phases), rows=tuple(rows), prose=frozenset({"way"})).to_text()


def words(root: Path) -> Words:
    lines = in_order(kept(root / NAME / MEASURED))
    made, images = ([line for line in lines if line["kind"] == kind] for kind in ("made", "images"))
    auto = [line for line in images if line["way"].startswith(AUTO) and best_full(images, line["rows"])]
    largest = max(made, key=lambda line: line["rows"])
    both = max((line for line in images if "accuracy_for_both" in line), key=lambda line: line["rows"])
    most = max(line["rows"] for line in images)
    return {
        "largest": largest,
        "took": took,
        "most": most,
        "of_most": [line for line in auto if line["rows"] == most],
        "by_rows": sorted(auto, key=lambda line: (line["rows"], line["command_seconds"])),
        "best_full": lambda line: best_full(images, line["rows"]),
        "points": lambda line: f"{100 * (line['accuracy'] - best_full(images, line['rows'])['accuracy']):+.1f}",
        "against": lambda line: against(line, best_full(images, line["rows"])),
        "both": both,
        "counts": [" ".join(str(n) for n in dict.fromkeys(line["rows"] for line in of)) for of in (made, images)],
        "made_table": made_table(made),
        "image_table": image_table(images),
        "phase_table": phase_table(images),
        "told": told_of(pd.DataFrame(kept(root / NAME / MEASURED)), unstamped=UNSTAMPED),
    }


PAGE = Page(NAME, words, lambda root: {"growth": growth_figure(kept(root / NAME / MEASURED))})


if __name__ == "__main__":
    sys.exit(main())
