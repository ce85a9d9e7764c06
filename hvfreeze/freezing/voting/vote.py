"""The vote: weights and proposals of all ranks -> tally -> the new cut. Pure functions, the same bits on every rank.

S_k is the weight of the ranks whose proposal is at least k; the new cut is the deepest k whose S_k reaches
quorum x total. S_k falls with k, so the frozen blocks are always a prefix. Weights become integers before they are
added: sums of integers do not depend on the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypedDict

WEIGHT_STEPS = 2**20


class ShadowOutcome(TypedDict):
    """What a criterion without effect would have done: each rank's proposal, and the cut after the vote."""

    proposals: list[int]
    cut: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of one vote, a line of decisions.jsonl.

    `proposals` and `weights` have an entry per rank, `tally` an entry per cut 0..deepest (integers in units of the
    largest weight / 2^20), `total` is the tally of a cut that everybody supports.
    `etas` are each rank's rates of change per block (None where unknown), for the reader.
    """

    step: int
    epoch: int
    criterion: str
    proposals: list[int]
    weights: list[float]
    tally: list[int]
    total: int
    quorum: float
    cut_before: int
    cut_after: int
    reason: str
    shadow: dict[str, ShadowOutcome] = field(default_factory=dict)
    etas: list[list[float | None]] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        """Tell whether the cut changed."""
        return self.cut_after != self.cut_before


def usable_weight(weight: float) -> tuple[float, str]:
    """Return a computed weight as it counts, and why it counts 0 where it was NaN, infinite or negative."""
    if not math.isfinite(weight):
        return 0.0, f"weight {weight} is not finite and counts 0"
    if weight < 0:
        return 0.0, f"weight {weight:g} is negative and counts 0"
    return weight, ""


def fixed_point(weight: float, largest: float) -> int:
    """Return `weight` / `largest` as a multiple of 2^-20, rounded to nearest; 0 where `largest` is 0."""
    return round(weight / largest * WEIGHT_STEPS) if largest > 0 else 0


def ballot(proposal: int, weight: int, *, deepest: int) -> list[int]:
    """Return one rank's share of the tally: its weight for every cut 0..`deepest` that its proposal supports."""
    return [weight if proposal >= cut else 0 for cut in range(deepest + 1)]


def deepest_supported(tally: Sequence[int], *, quorum: float, cut: int) -> int:
    """Return the deepest cut whose tally reaches `quorum` of the total; `cut` where no weight was cast.

    `tally[k]` is the summed weight that supports cut k; `tally[0]` is the total. A vote never thaws.
    """
    total = tally[0]
    if total <= 0:
        return cut
    # As typed: 0.1 as a binary float is a little more than a tenth, and equality must freeze.
    needed = Fraction(str(quorum)) * total
    supported = [k for k in range(cut, len(tally)) if tally[k] >= needed]
    return max(supported, default=cut)


def explain(tally: Sequence[int], *, quorum: float, cut_before: int, cut_after: int) -> str:
    """Return one clause that says why the vote ended as it did."""
    total = tally[0]
    if total <= 0:
        return "no weight was cast"
    if cut_after == cut_before:
        if cut_before + 1 == len(tally):
            return "every block but the head is frozen"
        return f"cut {cut_before + 1} has {tally[cut_before + 1] / total:.3f} of the weight, quorum {quorum:g}"
    return f"cut {cut_after} has {tally[cut_after] / total:.3f} of the weight, quorum {quorum:g}"
