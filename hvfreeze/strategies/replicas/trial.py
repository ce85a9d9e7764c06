"""Compressions tried in turn, in steps that count for training like all others: pure functions of their seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvfreeze.ranks.exchange.forecast import CLOSE

TRIED_STEPS = 6
"""Of each compression; the first, which lays out anew, does not count."""


class Trial:
    """Goes on to the next compression as long as each makes steps shorter than the best so far.

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
        return len(self._names) == 1 or len(self._medians) == len(self._names) or self._overshot

    @property
    def now(self) -> str:
        """What the next steps are exchanged by."""
        tried = len(self._medians)
        return self._names[tried if not self.over else max(0, tried - 1 - self._overshot)]

    @property
    def medians(self) -> Mapping[str, float]:
        """What has been tried, with the seconds of its steps."""
        return self._medians

    def add(self, seconds: Sequence[float]) -> None:
        """Count the TRIED_STEPS steps of `now`, and go on or stop: to be worth it, more change must save a part."""
        self._medians[self.now] = statistics.median(seconds[1:])

    @property
    def _overshot(self) -> bool:
        """Whether the last saved too little over the one before it."""
        taken = list(self._medians.values())
        return len(taken) > 1 and CLOSE * taken[-1] >= taken[-2]

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trial has come, as `Trial(**state)` takes it."""
        return {"names": list(self._names), "medians": dict(self._medians)}
