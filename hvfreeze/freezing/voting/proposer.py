"""What each criterion, deciding or in the shadow, has seen since its cut last moved, and what it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hvfreeze.freezing.voting.criteria import CRITERIA, Criterion, Evidence

USABLE_INTERVALS = 2
"""Whole intervals at a cut that a rate of change takes."""


@dataclass
class Proposer:
    """How one criterion, deciding or in the shadow, has fared: its cut and what it has seen since that cut."""

    name: str
    cut: int = 0
    intervals: int = 0
    """Complete intervals at this cut; -1 until the one after a change, which is dropped, is over."""
    recent: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, cut: int, intervals: int, recent: list[int]) -> Proposer:
        """Return the proposer that `state` tells of."""
        return cls(name, cut, intervals, list(recent))

    def state(self) -> list[Any]:
        """Return the values that `of` takes after the name."""
        return [self.cut, self.intervals, list(self.recent)]

    @property
    def criterion(self) -> Criterion:
        """What proposes."""
        return CRITERIA[self.name]

    def moved(self, cut: int) -> None:
        """Forget what was seen at the old cut."""
        self.cut, self.intervals, self.recent = cut, -1, []

    def propose(self, evidence: Evidence, patience: int) -> int:
        """Return the cut that the criterion has wanted at least for `patience` intervals in a row."""
        usable = self.intervals >= USABLE_INTERVALS or not self.criterion.watches_gradients
        seen = evidence if usable else replace(evidence, previous_norms=None, norms=None)
        self.recent = [*self.recent, self.criterion.propose(replace(seen, cut=self.cut)).cut][-patience:]
        return min(self.recent) if len(self.recent) == patience else self.cut
