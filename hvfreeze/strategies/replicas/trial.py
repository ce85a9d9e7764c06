"""Compressions tried in turn, in steps that count for training like all others: pure functions of their seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self

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
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._medians: dict[str, float] = {}
        self._best, self._over = self._names[0], len(self._names) == 1

    @property
    def over(self) -> bool:
        """Whether `now` stays."""
        return self._over

    @property
    def now(self) -> str:
        """What the next steps are exchanged by."""
        return self._best if self._over else self._names[len(self._medians)]

    @property
    def medians(self) -> Mapping[str, float]:
        """What has been tried, with the seconds of its steps."""
        return self._medians

    def add(self, seconds: Sequence[float]) -> None:
        """Count the TRIED_STEPS steps of `now`, and go on or stop: to be worth it, more change must save a part."""
        name, taken = self.now, statistics.median(seconds[1:])
        ahead = not self._medians or CLOSE * taken < self._medians[self._best]
        self._medians[name] = taken
        if ahead:
            self._best = name
        self._over = not ahead or len(self._medians) == len(self._names)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trial has come."""
        return {"names": list(self._names), "medians": dict(self._medians), "best": self._best, "over": self._over}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the trial that has come as far."""
        trial = cls(state["names"])
        trial._medians, trial._best, trial._over = dict(state["medians"]), state["best"], state["over"]
        return trial
