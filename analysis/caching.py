"""What does caching the frozen prefix's output save? (Left open by the study.)

    python -m analysis.caching --preset reduced --data-dir DIR --weights FILE

Default: four of the six stages frozen statically, two views of each sample, the cache on, stored as computed. Changed
one at a time: the cache, the cut, the number of views (and fresh draws, which cannot be cached), the stored type, the
image size (phase times of a few steps). Last, what users run: a voted prefix with `--cache auto`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from analysis.sweeps import paper
from analysis.sweeps.charts import OTHERS, Line, accuracy_time_chart, line_chart
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Metric, Results
from analysis.sweeps.statistics import NOTHING, Interval, mean_interval, of_seeds, shown
from analysis.sweeps.sweep import main
from hvfreeze.report.figures import COLOURS
from hvfreeze.report.tables import seconds

CUTS = (3, 4, 5)
ON, OFF = "cut4-on", "cut4-off"
VIEWS = {"views1": "1", ON: "2", "views4": "4", "views8": "8", "fresh": "fresh, not cached"}
STORED = ("float16", "bfloat16")
MORE_SEEDS = 2
"""Additional seeds for float16 against the native type, whose difference must be known to a fraction of a point."""
SIZES = (32, 64, 224)
BASE: dict[str, Value] = {"augment": "views:2", "freeze": "static", "cut": 4}
CACHED_FROM = 2
"""Epochs that fill the cache: as many as there are views."""
SUFFIX_PHASES = ("forward", "backward", "allreduce", "optimizer", "vote")
PREDICTED, SAVED = "cache_seconds_saved_predicted", "cache_seconds_saved"


def variants() -> dict[str, dict[str, Value]]:
    """Return the flags of every variant with full-length runs, by label."""
    found: dict[str, dict[str, Value]] = {"full": {}}
    for cut in CUTS:
        for cache in ("off", "on"):
            found[f"cut{cut}-{cache}"] = {**BASE, "cut": cut, "cache": cache}
    found["fresh"] = {**BASE, "augment": "fresh"}
    for views in (1, 4, 8):
        found[f"views{views}"] = {**BASE, "augment": f"views:{views}", "cache": "on"}
    for dtype in STORED:
        found[dtype] = {**BASE, "cache": "on", "cache_dtype": dtype}
    voted: dict[str, Value] = {"augment": "views:2", "freeze": "percentile", "eta_max": 1.0}
    found["voted"], found["voted-auto"] = voted, {**voted, "cache": "auto"}
    return found


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all variants; a seed's runs follow each other in time. The phase times have one seed."""
    chosen = variants()
    if preset.is_smoke:
        return preset.runs({label: chosen[label] for label in (OFF, ON)}, {})
    planned, more = preset.runs(chosen, {}), max(preset.seeds) + 1
    for seed in range(more, more + MORE_SEEDS):
        planned += [preset.run(label, seed, chosen[label]) for label in (ON, "float16")]
    few: dict[str, Value] = {"batch_size": 32, "epochs": 4, "train_samples": 512, "validation_fraction": 0.1}
    short: dict[str, Value] = {**BASE, **few, "augment": "none", "checkpoint_every": "0"}
    for size in SIZES:
        for cache in ("off", "on"):
            flags = {**short, "cache": cache, "image_size": size}
            planned.append(preset.run(f"size{size}-{cache}", preset.seeds[0], flags))
    return planned


def uncached(label: str) -> str:
    """Return the label of the same runs without a cache, empty where there are none."""
    if label in STORED:
        return OFF
    return {"voted-auto": "voted"}.get(label, label.replace("-on", "-off") if label.endswith("-on") else "")


