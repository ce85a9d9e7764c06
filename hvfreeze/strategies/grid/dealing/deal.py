"""How the ranks are dealt out to a chain whose front freezes: fewer partitions, more lines. Pure functions.

What is frozen has no backward pass, and what is cached no forward pass either: ranks that held it would wait. They
become further lines of the rest, in place of partitions. A replica's batch is then shared out to its lines by whole
micro-batches, so that a step is the mean over the same micro-batches as before. Source of the idea: He et al.,
"PipeTransformer", ICML 2021, arXiv 2102.03161.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.chain.segments import Segment, cut_evenly

FORWARD_SHARE = 1 / 3
"""Of a block's time in a step, where a backward pass takes twice as long as a forward pass."""


@dataclass(frozen=True)
class Deal:
    """Who holds which blocks from a step on; equal on all ranks."""

    segments: tuple[Segment, ...]
    """By partition."""
    step: int = 0
    """The first that was, or will be, made so."""
    cached: bool = False
    """Whether the frozen prefix was taken to cost nothing."""

    @property
    def parts(self) -> int:
        """How many ranks a line has."""
        return len(self.segments)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Deal:
        """Undo `plain`."""
        segments = tuple((start, stop) for start, stop in plain["segments"])
        return cls(segments, plain["step"], plain["cached"])

    def plain(self) -> dict[str, Any]:
        """Return the deal as plain values."""
        return {
            "step": self.step,
            "parts": self.parts,
            "segments": [list(segment) for segment in self.segments],
            "cached": self.cached,
        }

    def told(self) -> str:
        """Return who holds what, for the user."""
        return f"{self.parts} parts (blocks {', '.join(f'{start}..{stop - 1}' for start, stop in self.segments)})"

    def partition_of(self, block: int) -> int:
        """Return which partition holds a block."""
        return next(part for part, (start, stop) in enumerate(self.segments) if start <= block < stop)

    def at_rest(self, cut: int) -> int:
        """Return how many partitions hold frozen blocks alone."""
        return sum(stop <= cut for _, stop in self.segments)


def shorter_lines(parts: int, *, micro_batches: int) -> list[int]:
    """Return how many partitions there may be in place of `parts`, fewest first.

    A line becomes several whole ones, which share a batch evenly.
    """
    return [fewer for fewer in range(1, parts) if parts % fewer == 0 and micro_batches % (parts // fewer) == 0]


def next_deal(
    deal: Deal, *, cut: int, cached: bool, step: int, costs: Sequence[float], first: int, micro_batches: int
) -> Deal | None:
    """Return how ranks are dealt out from `step` on, None where they stay.

    The lines' number grows by a whole factor, so that every rank goes on with its own replica's samples. While a frozen
    prefix must be computed, partitions that train keep as many ranks as they had, or more; once it is cached, at most
    as many.

    Args:
        deal: the one so far.
        cut: number of frozen blocks.
        cached: whether their output is read.
        step: optimizer steps made.
        costs: of each block's forward and backward pass.
        first: partitions of the run's first deal.
        micro_batches: of a replica's batch.
    """
    training = deal.parts - deal.at_rest(cut)
    possible = shorter_lines(first, micro_batches=micro_batches)
    fewer = [parts for parts in possible if deal.parts % parts == 0 and parts < min(deal.parts, len(costs) - cut + 1)]
    fitting = [parts for parts in fewer if (parts <= training if cached else parts >= training)]
    if training < deal.parts and fitting:
        return Deal(cut_again(costs, cut=cut, cached=cached, parts=(max if cached else min)(fitting)), step, cached)
    if cached and not deal.cached and 1 < deal.parts < first and deal.parts <= len(costs) - cut:
        # Ranks are as they should be; blocks are not, since those of the first partition cost less than they did.
        segments = cut_again(costs, cut=cut, cached=True, parts=deal.parts)
        return Deal(segments, step, True) if segments != deal.segments else None
    return None


def cut_again(costs: Sequence[float], *, cut: int, cached: bool, parts: int) -> tuple[Segment, ...]:
    """Return `parts` segments of alike cost, the first of which has the frozen blocks and at least one that trains."""
    frozen = 0.0 if cached else FORWARD_SHARE * sum(costs[:cut])
    segments = cut_evenly([frozen + costs[cut], *costs[cut + 1 :]], parts=parts)
    return tuple((start + cut if start else 0, stop + cut) for start, stop in segments)


def transfers(before: Sequence[Segment], after: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Return (block, from, to) for every block that a rank must be sent, where ranks held and are to hold segments.

    Args:
        before: by rank.
        after: by rank.
    """
    return [
        (block, next(rank for rank, (start, stop) in enumerate(before) if start <= block < stop), to)
        for to, (start, stop) in enumerate(after)
        for block in range(start, stop)
        if not before[to][0] <= block < before[to][1]
    ]
