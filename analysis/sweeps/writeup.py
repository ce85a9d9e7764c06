"""Writes an experiment's folder: figures, and a README.md with the claim, its limits and how it was made."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.sweeps.presets import Preset
from analysis.sweeps.provenance import VERSIONS
from analysis.sweeps.questions import Answer, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.rows import ROWS, Row, publish
from hvfreeze.report.style import save_figure
from hvfreeze.report.tables import Table
from hvfreeze.report.units import plural

SETTINGS = "preset.json"
"""What the experiment was made with, besides what every run keeps of its own."""


def write_up(experiment: Experiment, preset: Preset, results: Results, *, made: bool) -> None:
    """Write figures and README.md beside the CSV file, and where runs were made with what; without rows, nothing."""
    if not results.rows:
        return
    names = draw(experiment, results, results.directory)
    if made or not (results.directory / SETTINGS).exists():
        publish(results.directory / SETTINGS, json.dumps(settings_of(preset), indent=1) + "\n")
    publish(results.directory / "README.md", readme(experiment, results, names))


def settings_of(preset: Preset) -> dict[str, Any]:
    """Return the defaults around which the experiment changes one factor at a time."""
    return {
        "preset": preset.name,
        "ranks": preset.ranks,
        "flags": preset.common(),
        "weights_sha256": preset.weights_digest,
    }


def draw(experiment: Experiment, results: Results, folder: Path) -> dict[str, str]:
    """Write the figures as PNG and SVG below `folder`; returns each one's caption by its name."""
    captions = {}
    for drawing in experiment.drawings(results):
        save_figure(drawing.figure, folder / "figures" / drawing.name)
        captions[drawing.name] = drawing.caption
    return captions


def readme(experiment: Experiment, results: Results, figures: dict[str, str]) -> str:
    """Return README.md."""
    answers = experiment.answers(results)
    parts = [
        f"# {experiment.title}\n",
        "\n".join(claim(answer) for answer in answers) + "\n",
        pictures(figures),
        "\n".join(f"{titled(table)}{table.to_text()}" for table in experiment.tables(results)[: experiment.shown]),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in experiment.limits) + "\n",
        "## How it was made\n\n" + made(experiment, results),
    ]
    return "\n".join(part for part in parts if part.strip())


def claim(answer: Answer) -> str:
    """Return an answer as a list entry; what did not work says so first."""
    return f"- {f'**({answer.mark})** ' if answer.mark else ''}**{answer.question}** {answer.text}"


def pictures(figures: dict[str, str]) -> str:
    """Return the first figure with its caption, and links to the others."""
    if not figures:
        return ""
    name, caption = next(iter(figures.items()))
    more = ", ".join(f"[{other}](figures/{other}.svg)" for other in list(figures)[1:])
    return f"![{name}](figures/{name}.svg)\n\n{caption}" + (f" More: {more}.\n" if more else "\n")


def titled(table: Table) -> str:
    """Return what stands above a table."""
    return f"{table.title}\n\n" if table.title else ""


def made(experiment: Experiment, results: Results) -> str:
    """Return command, defaults, machine, versions and n."""
    settings = json.loads((results.directory / SETTINGS).read_text(encoding="utf-8"))
    flags = {key.replace("_", "-"): value for key, value in settings["flags"].items()}
    defaults = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
    weights = f" --weights {flags['weights']}" if "weights" in flags else ""
    digest = settings["weights_sha256"]
    seeds = len({row["seed"] for row in results.rows})
    return (
        f"- `python -m analysis.{experiment.name} --preset {settings['preset']} --data-dir DIR{weights}`\n"
        f"- defaults, of which one factor at a time is changed: `{defaults}`, {settings['ranks']} ranks\n"
        f"- {plural(len(results.rows), 'run')}, {plural(seeds, 'seed')}; brackets hold 95 % intervals (Student's t, "
        "paired by seed)\n"
        "- training time is that of rank 0 without set-up, evaluation and checkpoints\n"
        f"- {machines(results.rows)}{f'; weights SHA-256 {digest[:16]}...' if digest else ''}\n"
        f"- {sources(results.rows)}\n"
        f"- numbers, and every run's source, time, machine and versions: [{ROWS}]({ROWS}); configurations and logs: "
        "runs/\n"
    )


def machines(rows: Sequence[Row]) -> str:
    """Return the machines and the versions that the runs had."""
    places = {f"{row['processor']}, {row['cores']} cores, {row['threads']} thread a rank" for row in rows}
    versions = {", ".join(f"{name} {row[name]}" for name in VERSIONS) for row in rows}
    return f"{'; '.join(sorted(places))}; {'; '.join(sorted(versions))}"


def sources(rows: Sequence[Row]) -> str:
    """Return the commits that the runs were made from with the number of runs of each, and when they ended."""
    counts = Counter(str(row["commit"]) for row in rows if row["commit"])
    if not counts:
        return "the source is not known"
    listed = ", ".join(f"{source} ({count})" for source, count in counts.items())
    days = sorted({str(row["finished"])[:10] for row in rows if row["finished"]})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    told = "; source and time of {} as the repository's history has them".format
    old = sum(row["stamped"] == "history" for row in rows)
    return f"source (runs): {listed}; {when}{told(plural(old, 'run')) if old else ''}"


def is_complete(directory: Path) -> bool:
    """Tell whether an experiment's folder holds rows and what they were made with."""
    return (directory / ROWS).exists() and (directory / SETTINGS).exists()