def by_account(results: Results, label: str, column: str = SAVED) -> Interval:
    """Return what the program says that the cache saves, of a label's runs that stored something.

    Of the seeds that `by_clocks` has, where there are such: numbers that stand side by side are of the same runs.
    """
    stored = {int(row["seed"]): float(row[column]) for row in results.of(label) if row["cache_bytes"]}
    other = uncached(label)
    timed = {int(row["seed"]) for row in results.of(other)} if other else set(stored)
    return of_seeds({seed: value for seed, value in stored.items() if seed in timed})


def by_clocks(results: Results, label: str) -> Interval:
    """Return the training seconds that a label's runs took less than the same runs without a cache, paired by seed."""
    other = uncached(label)
    return results.difference(other, label, "train_seconds") if other and by_account(results, label).n else NOTHING


def exact(results: Results, label: str) -> str:
    """Return whether runs with a cache have the bits of runs without, empty where nothing was stored."""
    found = {row["cache_exact"] for row in results.of(label) if row["cache_bytes"]}
    return "" if not found else "yes" if found == {True} else "no"


def seconds_of(title: str, saved: Callable[[Results, str], Interval]) -> Metric:
    """Return a column of seconds, empty where there are none."""
    return Metric(title, lambda r, label, _: shown(saved(r, label), seconds) if saved(r, label).n else "")


def words(results: Results) -> Words:
    columns = (
        seconds_of("Saved by the clocks", by_clocks),
        seconds_of("Saved, own account", by_account),
        seconds_of("Predicted", lambda r, label: by_account(r, label, PREDICTED)),
        Metric("Exact", lambda r, label, _: exact(r, label)),
    )
    return {
        "variants": {label: results.shown_as(label) for label in variants()},
        "saved_columns": list(columns),
        "by_clocks": lambda label: by_clocks(results, label),
        "by_account": lambda label, column=SAVED: by_account(results, label, column),
        "predicted": lambda label: by_account(results, label, PREDICTED),
        # On the study's timings, with as many groups frozen.
        "ideal": paper.CACHED_SPEED_UP[5] / paper.SPEED_UP[5],
        "views": VIEWS,
        "stored": STORED,
    }


def drawings(results: Results) -> Mapping[str, Figure]:
    """Return epochs, speed-ups by cut, and accuracy against time."""
    lines = [
        Line(
            label=f"cache {cache}",
            points={cut: results.ratio(f"cut{cut}-{cache}") for cut in CUTS},
            colour=colour,
        )
        for cache, colour in zip(("off", "on"), COLOURS)
    ]
    return {
        "epochs": epochs_chart(results),
        "speed-up": line_chart(lines, x="frozen stages (of 6)", y="speed-up over full fine-tuning"),
        "accuracy-time": accuracy_time_chart(results, list(variants())),
    }


def epochs_chart(results: Results) -> Figure:
    """Return the training time of each epoch with and without a cache, and the time left if reading were free."""

    def by_epoch(label: str, seconds_of: Callable[[Mapping[str, Any]], float]) -> dict[int, Interval]:
        columns = zip(*(run.metrics for run in results.runs_of(label)), strict=True)
        return {epoch: mean_interval([seconds_of(line) for line in lines]) for epoch, lines in enumerate(columns, 1)}

    def all_of(line: Mapping[str, Any]) -> float:
        return float(line["train_seconds"])

    def of_suffix(line: Mapping[str, Any]) -> float:
        return float(sum(line["seconds"].get(phase, 0.0) for phase in SUFFIX_PHASES))

    read = {epoch: value for epoch, value in by_epoch(ON, of_suffix).items() if epoch > CACHED_FROM}
    lines = [
        Line(label="no cache", points=by_epoch(OFF, all_of), colour=COLOURS[0]),
        Line(label="with the cache", points=by_epoch(ON, all_of), colour=COLOURS[1]),
        Line(label="bound: reading costs nothing", points=read, colour=OTHERS[0], dash="--"),
    ]
    return line_chart(lines, x="epoch", y="training time of the epoch (s)")


EXPERIMENT = Experiment(name="caching", runs=runs, words=words, drawings=drawings, reference="full")

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
