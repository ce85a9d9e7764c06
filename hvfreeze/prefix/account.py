"""What the cache was expected to save and what it saved, for each stay of the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvfreeze.cache.compute import Counters
from hvfreeze.cache.planning.plan import Plan
from hvfreeze.prefix.measuring import Misses


class Sums(NamedTuple):
    """What one rank has done since it began."""

    rows_read: int = 0
    """At whatever cut they lay."""
    seconds_saved: float = 0.0


@dataclass(frozen=True)
class Stay:
    """A plan, whether rows were kept for it, and where the rank stood when it was made."""

    cut: int
    plan: Plan
    kept: bool
    began: Sums


@dataclass
class Account:
    """Seconds that the batches asked for would have taken from images, less what they took; stay by stay."""

    misses: Misses
    counters: Counters
    stays: list[Stay] = field(default_factory=list)
    _saved: float = 0.0
    _batches: int = 0
    _took: float = 0.0

    def settle(self, cut: int) -> None:
        """Count what was asked for since the last call, while the cut stood at `cut`."""
        took = self.misses.spent + self.counters.read_seconds + self.counters.write_seconds
        if cut > 0:
            asked = self.counters.batches - self._batches
            self._saved += asked * self.misses.seconds_per_batch() - (took - self._took)
        self._batches, self._took = self.counters.batches, took

    def begin(self, cut: int, plan: Plan, *, kept: bool) -> None:
        """Note a plan; everything before it is settled."""
        self.stays.append(Stay(cut, plan, kept, self.sums))

    @property
    def sums(self) -> Sums:
        """What was done up to the last settlement."""
        return Sums(self.counters.rows_read + sum(self.counters.rows_advanced.values()), self._saved)

    def of_stays(self) -> list[Sums]:
        """Return what was done in each stay."""
        ends = [*(stay.began for stay in self.stays), self.sums][1:]
        return [
            Sums(end.rows_read - stay.began.rows_read, end.seconds_saved - stay.began.seconds_saved)
            for stay, end in zip(self.stays, ends, strict=True)
        ]


def summary_of(stays: Sequence[Stay], done: Sequence[Sequence[Sums]]) -> dict[str, Any]:
    """Return the entries of summary.json's `cache` that hold predictions beside what came of them.

    Args:
        stays: of any rank: plans are equal on all.
        done: of each rank, what it did in each stay; rows are summed over ranks, seconds are a rank's mean.
    """
    told = []
    for number, stay in enumerate(stays):
        plan, ranks = stay.plan, [rank[number] for rank in done]
        # What was to be read after the next move is that move's plan to tell, where there was one.
        last = number == len(stays) - 1
        told.append(
            {
                "cut": stay.cut,
                "kept": stay.kept,
                "reason": plan.reason,
                "rows_read_predicted": round(plan.rows_read + last * plan.rows_read_later),
                "rows_read": sum(rank.rows_read for rank in ranks),
                "seconds_saved_predicted": plan.seconds_saved + last * plan.seconds_saved_later,
                "seconds_saved": sum(rank.seconds_saved for rank in ranks) / len(ranks),
            }
        )
    names = ("rows_read_predicted", "rows_read", "seconds_saved_predicted", "seconds_saved")
    return {**{name: sum(stay[name] for stay in told) for name in names}, "stays": told}
