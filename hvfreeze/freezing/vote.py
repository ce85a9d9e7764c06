"""The vote: all ranks' proposals and weights, the tally, and the new cut, with the same bits on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypedDict

import torch

from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing.criteria import Evidence, Proposer, gain_shares, rates_of_change

WEIGHT_STEPS = 2**20


class ShadowOutcome(TypedDict):
    """The outcome of a shadow criterion, which has no effect: each rank's proposal, and the cut it would give."""

    proposals: list[int]
    cut: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of one vote, a line of decisions.jsonl.

    `proposals` and `weights` have an entry per rank. `tally` has an entry per cut, in units of the largest weight /
    2^20; `total` is the tally of a cut that every rank supports. `etas` (rates of change) and `gains` (shares of the
    gain of a step) are for information. They have an entry per rank and block, None if unknown; gains of frozen blocks
    are known only after a probe.
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
    gains: list[list[float | None]] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        """Return True if the cut changed."""
        return self.cut_after != self.cut_before


def usable_weight(weight: float) -> tuple[float, str]:
    """Return the weight to count, and why it is 0 if the computed one was NaN, infinite or negative."""
    if not math.isfinite(weight):
        return 0.0, f"weight {weight} is NaN or infinite and counts as 0"
    if weight < 0:
        return 0.0, f"weight {weight:g} is negative and counts as 0"
    return weight, ""


def fixed_point(weight: float, largest: float) -> int:
    """Return `weight` / `largest` as a multiple of 2^-20, rounded to nearest; 0 if `largest` is 0."""
    return round(weight / largest * WEIGHT_STEPS) if largest > 0 else 0


def deepest_supported(tally: Sequence[int], *, quorum: float, cut: int) -> int:
    """Return the deepest cut whose tally reaches `quorum` of the total; `cut` if all weights are 0.

    `tally[k]` is the summed weight that supports cut k; `tally[0]` is the total. A cut is thawed if ranks that propose
    a shallower one leave it without the quorum.
    """
    total = tally[0]
    if total <= 0:
        return cut
    # From its decimal text: the float 0.1 is a little more than a tenth, and a tally equal to the quorum must freeze.
    needed = Fraction(str(quorum)) * total
    supported = [k for k in range(len(tally)) if tally[k] >= needed]
    return max(supported, default=cut)


def explain(tally: Sequence[int], *, quorum: float, cut_before: int, cut_after: int) -> str:
    """Return the reason for a vote's result, as one clause."""
    total = tally[0]
    if total <= 0:
        return "all weights are 0"
    if cut_after == cut_before:
        if cut_before + 1 == len(tally):
            return "all blocks except the head are frozen"
        return f"cut {cut_before + 1} has {tally[cut_before + 1] / total:.3f} of the weight, quorum {quorum:g}"
    if cut_after < cut_before:
        return f"cut {cut_after + 1} has only {tally[cut_after + 1] / total:.3f} of the weight, quorum {quorum:g}"
    return f"cut {cut_after} has {tally[cut_after] / total:.3f} of the weight, quorum {quorum:g}"


def coverage(labels: Sequence[int], num_classes: int) -> float:
    """Return the normalized entropy of the labels (0-1) times their number: how much of the task a rank sees."""
    counts = torch.bincount(torch.as_tensor(labels, dtype=torch.int64), minlength=num_classes).double()
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * shares.log()).sum())
    return entropy / math.log(num_classes) * len(labels) if num_classes > 1 else float(len(labels))


@dataclass(frozen=True, kw_only=True)
class Voter:
    """Properties of a rank's shard on which its voting weight may depend."""

    samples: int = 1
    coverage: float = 1.0


def voting_weight(kind: str, *, rank: int, voter: Voter, mean_loss: float, signal_to_noise: float) -> float:
    """Return this rank's voting weight before normalisation.

    `loss` is exp(mean local loss of the interval). Normalised over ranks it is a softmax with temperature 1, so ranks
    with harder data count more. A list has one weight per rank.
    """
    if kind == "uniform":
        return 1.0
    if kind == "samples":
        return float(voter.samples)
    if kind == "coverage":
        return voter.coverage
    if kind == "snr":
        return signal_to_noise
    if kind == "loss":
        return math.exp(min(mean_loss, 100.0)) if not math.isnan(mean_loss) else math.nan
    return float(kind.split(",")[rank])


