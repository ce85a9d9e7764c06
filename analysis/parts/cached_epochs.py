"""A cached run beside the same run without a cache: its epochs, and the seconds that it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from analysis.sweeps.charts import OTHERS, Line, line_chart
from analysis.sweeps.results import Results
from analysis.sweeps.statistics import Interval, mean_interval, of_seeds
from hvfreeze.report.figures import COLOURS

CACHED_FROM = 2
"""Epochs that fill the cache: as many as there are views."""
SUFFIX_PHASES = ("forward", "backward", "allreduce", "optimizer", "vote")


def epochs_chart(results: Results, cached_label: str, uncached_label: str) -> Figure:
    """Return the training time of each epoch with and without a cache, and what is left when reading costs nothing."""

    def by_epoch(label: str, seconds_of: Callable[[Mapping[str, Any]], float]) -> dict[int, Interval]:
        columns = zip(*(run.metrics for run in results.runs_of(label)), strict=True)
        return {epoch: mean_interval([seconds_of(line) for line in lines]) for epoch, lines in enumerate(columns, 1)}

    def all_of(line: Mapping[str, Any]) -> float:
        return float(line["train_seconds"])

    def of_suffix(line: Mapping[str, Any]) -> float:
        return float(sum(line["seconds"].get(phase, 0.0) for phase in SUFFIX_PHASES))

    cached = by_epoch(cached_label, of_suffix)
    read = {epoch: value for epoch, value in cached.items() if epoch > CACHED_FROM}
    lines = [
        Line(label="no cache", points=by_epoch(uncached_label, all_of), colour=COLOURS[0]),
        Line(label="with the cache", points=by_epoch(cached_label, all_of), colour=COLOURS[1]),
        Line(label="bound: reading costs nothing", points=read, colour=OTHERS[0], dash="--"),
    ]
    return line_chart(lines, x="epoch", y="training time of the epoch (s)")


def uncached(label: str) -> str:
    """Return the label of the same runs without a cache, empty where there are none."""
    if label in ("float16", "bfloat16"):
        return "cut4-off"
    return {"voted-auto": "voted"}.get(label, label.replace("-on", "-off") if label.endswith("-on") else "")


def by_account(results: Results, label: str, column: str = "cache_seconds_saved") -> Interval:
    """Return what the program says that the cache saves, of a label's runs that stored something.

    Of the seeds that `saved_by_clocks` has, where there are such: numbers that stand side by side are of the same runs.
    """
    stored = {int(row["seed"]): float(row[column]) for row in results.of(label) if row["cache_bytes"]}
    timed = results.values(uncached(label), "train_seconds").keys() & results.values(label, "train_seconds").keys()
    return of_seeds({seed: value for seed, value in stored.items() if seed in timed or not timed})


def saved_by_clocks(results: Results, label: str) -> Interval:
    """Return the training seconds that a label's runs took less than the same runs without a cache, paired by seed."""
    return results.change(uncached(label), label, "train_seconds")
