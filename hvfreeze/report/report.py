"""`hvfreeze report`: one HTML page, figures and CSV files from run directories.

OUT/index.html          opens from a file; holds copies of the figures
OUT/figures/*.png *.svg
OUT/data/*.csv          runs, epochs and votes as plain numbers
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.report.comparison import Comparison, Group, compare, group_by_seed
from hvfreeze.report.csv_files import epoch_rows, run_rows, to_csv, vote_rows
from hvfreeze.report.figures import MOST_PANELS, plot_accuracy_against_time, plot_cuts, plot_phases
from hvfreeze.report.listing import doing, has_epoch, is_run, progress_of, readable_runs
from hvfreeze.report.page import Picture, Section, write_page, write_text
from hvfreeze.report.style import NARROW, WIDE, save_figure
from hvfreeze.report.tables import (
    command_table,
    environment_table,
    models_table,
    phase_table,
    summary_table,
    vote_table,
)
from hvfreeze.report.units import factor, percent, plural, shown
from hvfreeze.runs.reading import Run, load_runs

VOTES_UNFOLDED = 24
"""With more votes than this over all runs, the page folds each run's table away."""


class Plot(Protocol):
    """A figure from runs, at a width in inches."""

    def __call__(self, runs: Sequence[Run], *, width: float) -> Figure:
        """Draw it."""


def write_report(run_dirs: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str]) -> int:
    """Write a report on any number of runs to the folder `out`, say where it is, and return exit code 0.

    What is no run, is damaged or has no epoch yet is left out, with a note.

    Raises:
        RefusedError: no run is left, or `out` cannot be written; names it.
    """
    runs = load_runs(readable_runs(run_dirs))
    path = write_report_page(runs, out=Path(out))
    print(f"report on {plural(len(runs), 'run')}: {path}")
    return 0


def watch_report(run_dirs: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str], seconds: int) -> int:
    """Write the report anew whenever a run has made an epoch, until no job is at work on any; return exit code 0.

    The page reloads itself in the browser meanwhile. Runs may be without an epoch yet.

    Raises:
        UsageError: `seconds` makes no sense.
        RefusedError: no job is at work and no run can be read, or `out` cannot be written; names it.
    """
    if seconds < 1:
        raise UsageError(f"--watch ({seconds}) must be at least 1 second")
    places, written = [Path(place) for place in run_dirs], None
    while True:
        running = any(doing(place) == "running" for place in places)
        now = (running, [is_run(place) and progress_of(place) for place in places])
        ready = [place for place in places if has_epoch(place)]
        if now != written and (ready or not running):
            runs = load_runs(readable_runs(ready if running else places))
            path = write_report_page(runs, out=Path(out), refresh_seconds=seconds if running else 0)
            print(f"{time.strftime('%H:%M:%S')} report on {plural(len(runs), 'run')}: {path}", flush=True)
            written = now
        if not running:
            return 0
        time.sleep(seconds)


def write_report_page(runs: Sequence[Run], *, out: Path, refresh_seconds: int = 0) -> Path:
    """Write figures, CSV files and the page to the folder `out`; return the page's path.

    Raises:
        RefusedError: `out` cannot be written.
    """
    groups = group_by_seed(runs)
    for name, rows in (("runs", run_rows(groups)), ("epochs", epoch_rows(groups)), ("votes", vote_rows(groups))):
        write_text(out / "data" / f"{name}.csv", to_csv(rows))
    sections = [
        summary_section(groups),
        accuracy_section(runs, out=out),
        *models_sections(runs),
        phase_section(runs, groups, out=out),
        *cut_sections(runs, out=out),
        Section(heading="Commands and environment", tables=(command_table(groups), environment_table(groups))),
    ]
    title = f"hvfreeze: report on {plural(len(runs), 'run')}"
    return write_page(title, sections, out=out, refresh_seconds=refresh_seconds)


def summary_section(groups: Sequence[Group]) -> Section:
    """Return the section that says what came of the runs."""
    compared = [(group, compare(group, groups)) for group in groups]
    held_out = [float(group.runs[0].settings["validation_fraction"]) > 0 for group in groups]
    where = "on held-out samples" if all(held_out) else "on the test set"
    where += (
        ", or on samples held out where --validation-fraction is given" if any(held_out) and not all(held_out) else ""
    )
    notes = [f"Accuracy: {where}, after the last epoch. Training time: all but evaluation and set-up."]
    if any(len(group.runs) > 1 for group in groups):
        notes.append("Runs that differ in the seed only share a row: the mean, and in brackets lowest to highest.")
    if any(comparison for _, comparison in compared):
        notes.append(
            "Speed-up and time saved are against the run without freezing and cache on the same work: same data, "
            "model, epochs, batch size, number of ranks and machine, and the same seed where there is one."
        )
    notes.append("Allreduce: gradients that one rank handed over to be averaged. 1 MB is 10^6 bytes.")
    return Section(
        heading="Summary",
        points=tuple(headline(group, comparison) for group, comparison in compared if comparison),
        tables=(summary_table(groups),),
        notes=(" ".join(notes),),
    )


