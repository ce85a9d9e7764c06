"""How long something takes."""

from __future__ import annotations

import timeit
from collections.abc import Callable


def least_seconds(work: Callable[[], object], *, times: int) -> float:
    """Return the least time that `work` took, of so many times."""
    return min(timeit.repeat(work, repeat=times, number=1))
