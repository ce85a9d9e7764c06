"""How long something takes."""

from __future__ import annotations

import timeit
from collections.abc import Callable


def least_seconds(work: Callable[[], object], *, times: int) -> float:
    """Return the least time that `work` took, of so many times."""
    return min(timeit.repeat(work, repeat=times, number=1))


LEAST_TRIES, MOST_TRIES, SECONDS = 2, 6, 0.8
"""Of `settled_seconds`: no more than the second, and than the first only until so many seconds are over."""


def settled_seconds(work: Callable[[], object], *, within: float = SECONDS) -> float:
    """Return the least time that `work` took, of as many tries as are worth it; two, or more `within` such seconds.

    The first brings libraries and memory up to speed, and what else the machine does disturbs some of the others.
    """
    taken = [least_seconds(work, times=1) for _ in range(LEAST_TRIES)]
    while len(taken) < MOST_TRIES and sum(taken) < within:
        taken.append(least_seconds(work, times=1))
    return min(taken)
