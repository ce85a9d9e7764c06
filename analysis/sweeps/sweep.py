"""Run an experiment: skip finished runs, continue killed ones, and keep results complete.

    python -m analysis.NAME --preset reduced --data-dir DIR --weights FILE
    python -m analysis.NAME --seeds 3,4               more seeds than the finished ones
    python -m analysis.NAME --estimate                how many runs, how long
    python -m analysis.NAME --repeat RUN              a kept run once more, and whether it comes to the same

A finished run is a line of RESULTS/NAME/runs.jsonl; that is what counts as done. Where another experiment has made the
very same run, its line is copied. Run directories lie under --work, and only until their run has finished.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.sweeps.experiment import Experiment, nothing_more, write_up
from analysis.sweeps.kept import PRESETS as PRESETS_FILE
from analysis.sweeps.kept import RESULTS, KeptRuns, by_name, commit
from analysis.sweeps.launching import Site, begins_anew, bits_per_second, launch, require_cluster
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.presets import FULL, PRESETS, PlannedRun, Preset
from analysis.sweeps.repeat import repeat
from analysis.sweeps.results import Results, best_lr
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError

WORK = Path("build") / "experiments"
SMOKE_RESULTS = WORK / "smoke-results"
"""Results folder of presets that only check that everything runs."""
PATIENCE = 20.0
"""A run that takes this many times its estimate hangs."""
FORWARD_SECONDS, BACKWARD_SECONDS = 0.06 / 128, 0.15 / 128
"""Per sample at 32 pixels: ResNet-18, float32, one thread of a common server; backward with the optimizer's step."""
GROWTH = 1.74
"""Seconds grow with the image's side to this power."""
START_SECONDS = 6.0
MODEL_BYTES = 44.7e6
SMALL_MODEL = 0.04
"""Work of the smoke preset's model relative to ResNet-18."""
BLOCKS = {"paper": 6, "stage": 5, "residual": 9}


def main(experiment: Experiment, arguments: Sequence[str] | None = None, *, one_of: str = "") -> int:
    """Run an experiment's command line and return its exit code.

    0: done. 1: some runs failed, or their results differ from the kept ones. Others: as `hvfreeze`. `one_of` names the
    module that runs it as one of several, if any.
    """
    options = parse(experiment, arguments, one_of)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_counts(options, experiment)
        preset = preset_of(options, root=options.results)
        if options.estimate:
            print(estimate(experiment, preset))
            return 0
        site = site_of(options, preset)
        if options.repeat is not None:
            return 0 if repeat(KeptRuns(options.results / experiment.name), options.repeat, site) else 1
        require_lr(options, experiment, root=options.results)
        return carry_out(experiment, preset, site, root=options.results, only=options.only)
    except HvfreezeError as error:
        print(f"{experiment.name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{experiment.name}: interrupted; run the same command to continue", file=sys.stderr)
        return 130


def parse(experiment: Experiment, arguments: Sequence[str] | None, one_of: str = "") -> argparse.Namespace:
    title = "Several experiments, one after another, with the same arguments" if one_of else experiment.page.title()
    parser = argparse.ArgumentParser(
        prog=f"python -m {f'analysis.{one_of}' if one_of else experiment.command}", description=title
    )
    data = os.environ.get("HVFREEZE_DATA")
    add = parser.add_argument
    scales = "smoke: to see that everything runs; full: the study's setting [reduced: for 2 cores]"
    add("--preset", choices=tuple(PRESETS), default="reduced", help=scales)
    add("--data-dir", type=Path, default=Path(data) if data else None, help="where CIFAR-10 lies [$HVFREEZE_DATA]")
    add("--weights", type=Path, help="state_dict to start from; the preset's results are about a pretrained model")
    add("--ranks", type=int, help="instead of the preset's")
    add("--lr", type=float, help="instead of what the baseline experiment chose, or the preset's")
    add("--seeds", type=numbers, metavar="N[,N]", help="instead of the preset's; runs with other seeds stay")
    add("--hosts", default="", help="HOST:SLOTS,... instead of this machine; they must see the same folders")
    add(
        "--work",
        type=folder_to_write,
        help=f"run directories under way [{WORK}/{'NAME' if one_of else experiment.name}/PRESET]",
    )
    add("--results", type=Path, help="folder of all experiments' results [analysis/results; not for smoke, full]")
    add("--only", type=labels, metavar="LABEL[,LABEL]", help="make these runs only; the rest another time")
    add("--repeat", type=labels, metavar="RUN[,RUN]", help="make kept runs once more, keep nothing, and compare")
    add("--estimate", action="store_true", help="say how long it will take, and do nothing")
    options = parser.parse_args(arguments)
    if options.results is not None and not (options.estimate or options.repeat):
        try:
            folder_to_write(str(options.results))
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --results: {error}")
    options.work = options.work or WORK / experiment.name / options.preset
    elsewhere = {"smoke": SMOKE_RESULTS, "full": RESULTS / "full"}
    options.results = options.results or elsewhere.get(options.preset, RESULTS)
    return options


