"""From paired times to a verdict: the median ratio, its bootstrap interval, and whether it keeps a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDEST = 0.06
"""Relative width of the interval above which a row is undecided."""
CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, as it stands in bench.json.

    Attributes:
        name: of the comparison, the same in every version.
        ratio: median of our time over the reference's; smaller is better.
        bound: the ratio that is asked for.
        ok: whether the whole interval keeps the bound, or its `low` does and it is narrow enough to say so.
        n: number of pairs.
        low: lower end of the 95 % interval of the median ratio.
        high: upper end.
        what: what was compared, in words, with the times.
    """

    name: str
    ratio: float
    bound: float
    ok: bool
    n: int
    low: float
    high: float
    what: str


def bootstrap_interval(values: Sequence[float], statistic: Callable[..., Any] = np.median) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of some values, the same for the same numbers."""
    given = np.asarray(values, dtype=np.float64)
    drawn = given[np.random.default_rng(0).integers(0, len(given), (RESAMPLES, len(given)))]
    low, high = np.quantile(statistic(drawn, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def is_narrow(row: Row, *, width: float = WIDEST) -> bool:
    """Return True if the width of the interval is at most `width` of the ratio."""
    return row.high - row.low <= width * row.ratio


def judge(name: str, ratios: Sequence[float], *, bound: float, what: str) -> Row:
    """Return the verdict on paired `ratios`, ours over reference."""
    low, high = bootstrap_interval(ratios)
    ratio = float(np.median(ratios))
    row = Row(name=name, ratio=ratio, bound=bound, ok=False, n=len(ratios), low=low, high=high, what=what)
    ok = high <= bound or (low <= bound and is_narrow(row))
    return Row(name=name, ratio=ratio, bound=bound, ok=ok, n=len(ratios), low=low, high=high, what=what)


def with_slack(bound: float, *, slack_seconds: float, reference_seconds: float) -> float:
    """Return the bound where `slack_seconds` more than the reference are allowed too, which counts for short steps."""
    return max(bound, 1 + slack_seconds / reference_seconds)
