"""Compressions tried in turn, in steps that count for training like all others: pure functions of their seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvfreeze.ranks.exchange.forecast import first_of_the_shortest

TRIED_STEPS = 6
"""Of each compression; the first, which lays out anew, does not count."""
PATIENCE = 2
"""Rank 16 may save nothing over rank 32 where rank 8 does: clocks err, and a sum's cost jumps with its size."""


class Trial:
    """Goes on to the next compression until PATIENCE in a row save too little; keeps the first of the shortest steps.

    A forecast knows what a rank computes and what the network carries. It does not know what ranks that share a
    processor's memory take from each other, nor what a message costs the processor that sends it; steps do.

    Args:
        names: the compressions, in order of what they change; the first is what a forecast chose. Of one alone nothing
            is tried.
        medians: seconds of the steps of those that were tried already, in that order.
    """

    def __init__(self, names: Sequence[str], medians: Mapping[str, float] | None = None) -> None:
        self._names, self._medians = tuple(names), dict(medians or {})

    @property
    def over(self) -> bool:
        """Whether `now` stays."""
        return len(self._names) == 1 or len(self._medians) == len(self._names) or self._in_vain == PATIENCE

    @property
    def now(self) -> str:
        """What the next steps are exchanged by."""
        if self._medians and self.over:
            return first_of_the_shortest(self._medians)
        return self._names[len(self._medians)]

    @property
    def medians(self) -> Mapping[str, float]:
        """What has been tried, with the seconds of its steps."""
        return self._medians

    def add(self, seconds: Sequence[float]) -> None:
        """Count the TRIED_STEPS steps of `now`, and go on or stop: to be worth it, more change must save a part."""
        self._medians[self.now] = statistics.median(seconds[1:])

    @property
    def _in_vain(self) -> int:
        """How many were tried since the first of the shortest."""
        if not self._medians:
            return 0
        return len(self._medians) - 1 - list(self._medians).index(first_of_the_shortest(self._medians))

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trial has come, as `Trial(**state)` takes it."""
        return {"names": list(self._names), "medians": dict(self._medians)}
