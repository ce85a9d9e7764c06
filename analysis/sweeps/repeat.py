"""Repeats kept runs in another folder, and compares their results with the kept ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analysis.sweeps.kept import IDENTITY, KeptRuns, Line, without_checkpoints
from analysis.sweeps.launching import Site, launch
from analysis.sweeps.presets import PlannedRun
from hvfreeze.errors import UsageError
from hvfreeze.report.tables import percent, seconds

LONGEST = 24 * 3600.0
"""Seconds; a repeated run may be on a far slower machine."""


def repeat(runs: KeptRuns, names: Sequence[str], site: Site) -> bool:
    """Make these runs with the settings that are kept, print what came of each; tell whether all accuracies are kept's.

    Their directories are removed; the kept results stay as they are.

    Raises:
        UsageError: a name is not kept, or a run wants --data-dir or --weights and has none; no run was begun.
        RefusedError: a run failed.
    """
    planned = [planned_as(runs, name) for name in names]
    for run in planned:
        check_site(run, site)
    site = replace(site, work=site.work / "repeated")
    agree = True
    for run in planned:
        print(f"{run.name}: made again ...", flush=True)
        shutil.rmtree(site.work / run.name, ignore_errors=True)
        run_dir = launch(run, site, timeout=LONGEST)
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        environment = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
        shutil.rmtree(run_dir)
        line = runs.lines[run.name]
        same = summary["test_accuracy"] == line["summary"]["test_accuracy"]
        agree = agree and same
        print(compared(line, runs.environments[line["environment"]], summary, environment), flush=True)
    return agree


def planned_as(runs: KeptRuns, name: str) -> PlannedRun:
    """Return the plan of a kept run.

    Raises:
        UsageError: none of that name is kept.
    """
    if name not in runs.lines:
        some = ", ".join(list(runs.lines)[:5])
        raise UsageError(f"--repeat ({name}) must name a run of {runs.path}, such as {some}")
    line = runs.lines[name]
    return PlannedRun(**{key: line[key] for key in IDENTITY})


def check_site(run: PlannedRun, site: Site) -> None:
    """Raise UsageError if a run needs data or weights that were not given.

    Raises:
        UsageError: they are missing.
    """
    if run.flags.get("weights", "none") != "none":
        if site.weights is None:
            raise UsageError(f"--repeat {run.name} wants --weights {run.flags['weights']}, which must be given")
        wanted = site.weights.with_name(str(run.flags["weights"]))
        if not wanted.is_file():
            raise UsageError(f"--weights ({site.weights}) must be next to {wanted.name}, which {run.name} begins with")
    if site.data_dir is None and run.flags.get("data") not in ("digits", "text"):
        raise UsageError(f"--repeat {run.name} wants --data-dir, where its data lie ({run.flags.get('data')})")


def compared(line: Line, before: Line, summary: dict[str, Any], environment: dict[str, Any]) -> str:
    """Return in words the result of a run, compared with the recorded one."""
    kept, now = line["summary"]["test_accuracy"], summary["test_accuracy"]
    times = [without_checkpoints(found)["train_seconds"] for found in (line["summary"], summary)]
    bits = [found.get("parameter_digest") for found in (line["summary"], summary)]
    if kept == now:
        equal = ", and every bit of its parameters" if bits[0] and bits[0] == bits[1] else ""
        words = f"{percent(now)} of the test samples are right, as is kept{equal}"
    else:
        words = f"{percent(now)} of the test samples are right, {percent(kept)} are kept"
        if family(before) != family(environment):
            words += (
                f"; sums are rounded otherwise on another processor ({family(before)} there, {family(environment)})"
            )
        else:
            words += f"; the kept run was made by source {line['commit'] or 'unknown'}, check that out to repeat it"
    return f"{line['run']}: {words}; training took {seconds(times[1])}, {seconds(times[0])} there ({family(before)})"


def family(environment: dict[str, Any]) -> str:
    """Return what decides how sums are rounded: the processor and its instructions."""
    return ", ".join(environment[key] for key in ("processor", "capability") if key in environment)
