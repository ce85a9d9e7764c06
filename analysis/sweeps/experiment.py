"""Carries an experiment out: what is done is not done again, what was killed goes on, and results are always whole.

    python -m analysis.NAME --preset reduced --data-dir DIR --weights FILE
    python -m analysis.NAME --seeds 3,4               more seeds beside those that are there
    python -m analysis.NAME --estimate                how many runs, how long

A finished run's small logs lie in RESULTS/NAME/runs/; they are what counts as done. Where another experiment has made
the very same run, its logs are copied. Checkpoints, weights and caches lie under --work, and only until their run has
finished.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analysis.sweeps.estimates import Progress, duration, seconds_of
from analysis.sweeps.kept import borrow, is_kept, keep, of_other_seeds
from analysis.sweeps.launching import Site, launch, require_cluster
from analysis.sweeps.presets import PRESETS, PlannedRun, Preset
from analysis.sweeps.provenance import commit
from analysis.sweeps.questions import Experiment, nothing_more
from analysis.sweeps.results import Results, best_lr, open_results
from analysis.sweeps.rows import Row, collect, read_rows, write_rows
from analysis.sweeps.writeup import write_up
from hvfreeze.errors import HvfreezeError, UsageError

RESULTS = Path(__file__).resolve().parents[1] / "results"
WORK = Path("build") / "experiments"
PATIENCE = 20.0
"""A run that takes this many times its estimate hangs."""


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment's command line and return its exit code: 0 done, 1 some runs failed, else as `hvfreeze`."""
    options = parse(experiment, arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        preset = preset_of(options, root=options.results)
        if options.estimate:
            print(estimate(experiment, preset))
            return 0
        require_lr(options, experiment, root=options.results)
        site = site_of(options, experiment, preset)
        return carry_out(experiment, preset, site, root=options.results, only=options.only)
    except HvfreezeError as error:
        print(f"{experiment.name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{experiment.name}: interrupted; the same command goes on", file=sys.stderr)
        return 130


def parse(experiment: Experiment, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{experiment.name}", description=experiment.title)
    data = os.environ.get("HVFREEZE_DATA")
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="reduced")
    add("--data-dir", type=Path, default=Path(data) if data else None, help="where CIFAR-10 lies [$HVFREEZE_DATA]")
    add("--weights", type=Path, help="state_dict to start from; the preset's results are about a pretrained model")
    add("--ranks", type=int, help="instead of the preset's")
    add("--lr", type=float, help="instead of what the baseline experiment chose, or the preset's")
    add("--seeds", type=numbers, metavar="N[,N]", help="instead of the preset's; runs with other seeds stay")
    add("--hosts", default="", help="HOST:SLOTS,... instead of this machine; they must see the same folders")
    add("--work", type=Path, help=f"run directories under way [{WORK}/{experiment.name}/PRESET]")
    add("--results", type=Path, help="folder of all experiments' results [analysis/results; not for smoke, full]")
    add("--only", type=labels, metavar="LABEL[,LABEL]", help="make these runs only; the rest another time")
    add("--estimate", action="store_true", help="say how long it will take, and do nothing")
    options = parser.parse_args(arguments)
    options.work = options.work or WORK / experiment.name / options.preset
    options.results = options.results or default_results(options.preset)
    return options


def labels(text: str) -> tuple[str, ...]:
    """Return a comma-separated list as its words."""
    return tuple(word.strip() for word in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Return a comma-separated list as its numbers, each once."""
    return tuple(dict.fromkeys(int(word) for word in text.split(",")))


def default_results(preset: str) -> Path:
    """Return where a preset's results go: those of `reduced` are part of the repository."""
    return {"smoke": WORK / "smoke-results", "full": RESULTS / "full"}.get(preset, RESULTS)


def preset_of(options: argparse.Namespace, *, root: Path) -> Preset:
    """Return the preset with what the command line says otherwise."""
    preset = PRESETS[options.preset]
    if options.ranks is not None:
        preset = replace(preset, ranks=options.ranks)
    if options.seeds is not None:
        preset = replace(preset, seeds=options.seeds)
    if options.weights is not None:
        digest = hashlib.sha256(options.weights.read_bytes()).hexdigest() if options.weights.is_file() else ""
        preset = replace(preset, weights=options.weights.name, weights_digest=digest)
    found = best_lr(read_rows(root / "baseline"))
    return replace(preset, lr=options.lr if options.lr is not None else found or preset.lr)


def require_lr(options: argparse.Namespace, experiment: Experiment, *, root: Path) -> None:
    """Refuse to begin with a learning rate that nobody chose.

    Raises:
        UsageError: the results hold no baseline that chose one, and none was given.
    """
    if options.preset == "smoke" or experiment.chooses_lr or options.lr is not None:
        return
    if best_lr(read_rows(root / "baseline")) is None:
        raise UsageError(
            f"--results ({root}) holds no baseline, which chooses the learning rate of this experiment; run "
            f"python -m analysis.baseline with the same --results first, or give --lr (the kept results have 0.05)"
        )


def site_of(options: argparse.Namespace, experiment: Experiment, preset: Preset) -> Site:
    """Return where the runs find what they need.

    Raises:
        UsageError: the data or the weights are not there.
    """
    if options.weights is not None and not options.weights.is_file():
        raise UsageError(f"--weights ({options.weights}) must be a file")
    if options.data_dir is not None and preset.data != "digits" and not options.data_dir.is_dir():
        raise UsageError(f"--data-dir ({options.data_dir}) must be a folder")
    data_dir = None if preset.data == "digits" else options.data_dir
    return Site(work=options.work, data_dir=data_dir, weights=options.weights, hosts=options.hosts)


def estimate(experiment: Experiment, preset: Preset) -> str:
    """Return the number of runs and how long they will take."""
    planned = plan(experiment, preset, Results(Path()))
    seconds = sum(seconds_of(run, preset) for run in planned)
    return (
        f"{experiment.name} ({preset.name}): {len(planned)} runs, about {duration(seconds)} on {os.cpu_count()} cores"
    )


def plan(experiment: Experiment, preset: Preset, results: Results) -> list[PlannedRun]:
    """Return all runs, each checked and each name once.

    Raises:
        UsageError: a flag is not acceptable, or two different runs have one name.
    """
    planned = [*experiment.runs(preset), *experiment.then(preset, results)]
    by_name: dict[str, PlannedRun] = {}
    for run in planned:
        run.config()
        if by_name.setdefault(run.name, run) != run:
            raise UsageError(f"experiment {experiment.name} has two different runs of the name {run.name}")
    return list(by_name.values())


def carry_out(
    experiment: Experiment, preset: Preset, site: Site, *, root: Path, only: Sequence[str] | None = None
) -> int:
    """Make the runs that are missing, and write the results; returns 1 when some failed.

    Raises:
        UsageError: no run has a label that is in `only`.
    """
    directory = root / experiment.name
    print(estimate(experiment, preset), flush=True)
    first = experiment.runs(preset)
    before = kept_names(directory)
    failed = make(first, preset, site, directory, only=only)
    planned = plan(experiment, preset, open_results(root, experiment.name, experiment.reference))
    unknown = sorted(set(only or ()) - {run.label for run in planned})
    if unknown:
        raise UsageError(f"--only ({','.join(unknown)}) must name labels: {', '.join({r.label: 0 for r in planned})}")
    if all(run.name in kept_names(directory) for run in first) or experiment.then is nothing_more:
        failed += make([run for run in planned if run.name not in failed], preset, site, directory, only=only)
    elif {run.label for run in planned if only is None or run.label in only} - {run.label for run in first}:
        print(f"{experiment.name}: the other runs depend on these, which are not all there yet", file=sys.stderr)
    results = open_results(root, experiment.name, experiment.reference)
    write_up(experiment, preset, results, made=kept_names(directory) != before)
    print(f"results: {directory}")
    if failed:
        print(f"{experiment.name}: error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def make(
    planned: Sequence[PlannedRun], preset: Preset, site: Site, directory: Path, *, only: Sequence[str] | None = None
) -> list[str]:
    """Make the runs that are missing, keeping the CSV file up to date; returns the names of those that failed.

    Raises:
        UsageError: runs on nodes are missing, and there cannot be a local cluster; no run was begun.
    """
    chosen = [run for run in planned if only is None or run.label in only]
    kept = [run.name for run in planned if is_kept(run, directory / "runs" / run.name)]
    kept += [run.name for run in chosen if run.name not in kept and borrow(run, directory)]
    wanted = [run for run in planned if run.name in kept or run in chosen]
    if any(run.nodes for run in wanted if run.name not in kept):
        require_cluster()
    source = commit()
    progress = Progress({run.name: seconds_of(run, preset) for run in wanted}, dict.fromkeys(kept, 0.0))
    others = of_other_seeds(planned, directory)
    rows = collect(directory, [*kept, *others])
    write_rows(directory, rows)
    failed: list[str] = []
    for run in wanted:
        if run.name in progress.done:
            continue
        print(progress.line(run), flush=True)
        started = time.monotonic()
        try:
            run_dir = launch(run, site, timeout=600 + PATIENCE * progress.estimates[run.name])
        except HvfreezeError as error:
            print(f"  {error}", file=sys.stderr, flush=True)
            failed.append(run.name)
        else:
            keep(run_dir, run, directory / "runs" / run.name, source=source)
            shutil.rmtree(run_dir)
            rows = in_order([*rows, *collect(directory, [run.name])], planned)
            write_rows(directory, rows)
        progress.done[run.name] = time.monotonic() - started
    return failed


def kept_names(directory: Path) -> set[str]:
    """Return the names of all runs whose logs are kept."""
    return {path.parent.name for path in directory.glob("runs/*/summary.json")}


def in_order(rows: Sequence[Row], planned: Sequence[PlannedRun]) -> list[Row]:
    """Return the rows in the order in which their runs were planned, those of other seeds behind them."""
    places = {run.name: place for place, run in enumerate(planned)}
    return sorted(rows, key=lambda row: places.get(row["run"], len(places)))
