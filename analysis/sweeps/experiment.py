"""An experiment: a question, the runs that answer it, and what is made of their rows, the page in its folder included.

RESULTS/<experiment>/README.md      answers, figure, tables, limits, and how it was made
RESULTS/<experiment>/figures/*.svg
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from analysis.sweeps.kept import PRESETS, ROWS, RUNS, VERSIONS, Row, by_name, locked, publish, publish_by_name
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import Table
from hvfreeze.wording import plural

MOST_WORDS = 35
"""In a claim, numbers and signs between blanks counted too."""


@dataclass(frozen=True)
class Answer:
    """A question, answered by a claim that a reader takes in at once."""

    question: str
    text: str
    """The claim: at most `MOST_WORDS` words and one number with its interval, or two that are compared."""
    n: int
    negative: bool = False
    """Whether the method did not keep what one would hope of it: the whole interval says so, not its middle."""
    undecided: bool = False
    """Whether the runs are too few or too much alike to answer it."""
    details: tuple[str, ...] = ()
    """What else was measured, a sentence each; the experiment's own page lists them below the claim."""

    @property
    def mark(self) -> str:
        """What stands before an answer that is no success; empty where nothing does."""
        return "negative" if self.negative else "no answer yet" if self.undecided else ""


@dataclass(frozen=True)
class Drawing:
    """A figure of an experiment."""

    name: str
    caption: str
    figure: Figure


def nothing_more(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return no further runs."""
    return []


@dataclass(frozen=True)
class Experiment:
    """A named set of runs, and what is made of their rows. The last three take results that may be incomplete."""

    name: str
    title: str
    runs: Callable[[Preset], list[PlannedRun]]
    answers: Callable[[Results], list[Answer]]
    tables: Callable[[Results], list[Table]]
    drawings: Callable[[Results], list[Drawing]]
    limits: tuple[str, ...]
    """What the results do not show, one sentence each."""
    chooses_lr: bool = False
    """Whether its first runs choose the learning rate of the others, instead of the baseline's."""
    reference: str = ""
    """The label of full fine-tuning among its runs, on their own data; empty where there is no one such label."""
    shown: int = 1
    """How many of the tables its README.md shows; the page of all experiments shows all."""
    then: Callable[[Preset, Results], list[PlannedRun]] = nothing_more
    """Runs that depend on what the first ones gave."""
    then_waits: bool = True
    """Whether they depend on all of them; else each is planned as soon as those are there that it depends on."""
    own_seeds: bool = False
    """Whether it has seeds of its own in place of the preset's, but for smoke."""
    one_factor: bool = True
    """Whether runs have the preset's flags but for one; else a table tells their own."""


def is_complete(directory: Path) -> bool:
    """Tell whether an experiment's folder holds rows and what they were made with."""
    return (directory / ROWS).exists() and directory.name in by_name(directory.parent / PRESETS)


def write_up(experiment: Experiment, preset: Preset, results: Results, *, made: bool) -> None:
    """Write figures and README.md, and where runs were made the preset; without rows, nothing."""
    if not results.rows:
        return
    captions = draw(experiment, results, results.directory)
    root = results.directory.parent
    with locked(root):
        presets = by_name(root / PRESETS)
        if made or experiment.name not in presets:
            used = {"preset": preset.name, "ranks": preset.ranks, "flags": preset.common()}
            used["weights_sha256"] = preset.weights_digest
            publish_by_name(root / PRESETS, {**presets, experiment.name: used})
    publish(results.directory / "README.md", readme(experiment, results, captions))


def draw(experiment: Experiment, results: Results, folder: Path) -> dict[str, str]:
    """Write the figures below `folder`; return each one's caption by its name."""
    drawings = experiment.drawings(results)
    for drawing in drawings:
        save_figure(drawing.figure, folder / "figures" / f"{drawing.name}.svg")
    return {drawing.name: drawing.caption for drawing in drawings}


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def readme(experiment: Experiment, results: Results, captions: dict[str, str]) -> str:
    """Return README.md, which shows the first figure and links to the others."""
    tables = experiment.tables(results)[: experiment.shown]
    pictures = ""
    if captions:
        name, *others = captions
        more = ", ".join(f"[{other}](figures/{other}.svg)" for other in others)
        pictures = f"![{name}](figures/{name}.svg)\n\n{captions[name]}" + (f" More: {more}.\n" if more else "\n")
    parts = [
        f"# {experiment.title}\n",
        "\n".join(entry(answer) for answer in experiment.answers(results)) + "\n",
        pictures,
        "\n".join((f"{table.title}\n\n" if table.title else "") + table.to_text() for table in tables),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in experiment.limits) + "\n",
        "## How it was made\n\n" + made(experiment, results),
    ]
    return "\n".join(part for part in parts if part.strip())


def claim(answer: Answer) -> str:
    """Return an answer's claim as a list entry; what did not work says so first."""
    return f"- {f'**({answer.mark})** ' if answer.mark else ''}**{answer.question}** {answer.text}"


def entry(answer: Answer) -> str:
    """Return an answer as a list entry, with its details as a list of their own."""
    return "\n".join([claim(answer), *(f"    - {detail}" for detail in answer.details)])


def made(experiment: Experiment, results: Results) -> str:
    """Return command, defaults, machine, versions and n."""
    settings = by_name(results.directory.parent / PRESETS)[experiment.name]
    flags = {key.replace("_", "-"): value for key, value in settings["flags"].items()}
    defaults = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
    weights = f" --weights {flags['weights']}" if "weights" in flags else ""
    around = f"defaults, of which one factor at a time is changed: `{defaults}`, " if experiment.one_factor else ""
    digest = settings["weights_sha256"]
    seeds = len({row["seed"] for row in results.rows})
    return (
        f"- `python -m analysis.{experiment.name} --preset {settings['preset']} --data-dir DIR{weights}`\n"
        f"- {around}{settings['ranks']} ranks\n"
        f"- {plural(len(results.rows), 'run')}, {plural(seeds, 'seed')}; brackets hold 95 % intervals (Student's t, "
        "paired by seed)\n"
        "- training time is that of rank 0 without set-up, evaluation and checkpoints\n"
        f"- {machines(results)}{f'; weights SHA-256 {digest[:16]}...' if digest else ''}\n"
        f"- {sources(results.rows)}\n"
        f"- numbers, and every run's source, time, machine and versions: [{ROWS}]({ROWS}); configurations and logs: "
        f"[{RUNS}]({RUNS})\n"
    )


def machines(results: Results) -> str:
    """Return the machines, with the number of runs of each where there are several, and the versions."""
    places = Counter(f"{results.machine(row)}, {row['threads']} thread a rank" for row in results.rows)
    told = (f"{place} ({plural(places[place], 'run')})" for place in sorted(places))
    versions = {", ".join(f"{name} {row[name]}" for name in VERSIONS) for row in results.rows}
    return f"{'; '.join(told)}; {'; '.join(sorted(versions))}"


def sources(rows: Sequence[Row]) -> str:
    """Return the commits that the runs were made from with the number of runs of each, and when they ended."""
    counts = Counter(str(row["commit"]) for row in rows if row["commit"])
    if not counts:
        return "the source is not known"
    listed = ", ".join(f"{source} ({count})" for source, count in counts.items())
    days = sorted({str(row["finished"])[:10] for row in rows if row["finished"]})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    old = sum(row["stamped"] == "history" for row in rows)
    told = f"; source and time of {plural(old, 'run')} as the repository's history has them" if old else ""
    return f"source (runs): {listed}; {when}{told}"
