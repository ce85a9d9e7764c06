"""An experiment: the runs that answer a question, and what its page in analysis/pages may name."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from analysis.sweeps.kept import PRESETS, RUNS, VERSIONS, Row, by_name, locked, publish_by_name
from analysis.sweeps.pages import Page, Words
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results, open_results
from hvfreeze.wording import plural


def nothing_more(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return no further runs."""
    return []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A named set of runs, and the page and figures of their rows."""

    name: str
    runs: Callable[[Preset], list[PlannedRun]]
    words: Callable[[Results], Words] = lambda results: {}
    """The names that the page uses, besides the methods of `Results`."""
    drawings: Callable[[Results], Mapping[str, Figure]] = lambda results: {}
    chooses_lr: bool = False
    """Whether its first runs choose the learning rate of the others, instead of the baseline's."""
    reference: str = ""
    """The label of full fine-tuning among its runs, on their own data; empty where there is no one such label."""
    then: Callable[[Preset, Results], list[PlannedRun]] = nothing_more
    """Runs that depend on what the first ones gave."""
    then_waits: bool = True
    """Whether they depend on all of them. If not, a run is planned when the runs that it depends on exist."""
    own_seeds: bool = False
    """Whether it has other seeds than the preset, except for smoke."""
    one_factor: bool = True
    """Whether runs differ from the preset in one flag. If not, a table lists their flags."""

    module: str = ""
    """The module of `analysis` that takes its name as an argument; empty if the module has its name."""

    @property
    def command(self) -> str:
        """The words after `python -m` that run it."""
        return f"analysis.{self.module} {self.name}" if self.module else f"analysis.{self.name}"

    @property
    def page(self) -> Page:
        """The page of its results."""

        def words(root: Path) -> Words:
            results = self.open(root)
            methods = {name: getattr(results, name) for name in vars(Results) if callable(vars(Results)[name])}
            return {
                **methods,
                "labels": results.labels,
                "rows": results.rows,
                "made": made(self, results),
                **self.words(results),
            }

        return Page(self.name, words, lambda root: self.drawings(self.open(root)))

    def open(self, root: Path) -> Results:
        """Return its results, with the front that its own budgets of epochs give, else the baseline's."""
        return open_results(root, self.name, self.reference)


def write_up(experiment: Experiment, preset: Preset, root: Path, *, made: bool, whole: bool) -> None:
    """Where runs were made write the preset, and once the `whole` is there figures and README.md."""
    if not (root / experiment.name / RUNS).exists():
        return
    with locked(root):
        presets = by_name(root / PRESETS)
        if made or experiment.name not in presets:
            used = {"preset": preset.name, "ranks": preset.ranks, "flags": preset.common()}
            used["weights_sha256"] = preset.weights_digest
            publish_by_name(root / PRESETS, {**presets, experiment.name: used})
    if whole and not preset.is_smoke:
        experiment.page.write(root)
    else:
        print(f"{experiment.name}: the page is not written: it needs all runs of a preset larger than smoke")


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
        "## How it was made\n\n"
        f"- `python -m {experiment.command} --preset {settings['preset']} --data-dir DIR{weights}`\n"
        f"- {around}{settings['ranks']} ranks\n"
        f"- {plural(len(results.rows), 'run')}, {plural(seeds, 'seed')}; brackets hold 95 % intervals (Student's t, "
        "paired by seed)\n"
        "- training time is that of rank 0 without set-up, evaluation and checkpoints\n"
        f"- {machines(results)}{f'; weights SHA-256 {digest[:16]}...' if digest else ''}\n"
        f"- {sources(results.rows)}\n"
        "- numbers, configurations and logs of every run, with its source, time, machine and versions: "
        f"[{RUNS}]({RUNS})"
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