def labels(text: str) -> tuple[str, ...]:
    """Return a comma-separated list as its words."""
    return tuple(word.strip() for word in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Return a comma-separated list as its numbers, each once."""
    return tuple(dict.fromkeys(int(word) for word in text.split(",")))


def check_counts(options: argparse.Namespace, experiment: Experiment) -> None:
    """Refuse ranks and seeds that no run can have.

    Raises:
        UsageError: there is no rank, or the experiment has fixed seeds.
    """
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks ({options.ranks}) must be 1 or more")
    if options.seeds is not None and experiment.own_seeds and options.preset != "smoke":
        raise UsageError(
            f"--seeds ({','.join(map(str, options.seeds))}) must be left out: {experiment.name} has its own seeds "
            "(--only makes runs of some labels)"
        )


def preset_of(options: argparse.Namespace, *, root: Path) -> Preset:
    """Return the preset with what the command line says otherwise."""
    preset = PRESETS[options.preset]
    given = {name: getattr(options, name) for name in ("ranks", "seeds") if getattr(options, name) is not None}
    if options.weights is not None:
        digest = hashlib.sha256(options.weights.read_bytes()).hexdigest() if options.weights.is_file() else ""
        given.update(weights=options.weights.name, weights_digest=digest)
    found = best_lr(KeptRuns(root / "baseline").rows())
    return replace(preset, **given, lr=options.lr if options.lr is not None else found or preset.lr)


def require_lr(options: argparse.Namespace, experiment: Experiment, *, root: Path) -> None:
    """Raise UsageError if no learning rate is known.

    Raises:
        UsageError: the results have no baseline, which chooses it, and none was given.
    """
    if options.preset == "smoke" or experiment.chooses_lr or options.lr is not None:
        return
    if best_lr(KeptRuns(root / "baseline").rows()) is None:
        raise UsageError(
            f"--results ({root}) holds no baseline, which chooses the learning rate of this experiment; run "
            f"python -m analysis.baseline with the same --results first, or give --lr (the kept results have 0.05)"
        )


def site_of(options: argparse.Namespace, preset: Preset) -> Site:
    """Return where the runs find what they need.

    Raises:
        UsageError: the data or the weights are not there.
    """
    if options.weights is not None and not options.weights.is_file():
        raise UsageError(f"--weights ({options.weights}) must be a file")
    data_dir = None if preset.data == "digits" else options.data_dir
    if data_dir is not None and not data_dir.is_dir():
        raise UsageError(f"--data-dir ({data_dir}) must be a folder")
    return Site(work=options.work, data_dir=data_dir, weights=options.weights, hosts=options.hosts)


def plan(experiment: Experiment, preset: Preset, results: Results) -> list[PlannedRun]:
    """Return all runs, each checked and each name once.

    Raises:
        UsageError: a flag is not acceptable, or two different runs have one name.
    """
    by_name: dict[str, PlannedRun] = {}
    for run in [*experiment.runs(preset), *experiment.then(preset, results)]:
        run.config()
        if by_name.setdefault(run.name, run) != run:
            raise UsageError(f"experiment {experiment.name} has two different runs of the name {run.name}")
    return list(by_name.values())


def carry_out(
    experiment: Experiment, preset: Preset, site: Site, *, root: Path, only: Sequence[str] | None = None
) -> int:
    """Make the runs that are missing, and write the results; returns 1 when some failed.

    Raises:
        UsageError: no run has a label that is in `only`, or the kept runs began with other weights.
    """
    directory = root / experiment.name
    check_weights(experiment.name, preset, root=root)
    print(estimate(experiment, preset), flush=True)
    first = experiment.runs(preset)
    before = set(KeptRuns(directory).lines)
    failed = make(first, preset, site, directory, only=only)
    planned = plan(experiment, preset, experiment.open(root))
    unknown = sorted(set(only or ()) - {run.label for run in planned})
    if unknown:
        raise UsageError(f"--only ({','.join(unknown)}) must name labels: {', '.join({r.label: 0 for r in planned})}")
    waits = experiment.then_waits and experiment.then is not nothing_more
    if not waits or all(run.name in KeptRuns(directory).lines for run in first):
        failed += make([run for run in planned if run.name not in failed], preset, site, directory, only=only)
    elif {run.label for run in planned if only is None or run.label in only} - {run.label for run in first}:
        print(f"{experiment.name}: the other runs depend on these, which are not all there yet", file=sys.stderr)
    kept = KeptRuns(directory).lines
    write_up(experiment, preset, root, made=set(kept) != before, whole=all(run.name in kept for run in planned))
    print(f"results: {directory}")
    if failed:
        print(f"{experiment.name}: error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def check_weights(name: str, preset: Preset, *, root: Path) -> None:
    """Refuse weights that an experiment's kept runs did not begin with: the file's name alone is part of a run.

    Raises:
        UsageError: the SHA-256 is another one.
    """
    kept, given = by_name(root / PRESETS_FILE).get(name, {}).get("weights_sha256"), preset.weights_digest
    if kept and given and kept != given:
        raise UsageError(
            f"--weights ({preset.weights}, SHA-256 {given[:16]}...) must be the file with SHA-256 {kept[:16]}..., "
            f"which the kept runs of {name} began with ({root / PRESETS_FILE}); give that file, or another --results"
        )


def make(
    planned: Sequence[PlannedRun], preset: Preset, site: Site, directory: Path, *, only: Sequence[str] | None = None
) -> list[str]:
    """Make the missing runs; return the names of failed ones.

    Raises:
        UsageError: runs on nodes are missing, and there cannot be a local cluster; no run was begun.
        RefusedError: a shared cache that kept runs have filled is gone; no run was begun.
    """
    runs = KeptRuns(directory)
    chosen = [run for run in planned if only is None or run.label in only]
    kept = [run.name for run in planned if runs.holds(run)]
    kept += [run.name for run in chosen if run.name not in kept and runs.borrow(run)]
    wanted = [run for run in planned if run.name in kept or run in chosen]
    if any(run.nodes for run in wanted if run.name not in kept):
        require_cluster()
    for run in wanted:
        if run.name not in kept:
            require_shared_cache(run, runs, site)
    source = commit()
    progress = Progress({run.name: seconds_of(run, preset) for run in wanted}, dict.fromkeys(kept, 0.0))
    runs.check_seeds(planned)
    failed: list[str] = []
    for run in wanted:
        if run.name in progress.done:
            continue
        print(progress.line(run), flush=True)
        begin_shared_cache(run, runs, site)
        continued = (site.work / run.name).exists() and not begins_anew(run)
        started = time.monotonic()
        try:
            run_dir = launch(run, site, timeout=600 + PATIENCE * progress.estimates[run.name])
        except HvfreezeError as error:
            print(f"  {error}", file=sys.stderr, flush=True)
            failed.append(run.name)
        else:
            # For a continued run this would be its last part alone.
            whole_seconds = None if continued else time.monotonic() - started
            runs.keep(run_dir, run, source=source, whole_seconds=whole_seconds)
            shutil.rmtree(run_dir)
        progress.done[run.name] = time.monotonic() - started
    return failed


def cache_users(run: PlannedRun, runs: KeptRuns) -> list[str]:
    """Return the names of the kept runs that have used the run's shared cache; none where it has no such cache."""
    cache = run.flags.get("cache_dir")
    return [name for name, line in runs.lines.items() if cache and line["flags"].get("cache_dir") == cache]


def require_shared_cache(run: PlannedRun, runs: KeptRuns, site: Site) -> None:
    """Refuse to fill a shared cache once more: the run would count as one that finds the rows.

    Raises:
        RefusedError: kept runs have used the cache, and it is gone.
    """
    used, cache = cache_users(run, runs), site.work / str(run.flags.get("cache_dir"))
    if used and not cache.is_dir():
        raise RefusedError(
            f"--work ({site.work}) must have {cache.name}, the shared cache of {', '.join(used)}, which {run.name} is "
            f"to read; give the --work that has it, or remove the lines of these runs from {runs.path}"
        )


def begin_shared_cache(run: PlannedRun, runs: KeptRuns, site: Site) -> None:
    """Empty the run's shared cache where no kept run has used it: the first run is one that fills it."""
    if "cache_dir" in run.flags and not cache_users(run, runs):
        shutil.rmtree(site.work / str(run.flags["cache_dir"]), ignore_errors=True)


def estimate(experiment: Experiment, preset: Preset) -> str:
    """Return the number of runs and how long they will take."""
    planned = plan(experiment, preset, Results(Path()))
    taken = duration(sum(seconds_of(run, preset) for run in planned))
    cores = "with a core for each rank" if preset.name == FULL.name else f"on {os.cpu_count()} cores"
    return f"{experiment.name} ({preset.name}): {len(planned)} runs, about {taken} {cores}"


def seconds_of(planned: PlannedRun, preset: Preset) -> float:
    """Return the roughly estimated wall-clock seconds of a run on this machine; finished runs correct their sum."""
    config = planned.config().resolved()
    data, settings = config.data, config.optimizer
    small = SMALL_MODEL if preset.is_smoke else 1.0
    crowd = max(1.0, planned.ranks / (os.cpu_count() or 1)) if preset.name != FULL.name else 1.0
    samples = data.train_samples or 50_000
    evaluated = samples * data.validation_fraction or preset.test_samples
    steps = samples * (1 - data.validation_fraction) // (planned.ranks * settings.batch_size)
    cut, blocks = config.freeze.cut, BLOCKS.get(config.model.blocks, 6)
    trained = 1.0 if cut is None else max(0.0, 1 - cut / blocks)
    compute = steps * settings.batch_size * (FORWARD_SECONDS + trained * BACKWARD_SECONDS)
    if config.head.solved and settings.epochs == 1:
        # Two views, and what solving takes beside them.
        compute = steps * settings.batch_size * 2.3 * FORWARD_SECONDS
    evaluations = -(-settings.epochs // config.run.evaluate_every)
    evaluation = evaluations / settings.epochs * evaluated / planned.ranks * FORWARD_SECONDS
    link = steps * 2 * (1 - 1 / planned.ranks) * MODEL_BYTES * small * 8 / bits_per_second(planned.bandwidth)
    scale = ((data.image_size or 32) / 32) ** GROWTH * small
    return float(START_SECONDS * crowd + settings.epochs * ((compute + evaluation) * scale * crowd + link))


def duration(seconds: float) -> str:
    """Return seconds for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Progress:
    """How far a sweep is, and how much longer it takes: the estimates, corrected by what finished runs took."""

    estimates: dict[str, float]
    done: dict[str, float] = field(default_factory=dict)
    """Seconds of each run, 0 for runs that were already recorded."""

    def left(self) -> float:
        """Return the estimated seconds of the runs to come."""
        measured = {name: taken for name, taken in self.done.items() if taken > 0}
        guessed = sum(self.estimates[name] for name in measured)
        correction = sum(measured.values()) / guessed if guessed else 1.0
        return correction * sum(seconds for name, seconds in self.estimates.items() if name not in self.done)

    def line(self, planned: PlannedRun) -> str:
        """Return where in the sweep a run stands."""
        left = duration(self.left())
        return f"[{len(self.done) + 1}/{len(self.estimates)}] {planned.name}, about {left} left"