def headline(group: Group, comparison: Comparison) -> str:
    """Return the outcome of a comparison in one sentence, with both forms of the gain."""
    speed_up, saved = comparison.speed_up, comparison.time_saved
    ours = shown(group.spread(lambda run: run.test_accuracy), percent)
    theirs = shown(comparison.baseline.spread(lambda run: run.test_accuracy), percent)
    change = f"{percent(abs(saved.mean))} {'less' if saved.mean >= 0 else 'more'} training time"
    gain = f"speed-up {shown(speed_up, factor)} over {comparison.baseline.name}, {change}, n = {speed_up.n}"
    return f"{group.name}: {gain}; accuracy {ours} against {theirs}."


def accuracy_section(runs: Sequence[Run], *, out: Path) -> Section:
    """Return the section with accuracy against training time."""
    caption = f"Test accuracy against training time, a point an epoch; {number_of_runs(runs)}."
    if len(group_by_seed(runs)) < len(runs):
        caption += " Thick: the mean of time and of accuracy after each epoch; thin: single runs."
    picture = draw(plot_accuracy_against_time, runs, name="accuracy-against-time", caption=caption, out=out)
    return Section(heading="Accuracy against time", pictures=(picture,))


def models_sections(runs: Sequence[Run]) -> list[Section]:
    """Return the section with each model of the runs that trained several, none where there is no such run."""
    several = [run for run in runs if run.metrics[-1].get("models")]
    note = "A run's accuracy is the mean over its models."
    return [Section(heading="Models", tables=tuple(map(models_table, several)), notes=(note,))] if several else []


def phase_section(runs: Sequence[Run], groups: Sequence[Group], *, out: Path) -> Section:
    """Return the section with the seconds by phase."""
    caption = (
        f"Training time of rank 0 by phase (allreduce: the wait that backward does not hide); {number_of_runs(runs)}."
    )
    picture = draw(plot_phases, runs, name="phases", caption=caption, out=out)
    return Section(heading="Where the time goes", pictures=(picture,), tables=(phase_table(groups),))


def cut_sections(runs: Sequence[Run], *, out: Path) -> list[Section]:
    """Return the section with cuts and votes, none where nothing was frozen and nobody voted."""
    moving = [run for run in runs if run.decisions or run.final_cut > 0]
    if not moving:
        return []
    caption = (
        "The cut, which is the number of frozen blocks, and what each rank proposed at every vote (the marks of one "
        "vote stand side by side); n = 1 run a panel."
    )
    if len(moving) > MOST_PANELS:
        caption += f" The first {MOST_PANELS} of {len(moving)} runs."
    picture = draw(plot_cuts, moving, name="cuts", caption=caption, out=out)
    voting = [run for run in moving if run.decisions]
    folded = sum(len(run.decisions) for run in voting) > VOTES_UNFOLDED
    tables = tuple(replace(vote_table(run), folded=folded) for run in voting)
    note = (
        "Proposals and weights are in the order of ranks. Support: the part of the whole weight whose ranks proposed "
        "that cut or a deeper one. The deepest cut whose support reaches the quorum is taken; a vote never thaws."
    )
    return [Section(heading="Votes and cuts", pictures=(picture,), tables=tables, notes=(note,) if voting else ())]


def number_of_runs(runs: Sequence[Run]) -> str:
    """Return n for a caption."""
    sizes = sorted({len(group.runs) for group in group_by_seed(runs)})
    return (
        f"n = {sizes[0]}"
        + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
        + f" {'run' if sizes == [1] else 'runs'} each"
    )


def draw(plot: Plot, runs: Sequence[Run], *, name: str, caption: str, out: Path) -> Picture:
    """Write a figure at page and at phone width, and return it for the page.

    Raises:
        RefusedError: the files cannot be written.
    """
    base = out / "figures" / name
    try:
        _, svg = save_figure(plot(runs, width=WIDE), base)
        _, narrow = save_figure(plot(runs, width=NARROW), base.with_name(f"{name}-narrow"))
    except OSError as error:
        raise RefusedError(f"{base} cannot be written: {error.strerror}; choose another --out") from error
    files = tuple(f"figures/{name}.{suffix}" for suffix in ("png", "svg"))
    return Picture(caption=caption, svg=svg, narrow_svg=narrow, files=files)
