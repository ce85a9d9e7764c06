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
NEAR = 1.25
"""What takes so many times the shortest steps in both of the first rounds is not tried again."""


class Trial:
    """Tries compressions in rounds, and keeps the first of the shortest steps.

    A forecast knows what a rank computes and what the network carries. It does not know what ranks that share a
    processor's memory take from each other, nor what a message costs the processor that sends it; steps do. Every
    other round goes backwards: a pace that changes steadily favours none, and what low rank has left out of gradients
    is lost less often, for it is kept from one rank to the next only.

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
            return self._next[1]
        medians = self.medians
        return (
            first_of_the_shortest({name: medians[name] for name in self._left(ROUNDS)}) if medians else self._names[0]
        )

    @property
    def medians(self) -> Mapping[str, float]:
        """What has been tried, with the seconds of its steps: their median over rounds."""
        taken = {name: [each[name] for each in self._rounds if name in each] for name in self._names}
        return {name: statistics.median(seconds) for name, seconds in taken.items() if seconds}

    def add(self, seconds: Sequence[float]) -> None:
        """Count the TRIED_STEPS steps of `now`, and go on or stop: to be worth it, more change must save a part."""
        assert self._next is not None, "the trial is over"
        number, name = self._next
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = statistics.median(seconds[1:])

    @property
    def _next(self) -> tuple[int, str] | None:
        """The round that is under way and what is to be tried in it; None when the trial is over."""
        for number in range(ROUNDS):
            left = self._left(number)
            if len(left) == 1:
                return None
            tried = self._rounds[number] if number < len(self._rounds) else {}
            for name in reversed(left) if number % 2 else left:
                if name not in tried:
                    return number, name
        return None

    def _left(self, number: int) -> Sequence[str]:
        """Return what a round tries: all in the first two, then what came near in one of them."""
        if number < 2 or len(self._names) == 1:
            return self._names
        least = {name: min(self._rounds[0][name], self._rounds[1][name]) for name in self._names}
        return [name for name in self._names if least[name] <= NEAR * min(least.values())]

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trial has come, as `Trial(**state)` takes it."""
        return {"names": list(self._names), "rounds": [dict(each) for each in self._rounds]}
