"""`hvfreeze report`: one HTML page, figures and CSV files from run directories.

OUT/index.html          opens from a file; holds copies of the figures
OUT/figures/*.png *.svg
OUT/data/*.csv          runs, epochs and votes as plain numbers
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from hvfreeze.errors import UsageError
from hvfreeze.report import figures, tables
from hvfreeze.report.comparison import Comparison, Group, compare, group_by_seed
from hvfreeze.report.listing import doing, has_epoch, is_run, progress_of, readable_runs
from hvfreeze.report.tables import Table, factor, percent, shown, to_csv, write_text
from hvfreeze.runs.reading import Run
from hvfreeze.wording import plural

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on the page: its files, of which the page embeds the SVG."""

    caption: str
    svg: Path
    narrow_svg: Path | None = None
    """A version for narrow screens."""
    files: tuple[str, ...] = ()
    """Paths relative to the page, for links."""

    @property
    def source(self) -> str:
        """The figure as a data URI."""
        return data_uri(self.svg)

    @property
    def narrow_source(self) -> str:
        """The narrow version as a data URI, empty without one."""
        return data_uri(self.narrow_svg) if self.narrow_svg else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page under a heading."""

    heading: str
    text: tuple[str, ...] = ()
    """Paragraphs."""
    points: tuple[str, ...] = ()
    """Entries of a list."""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    """Paragraphs in small type at the end of the section."""


def data_uri(svg: Path) -> str:
    """Return an SVG file as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode()


def write_page(
    title: str, sections: Sequence[Section], *, out: str | os.PathLike[str], refresh_seconds: int = 0
) -> Path:
    """Write `out`/index.html and return its path; all text is escaped.

    With `refresh_seconds` a browser reloads the page at this interval.
    """
    # No blank lines from statements; a name that the template lacks is an error.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    path = Path(out) / "index.html"
    template = environment.get_template("report.html")
    write_text(path, template.render(title=title, sections=sections, refresh=refresh_seconds))
    return path


def write_report(run_dirs: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str]) -> int:
    """Write a report on any number of runs to the folder `out`, print its path, and return exit code 0.

    Directories without a run or an epoch, and damaged ones, are skipped with a note. Raises RefusedError if no run is
    left, or `out` cannot be written.
    """
    runs = readable_runs(run_dirs)
    path = write_report_page(runs, out=Path(out))
    print(f"report on {plural(len(runs), 'run')}: {path}")
    return 0


def watch_report(run_dirs: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str], seconds: int) -> int:
    """Rewrite the report after each epoch of a run, until no job works on any of them; return exit code 0.

    The page reloads itself in the browser meanwhile. Runs may be without an epoch yet. Raises UsageError if `seconds`
    is invalid, and RefusedError if no job is working and no run can be read, or `out` cannot be written.
    """
    if seconds < 1:
        raise UsageError(f"--watch ({seconds}) must be at least 1 second")
    places, written = [Path(place) for place in run_dirs], None
    while True:
        running = any(doing(place) == "running" for place in places)
        now = (running, [is_run(place) and progress_of(place) for place in places])
        ready = [place for place in places if has_epoch(place)]
        if now != written and (ready or not running):
            runs = readable_runs(ready if running else places)
            path = write_report_page(runs, out=Path(out), refresh_seconds=seconds if running else 0)
            print(f"{time.strftime('%H:%M:%S')} report on {plural(len(runs), 'run')}: {path}", flush=True)
            written = now
        if not running:
            return 0
        time.sleep(seconds)


def write_report_page(runs: Sequence[Run], *, out: Path, refresh_seconds: int = 0) -> Path:
    """Write figures, CSV files and the page to the folder `out`; return the page's path."""
    groups = group_by_seed(runs)
    for name, rows in (("runs", tables.run_rows), ("epochs", tables.epoch_rows), ("votes", tables.vote_rows)):
        write_text(out / "data" / f"{name}.csv", to_csv(rows(groups)))
    several = [run for run in runs if run.metrics[-1].get("models")]
    note = "The accuracy of a run is the mean over its models."
    models = Section(heading="Models", tables=tuple(map(tables.models_table, several)), notes=(note,))
    last = (tables.command_table(groups), tables.environment_table(groups))
    sections = [
        summary_section(groups),
        *([accuracy_section(runs, out=out)] if any(map(answers_classes, runs)) else []),
        *([models] if models.tables else []),
        phase_section(runs, groups, out=out),
        *cut_sections(runs, out=out),
        Section(heading="Commands and environment", tables=last),
    ]
    title = f"hvfreeze: report on {plural(len(runs), 'run')}"
    return write_page(title, sections, out=out, refresh_seconds=refresh_seconds)


def answers_classes(run: Run) -> bool:
    """Return False for a run on numbers, which has no accuracy."""
    return not run.finished or not math.isnan(run.test_accuracy)