def hold_vote(
    world: World,
    settings: FreezeConfig,
    proposers: Sequence[Proposer],
    evidence: Evidence,
    *,
    weight: float,
    broken: bool,
    step: int,
    epoch: int,
) -> Decision:
    """Vote once for every criterion with one message, without applying the result. Collective.

    Args:
        world: the ranks that vote.
        settings: the deciding criterion, patience and quorum.
        proposers: the criteria, the deciding one first if there is one; each records its proposal.
        evidence: the input of this rank's criteria.
        weight: this rank's computed weight; an invalid one counts as 0, which the decision reports.
        broken: whether this rank's gradients contain NaN or Inf, which makes the vote void.
        step: optimizer steps done.
        epoch: the epoch of the step.
    """
    local = [proposer.propose(evidence, settings.patience) for proposer in proposers]
    etas = [math.nan if eta is None else eta for eta in rates_of_change(evidence)]
    shares = gain_shares(evidence)
    shown = [weight, *etas, *shares]
    proposals, numbers, broken_ranks = exchange(world, local, shown, broken)
    weights, notes = counted_weights([row[0] for row in numbers], broken_ranks)
    cast = [0 if broken_ranks else fixed_point(each, max(weights)) for each in weights]
    # Every rank has all ballots, and adds up integers: there is nothing left to send.
    tallies = [count(proposed, cast, deepest=evidence.num_blocks - 1) for proposed in proposals]
    cuts = [
        deepest_supported(tally, quorum=settings.quorum, cut=proposer.cut)
        for proposer, tally in zip(proposers, tallies, strict=True)
    ]
    decides = proposers[0].name == settings.freeze
    after = cuts[0] if decides else evidence.cut
    why = explain(tallies[0], quorum=settings.quorum, cut_before=evidence.cut, cut_after=after)
    return Decision(
        step=step,
        epoch=epoch,
        criterion=settings.freeze,
        proposals=proposals[0] if decides else [],
        weights=weights,
        tally=tallies[0] if decides else [],
        total=tallies[0][0],
        quorum=settings.quorum,
        cut_before=evidence.cut,
        cut_after=after,
        reason="; ".join([why if decides else "only shadow criteria are scored here", *notes]),
        shadow={
            proposer.name: ShadowOutcome(proposals=proposed, cut=cut)
            for proposer, proposed, cut in zip(proposers, proposals, cuts, strict=True)
            if proposer.name != settings.freeze
        },
        etas=[known(row[1 : 1 + len(etas)]) for row in numbers],
        gains=[known(row[1 + len(etas) :]) for row in numbers] if shares else [],
    )


def known(values: Sequence[float]) -> list[float | None]:
    """Return the values, with None instead of NaN."""
    return [None if math.isnan(value) else value for value in values]


def counted_weights(weights: Sequence[float], broken_ranks: Sequence[int]) -> tuple[list[float], list[str]]:
    """Return the weights to count, by rank, and notes on invalid weights and on a void vote."""
    usable = [usable_weight(weight) for weight in weights]
    notes = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(usable) if why]
    if broken_ranks:
        notes.append(
            f"NaN or Inf in the gradients of rank {', '.join(map(str, broken_ranks))}; this vote does not count"
        )
    return [counted for counted, _ in usable], notes


def exchange(
    world: World, proposals: Sequence[int], numbers: Sequence[float], broken: bool
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Return all ranks' proposals (per criterion, per rank), numbers (per rank), and the ranks with broken gradients.

    Every rank writes its own column of an integer table that is zero elsewhere, with floats as their bits, so the sum
    is exact. Collective: every rank of `world` must call this.
    """
    bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    column = torch.cat([torch.tensor([int(broken), *proposals], dtype=torch.int64), bits])
    table = torch.zeros(len(column), world.size, dtype=torch.int64)
    table[:, world.rank] = column
    table = world.allreduce_sum(table, name="vote.ballots")
    floats = table[len(column) - len(bits) :].T.contiguous().view(torch.float64)
    return table[1 : 1 + len(proposals)].tolist(), floats.tolist(), torch.nonzero(table[0]).flatten().tolist()


def count(proposals: Sequence[int], cast: Sequence[int], *, deepest: int) -> list[int]:
    """Return the tally: for every cut 0..`deepest` the summed weight `cast` by the ranks whose proposal supports it."""
    votes = list(zip(proposals, cast, strict=True))
    return [sum(weight for proposal, weight in votes if proposal >= cut) for cut in range(deepest + 1)]
