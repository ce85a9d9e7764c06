"""Compressions tried in turn, in steps that count for training like all others: pure functions of their seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvfreeze.ranks.exchange.forecast import first_of_the_shortest

TRIED_STEPS = 4
"""Of each compression in a round; the first, which lays out anew, does not count."""
ROUNDS = 3
"""A node that has other work for a few steps takes them from one compression only: of three rounds the median tells."""
PATIENCE = 2
"""Rank 16 may save nothing over rank 32 where rank 8 does: clocks err, and a sum's cost jumps with its size."""
NEAR = 1.25
"""What takes so many times the shortest steps of the first round is not tried again."""


class Trial:
    """Tries compressions in rounds, and keeps the first of the shortest steps.

    The first round goes on to the next until PATIENCE in a row save too little; the others are between those that
    came near. A forecast knows what a rank computes and what the network carries. It does not know what ranks that
    share a processor's memory take from each other, nor what a message costs the processor that sends it; steps do.

    Args:
        names: the compressions, in order of what they change; the first is what a forecast chose. Of one alone nothing
            is tried.
        rounds: seconds of the steps of those that were tried already, by round.
    """

    def __init__(self, names: Sequence[str], rounds: Sequence[Mapping[str, float]] = ()) -> None:
        self._names = tuple(names)
        self._rounds = [dict(each) for each in rounds]

    @property
    def over(self) -> bool:
        """Whether `now` stays."""
        return self._next is None

    @property
    def now(self) -> str:
        """What the next steps are exchanged by."""
        if self._next is not None:
            return self._next
        return first_of_the_shortest(self.medians) if self._rounds else self._names[0]

    @property
    def medians(self) -> Mapping[str, float]:
        """What has been tried, with the seconds of its steps: their median over rounds."""
        tried = self._rounds[0] if self._rounds else {}
        return {name: statistics.median(each[name] for each in self._rounds if name in each) for name in tried}

    def add(self, seconds: Sequence[float]) -> None:
        """Count the TRIED_STEPS steps of `now`, and go on or stop: to be worth it, more change must save a part."""
        name = self.now
        if not self._rounds or name in self._rounds[-1]:
            self._rounds.append({})
        self._rounds[-1][name] = statistics.median(seconds[1:])

    @property
    def _next(self) -> str | None:
        """What is to be tried now."""
        if len(self._names) == 1:
            return None
        if not self._rounds:
            return self._names[0]
        first, last = self._rounds[0], self._rounds[-1]
        if len(self._rounds) == 1 and len(first) < len(self._names) and _in_vain(first) < PATIENCE:
            return self._names[len(first)]
        near = [name for name in first if first[name] <= NEAR * min(first.values())]
        if len(near) == 1:
            return None
        left = near if len(self._rounds) == 1 else [name for name in near if name not in last]
        if left:
            return left[0]
        return near[0] if len(self._rounds) < ROUNDS else None

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trial has come, as `Trial(**state)` takes it."""
        return {"names": list(self._names), "rounds": [dict(each) for each in self._rounds]}


def _in_vain(tried: Mapping[str, float]) -> int:
    """How many were tried since the first of the shortest."""
    return len(tried) - 1 - list(tried).index(first_of_the_shortest(tried))
