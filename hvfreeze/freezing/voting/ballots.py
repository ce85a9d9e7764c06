"""Holding a vote: ranks tell each other their proposals and weights, and all count the same tally."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.voting.criteria import Evidence, rates_of_change
from hvfreeze.freezing.voting.proposer import Proposer
from hvfreeze.freezing.voting.vote import (
    Decision,
    ShadowOutcome,
    ballot,
    deepest_supported,
    explain,
    fixed_point,
    usable_weight,
)
from hvfreeze.ranks.world import World


def hold_vote(
    world: World,
    settings: FreezeConfig,
    proposers: Sequence[Proposer],
    evidence: Evidence,
    *,
    weight: float,
    broken: bool,
    step: int,
    steps_per_epoch: int,
) -> Decision:
    """Vote once for every criterion; nothing is applied.

    Collective: every rank of `world` must call this in the same step.

    Args:
        world: the ranks that vote.
        settings: the deciding criterion, patience and quorum.
        proposers: the criteria, the deciding one first where there is one; each takes note of its proposal.
        evidence: what this rank's criteria see.
        weight: of this rank's vote, as computed; what cannot be a weight counts 0, and the decision says so.
        broken: whether this rank's gradients are not finite, which makes the vote void.
        step: optimizer steps done.
        steps_per_epoch: for the decision's epoch.
    """
    mine = [proposer.propose(evidence, settings.patience) for proposer in proposers]
    etas = [math.nan if eta is None else eta for eta in rates_of_change(evidence)]
    proposals, numbers, broken_ranks = exchange(world, mine, [weight, *etas], broken)
    weights, notes = counted_weights([row[0] for row in numbers], broken_ranks)
    cast = fixed_point(weights[world.rank], max(weights)) if not broken_ranks else 0
    tallies = count(world, mine, cast, deepest=evidence.num_blocks - 1)
    cuts = [
        deepest_supported(tally, quorum=settings.quorum, cut=proposer.cut)
        for proposer, tally in zip(proposers, tallies, strict=True)
    ]
    decides = proposers[0].name == settings.freeze
    after = cuts[0] if decides else evidence.cut
    why = explain(tallies[0], quorum=settings.quorum, cut_before=evidence.cut, cut_after=after)
    return Decision(
        step=step,
        epoch=step // steps_per_epoch,
        criterion=settings.freeze,
        proposals=proposals[0] if decides else [],
        weights=weights,
        tally=tallies[0] if decides else [],
        total=tallies[0][0],
        quorum=settings.quorum,
        cut_before=evidence.cut,
        cut_after=after,
        reason="; ".join([why if decides else "only shadow criteria are scored", *notes]),
        shadow={
            proposer.name: ShadowOutcome(proposals=proposed, cut=cut)
            for proposer, proposed, cut in zip(proposers, proposals, cuts, strict=True)
            if proposer.name != settings.freeze
        },
        etas=[[None if math.isnan(eta) else eta for eta in row[1:]] for row in numbers],
    )


def counted_weights(weights: Sequence[float], broken_ranks: Sequence[int]) -> tuple[list[float], list[str]]:
    """Return the weights of all ranks that count, and notes on those that do not, or on why none does."""
    usable = [usable_weight(weight) for weight in weights]
    notes = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(usable) if why]
    if broken_ranks:
        notes.append(f"gradients are not finite on rank {', '.join(map(str, broken_ranks))}: the vote is void")
    return [counted for counted, _ in usable], notes


def exchange(
    world: World, proposals: Sequence[int], numbers: Sequence[float], broken: bool
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Return all ranks' proposals (per criterion, per rank), numbers (per rank), and the ranks that are broken.

    Every rank writes its own column of an integer table that is zero elsewhere, floats as their bits, so that the
    sum is exact. Collective: every rank of `world` must call this.
    """
    bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    column = torch.cat([torch.tensor([int(broken), *proposals], dtype=torch.int64), bits])
    table = torch.zeros(len(column), world.size, dtype=torch.int64)
    table[:, world.rank] = column
    table = world.allreduce_sum(table, name="vote.ballots")
    floats = table[len(column) - len(bits) :].T.contiguous().view(torch.float64)
    return table[1 : 1 + len(proposals)].tolist(), floats.tolist(), torch.nonzero(table[0]).flatten().tolist()


def count(world: World, proposals: Sequence[int], cast: int, *, deepest: int) -> list[list[int]]:
    """Return per criterion the weight that all ranks together give every cut 0..`deepest`.

    Collective: every rank of `world` must call this.
    """
    mine = torch.tensor([ballot(p, cast, deepest=deepest) for p in proposals], dtype=torch.int64)
    return world.allreduce_sum(mine, name="vote.tally").tolist()