def summary_section(groups: Sequence[Group]) -> Section:
    """Return the section with the results of the runs."""
    compared = [(group, compare(group, groups)) for group in groups]
    held_out = [group.runs[0].settings["validation_fraction"] > 0 for group in groups]
    where = "on held-out samples" if all(held_out) else "on the test set"
    if any(held_out) and not all(held_out):
        where += ", or on held-out samples with --validation-fraction"
    notes = [f"Accuracy: {where}, after the last epoch. Training time: without evaluation and set-up."]
    if any(len(group.runs) > 1 for group in groups):
        notes.append("Runs that differ only in the seed share a row: mean (lowest to highest).")
    if any(comparison for _, comparison in compared):
        notes.append(
            "Speed-up and time saved: compared with the run without freezing and cache that has the same data, "
            "model, epochs, batch size, ranks and machine, and the same seed if there is one."
        )
    notes.append("Allreduce: gradients that one rank sent to be averaged. 1 MB is 10^6 bytes.")
    return Section(
        heading="Summary",
        points=tuple(headline(group, comparison) for group, comparison in compared if comparison),
        tables=(tables.summary_table(groups),),
        notes=(" ".join(notes),),
    )


def headline(group: Group, comparison: Comparison) -> str:
    """Return the result of a comparison in one sentence, with both forms of the gain."""
    speed_up, saved = comparison.speed_up, comparison.time_saved
    ours, theirs = (tables.accuracy_of_group(each) for each in (group, comparison.baseline))
    change = f"{percent(abs(saved.mean))} {'less' if saved.mean >= 0 else 'more'} training time"
    gain = f"speed-up {shown(speed_up, factor)} over {comparison.baseline.name}, {change}, n = {speed_up.n}"
    return f"{group.name}: {gain}; accuracy {ours} against {theirs}."


def accuracy_section(runs: Sequence[Run], *, out: Path) -> Section:
    """Return the section with accuracy against training time."""
    caption = f"Test accuracy against training time, one point per epoch; {number_of_runs(runs)}."
    if len(group_by_seed(runs)) < len(runs):
        caption += " Thick lines: mean of time and accuracy per epoch; thin lines: single runs."
    shares = sorted({f"{percent(share)}" for run in runs if (share := run.balance[1]) is not None})
    if shares:
        caption += f" Classes are unbalanced: always answering the largest class is {', '.join(shares)} accurate."
    picture = draw(figures.plot_accuracy_against_time, runs, name="accuracy-against-time", caption=caption, out=out)
    return Section(heading="Accuracy against time", pictures=(picture,))


def phase_section(runs: Sequence[Run], groups: Sequence[Group], *, out: Path) -> Section:
    """Return the section with the seconds by phase."""
    caption = "Training time of rank 0 by phase (allreduce: communication time not hidden by the backward pass); "
    caption += f"{number_of_runs(runs)}."
    picture = draw(figures.plot_phases, runs, name="phases", caption=caption, out=out)
    return Section(heading="Where the time goes", pictures=(picture,), tables=(tables.phase_table(groups),))


def cut_sections(runs: Sequence[Run], *, out: Path) -> list[Section]:
    """Return the sections with cuts and votes; empty if no run froze a block or voted."""
    moving = [run for run in runs if run.decisions or run.final_cut > 0]
    if not moving:
        return []
    caption = (
        "The cut (number of frozen blocks) and the proposal of each rank at every vote (marks of one vote are side "
        "by side); n = 1 run per panel."
    )
    if len(moving) > figures.MOST_PANELS:
        caption += f" Shows the first {figures.MOST_PANELS} of {len(moving)} runs."
    pictures = [draw(figures.plot_cuts, moving, name="cuts", caption=caption, out=out)]
    if weighed := [run for run in moving if any(line.get("gains") for line in run.decisions)]:
        caption = (
            "Each block's share of the gain of a step on unseen samples, first block at the bottom, estimated at "
            "each vote from the agreement of gradients; mean over ranks; n = 1 run per panel."
        )
        pictures.append(draw(figures.plot_gains, weighed, name="gains", caption=caption, out=out))
    voting = [run for run in moving if run.decisions]
    # Each run's table is collapsed if all together are longer than a screen.
    folded = sum(len(run.decisions) for run in voting) > 24
    votes = tuple(replace(tables.vote_table(run), folded=folded) for run in voting)
    note = (
        "Proposals and weights are in rank order. Support: share of the weight that proposed this cut or a deeper "
        "one. A vote chooses the deepest cut whose support reaches the quorum."
    )
    return [Section(heading="Votes and cuts", pictures=tuple(pictures), tables=votes, notes=(note,) if voting else ())]


def number_of_runs(runs: Sequence[Run]) -> str:
    """Return n for a caption."""
    sizes = sorted({len(group.runs) for group in group_by_seed(runs)})
    upper = f" to {sizes[-1]}" if len(sizes) > 1 else ""
    return f"n = {sizes[0]}{upper} {'run' if sizes == [1] else 'runs'} each"


def draw(plot: Callable[..., Figure], runs: Sequence[Run], *, name: str, caption: str, out: Path) -> Picture:
    """Write a figure at page and at phone width, and return it for the page."""
    base = out / "figures" / name
    svg = figures.save_figure(plot(runs, width=figures.WIDE), base)
    narrow = figures.save_figure(plot(runs, width=figures.NARROW), base.with_name(f"{name}-narrow"))
    files = tuple(f"figures/{name}.{suffix}" for suffix in ("png", "svg"))
    return Picture(caption=caption, svg=svg, narrow_svg=narrow, files=files)
