"""Means with their spread. Seeds are paired: a difference or a ratio is taken within a seed, then averaged."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.95
UNIT = re.compile(r"[ %/A-Za-z]+$")

Values = Mapping[int, float]
"""A number for each seed."""


@dataclass(frozen=True)
class Interval:
    """A mean of n values with the ends of its 95 % interval; the ends are NaN where n < 2, all where n is 0."""

    mean: float
    low: float
    high: float
    n: int


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """Return the mean with Student's t interval at `level`."""
    n = len(values)
    if n == 0:
        return NOTHING
    mean = statistics.fmean(values)
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def of_seeds(values: Values) -> Interval:
    """Return the mean over seeds with its interval."""
    return mean_interval([values[seed] for seed in sorted(values)])


def paired_difference(ours: Values, theirs: Values) -> Interval:
    """Return the mean of ours - theirs over the seeds that both have."""
    return mean_interval([ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))])


def paired_ratio(ours: Values, theirs: Values) -> Interval:
    """Return the geometric mean of ours / theirs over the seeds that both have; the values must be positive."""
    logs = mean_interval([math.log(ours[seed] / theirs[seed]) for seed in sorted(set(ours) & set(theirs))])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)


def joined(interval: Interval, low: float, high: float, *, as_ratio: bool = False) -> Interval:
    """Return an interval that has another, independent error too, whose 95 % interval is given.

    Distances from the mean to the ends add up as roots of sums of squares (MOVER); those of ratios do in logarithms.
    """
    to, back = (math.log, math.exp) if as_ratio else (float, float)
    mean = to(interval.mean)
    down, up = (
        math.hypot(to(own) - mean, to(other) - mean) for own, other in ((interval.low, low), (interval.high, high))
    )
    return Interval(interval.mean, back(mean - down), back(mean + up), interval.n)


def is_below(interval: Interval, limit: float) -> bool:
    """Return True if the whole interval is below a limit; False for one value without a spread."""
    return interval.n > 1 and interval.high < limit


def verdict(change: Interval, better: str = "better", worse: str = "worse", level: str = "no difference shown") -> str:
    """Return what a change shows: the whole interval says so, not its middle."""
    if is_below(change, 0):
        return f"{worse} (negative)"
    return better if change.low > 0 else level


def within(interval: Interval, low: float, high: float = math.inf) -> Interval:
    """Return an interval whose ends stay where the quantity can be: a share in 0..1, a cut above 0."""
    first, last = (min(max(end, low), high) if math.isfinite(end) else end for end in (interval.low, interval.high))
    return Interval(interval.mean, first, last, interval.n)


def time_saved(speed_up: Interval) -> Interval:
    """Return the part of the reference's time that a speed-up saves; negative where it took longer."""
    return Interval(1 - 1 / speed_up.mean, 1 - 1 / speed_up.low, 1 - 1 / speed_up.high, speed_up.n)


def shown(interval: Interval, unit: Callable[[float], str], *, count: bool = False) -> str:
    """Return the mean in its unit with the interval in brackets, with `count` also n."""
    if interval.n == 0:
        return "not measured"
    number = f"n = {interval.n}"
    if interval.n == 1:
        return f"{unit(interval.mean)} ({number})" if count else unit(interval.mean)
    ends = f"{UNIT.sub('', unit(interval.low))} to {UNIT.sub('', unit(interval.high))}"
    return f"{unit(interval.mean)} ({ends}, {number})" if count else f"{unit(interval.mean)} ({ends})"


def signed_points(value: float) -> str:
    """Return a difference of accuracies in percentage points."""
    return f"{100 * value:+.1f} points"
