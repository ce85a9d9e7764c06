"""Writes an experiment's folder: figures, and a README.md with the claim, its limits and how it was made."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from analysis.sweeps.presets import Preset
from analysis.sweeps.questions import Answer, Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.rows import ROWS, publish
from hvfreeze.report.style import save_figure
from hvfreeze.report.tables import Table
from hvfreeze.report.units import plural

VERSIONS = ("torch", "horovod", "mpi4py", "hvfreeze")


def write_up(experiment: Experiment, preset: Preset, results: Results) -> None:
    """Write figures and README.md beside the CSV file; without rows, nothing."""
    if not results.rows:
        return
    names = draw(experiment, results)
    publish(results.directory / "preset.json", json.dumps(settings_of(preset), indent=1) + "\n")
    publish(results.directory / "README.md", readme(experiment, results, names))


def settings_of(preset: Preset) -> dict[str, Any]:
    """Return the defaults around which the experiment changes one factor at a time."""
    return {
        "preset": preset.name,
        "ranks": preset.ranks,
        "seeds": list(preset.seeds),
        "flags": preset.common(),
        "weights_sha256": preset.weights_digest,
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of the source, with "-dirty" where files differ from it; empty where that is not known."""
    try:
        known = git("rev-parse", "--short", "HEAD").strip()
        # Results change while they are being made.
        changed = git("status", "--porcelain", "--", ":/", ":!/analysis/results", ":!/README.md").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{known}-dirty" if changed else known


def git(*arguments: str) -> str:
    """Return what git says about this source."""
    where = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout


def draw(experiment: Experiment, results: Results) -> dict[str, str]:
    """Write the figures as PNG and SVG; returns each one's caption by its name."""
    captions = {}
    for drawing in experiment.drawings(results):
        save_figure(drawing.figure, results.directory / "figures" / drawing.name)
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
    return f"- {'**(negative)** ' if answer.negative else ''}**{answer.question}** {answer.text}"


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
    settings = json.loads((results.directory / "preset.json").read_text(encoding="utf-8"))
    flags = {key.replace("_", "-"): value for key, value in settings["flags"].items()}
    defaults = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
    weights = f" --weights {flags['weights']}" if "weights" in flags else ""
    machine, versions = environment_of(results)
    digest = settings["weights_sha256"]
    source = f"; source {settings['commit']}" if settings["commit"] else ""
    seeds = len({row["seed"] for row in results.rows})
    return (
        f"- `python -m analysis.{experiment.name} --preset {settings['preset']} --data-dir DIR{weights}`\n"
        f"- defaults, of which one factor at a time is changed: `{defaults}`, {settings['ranks']} ranks\n"
        f"- {plural(len(results.rows), 'run')}, {plural(seeds, 'seed')}; brackets hold 95 % intervals (Student's t, "
        "paired by seed)\n"
        f"- {machine}; {versions}{source}{f'; weights SHA-256 {digest[:16]}...' if digest else ''}\n"
        f"- numbers: [{ROWS}]({ROWS}); every run's configuration and logs: runs/\n"
    )


def environment_of(results: Results) -> tuple[str, str]:
    """Return the machine and the versions that the runs had, each in a line."""
    machines, versions = set(), set()
    for run in results.runs.values():
        known = run.environment
        machines.add(f"{known.get('processor')}, {known.get('cores')} cores, {known.get('threads')} thread a rank")
        held = known.get("versions", {})
        versions.add(", ".join(f"{name} {held.get(name)}" for name in VERSIONS))
    return "; ".join(sorted(machines)), "; ".join(sorted(versions))


def is_complete(directory: Path) -> bool:
    """Tell whether an experiment's folder holds rows and what they were made with."""
    return (directory / ROWS).exists() and (directory / "preset.json").exists()
