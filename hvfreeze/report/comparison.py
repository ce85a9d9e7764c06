"""Groups runs that differ in the seed only, and compares them with the baseline of the same work."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.config.freeze import AUTO
from hvfreeze.runs.reading import Run

SEEDS = frozenset({"seed", "data_seed"})
WITHOUT_EFFECT = frozenset({"run_dir", "resume", "resume_inexact", "quiet", "track", "json"})


@dataclass(frozen=True)
class Spread:
    """A mean with the lowest and the highest of n values."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    name: str
    runs: tuple[Run, ...]

    def spread(self, quantity: Callable[[Run], float]) -> Spread:
        """Return mean, lowest and highest of a quantity over the runs."""
        return spread([quantity(run) for run in self.runs])


@dataclass(frozen=True)
class Comparison:
    """A group compared with the baseline of the same work."""

    baseline: Group
    speed_up: Spread
    """Baseline's training time / this training time."""
    time_saved: Spread
    """Share of the baseline's training time that is saved; negative if the group was slower."""


def spread(values: Sequence[float]) -> Spread:
    """Return mean, lowest and highest of at least one value."""
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Return the runs in groups that differ only in the seed, in the order of their first run."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        leaves = {leaf: value for leaf, value in run.settings.items() if leaf not in SEEDS | WITHOUT_EFFECT}
        groups.setdefault((repr(sorted(leaves.items())), machine(run), run.finished), []).append(run)
    names = [name_of(members) for members in groups.values()]
    return [
        Group(name if names.count(name) == 1 else members[0].name, tuple(members))
        for name, members in zip(names, groups.values())
    ]


def name_of(runs: Sequence[Run]) -> str:
    """Return the common prefix of the runs' names, without a seed number."""
    if len(runs) == 1:
        return runs[0].name
    common = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071
    return re.sub(r"((^|[-_. /]+)(seed|s))?[-_. /]*\d*$", "", common) or runs[0].name


def machine(run: Run) -> Hashable:
    """Return what affects seconds besides the work: ranks, hosts, processor, cores and threads."""
    facts = [str(run.environment.get(key)) for key in ("processor", "cores", "capability", "threads")]
    return (run.size, len(set(run.environment.get("hosts") or [])), *facts)


def work(run: Run) -> Hashable:
    """Return what must be equal for training times to be comparable: all except freezing, cache and seed."""
    without = SEEDS | WITHOUT_EFFECT | {"blocks"}
    sections = [leaves for section, leaves in run.config.items() if section not in ("freeze", "cache")]
    leaves = {leaf: value for section in sections for leaf, value in section.items() if leaf not in without}
    return (repr(sorted(leaves.items())), machine(run))


def compare(group: Group, groups: Sequence[Group]) -> Comparison | None:
    """Return the comparison of a group's training time with the baseline of the same work, None without one.

    A run is compared with the baseline of its own seed if there is one, else with the baselines' mean.
    """
    first = group.runs[0]
    if first.is_baseline or not first.finished:
        return None
    baselines = (other for other in groups if other.runs[0].is_baseline and work(other.runs[0]) == work(first))
    baseline = next((other for other in baselines if as_long(group, other)), None)
    if baseline is None:
        return None
    ratios = [reference_seconds(run, baseline) / max(run.train_seconds, 1e-9) for run in group.runs]
    return Comparison(baseline, spread(ratios), spread([1 - 1 / ratio for ratio in ratios]))


def as_long(group: Group, baseline: Group) -> bool:
    """Return True if runs of the same work had equal lengths: a time budget and --early-stop may end them early.

    hvfreeze auto counts other steps, which take as long as --epochs of the baseline.
    """
    settings = group.runs[0].settings
    if settings["freeze"] == AUTO and settings["time_budget"] == "none":
        return True
    return len({run.metrics[-1]["step"] for run in (*group.runs, *baseline.runs)}) == 1


def reference_seconds(run: Run, baseline: Group) -> float:
    """Return the baseline's training time for this run's seed, else its mean."""
    same = [other.train_seconds for other in baseline.runs if seeds(other) == seeds(run)]
    return statistics.fmean(same or [other.train_seconds for other in baseline.runs])


def seeds(run: Run) -> tuple[Any, Any]:
    """Return the seed of the run and of its data."""
    seed, data_seed = run.settings["seed"], run.settings["data_seed"]
    return seed, seed if data_seed is None else data_seed
