"""Measures the time of short operations."""

from __future__ import annotations

import timeit
from collections.abc import Callable

LEAST_TRIES, MOST_TRIES, SECONDS = 2, 6, 0.8
"""Limits of `min_seconds`: never more runs than the second, and more than the first only within the given
seconds."""


def min_seconds(work: Callable[[], object], *, within: float = SECONDS) -> float:
    """Return the minimum time of `work` in a few runs: two, or more `within` the given seconds.

    The first run warms up libraries and memory, and other processes may disturb some of the others.
    """
    taken = [timeit.timeit(work, number=1) for _ in range(LEAST_TRIES)]
    while len(taken) < MOST_TRIES and sum(taken) < within:
        taken.append(timeit.timeit(work, number=1))
    return min(taken)
