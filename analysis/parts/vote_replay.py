"""Rules of voting, replayed on what ranks observed, and how often each freezes too early or too late.

The criterion, its patience and the vote are the program's own; only the ranks are not there at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from analysis.benchmarks.judging import bootstrap_interval
from analysis.parts.vote_log import INTERVAL, LR, RANKS, WARMUP, Interval, Log, network, sgd
from analysis.sweeps.statistics import Interval as Spread
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing.coherence import Coherence, gap
from hvfreeze.freezing.criteria import CRITERIA, Evidence, Proposer
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.freezing.vote import Voter, hold_vote, voting_weight
from hvfreeze.runs.reading import Move

WEIGHTINGS = {way: way for way in ("uniform", "samples", "loss", "coverage", "snr")} | {"fixed": "1,1,1,0"}
"""Name -> `--vote-weight`; `fixed` leaves out the rank that is spoilt or small, as if one knew."""
ALONE, AVERAGED = "rank 0", "averaged"
QUORUMS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Rule:
    """A rule that decides on a cut, and its evidence."""

    criterion: str
    way: str = "uniform"
    """One of `WEIGHTINGS`, rank 0 `ALONE`, or by `AVERAGED` gradients, which all ranks see alike."""
    quorum: float = 0.5
    min_gain: float = 0.02
    """`--min-gain` of coherence."""

    @property
    def name(self) -> str:
        """The rule's name in a table, without the criterion."""
        return f"{self.way}, {self.quorum:g}" if self.way in WEIGHTINGS else self.way

    @property
    def settings(self) -> FreezeConfig:
        """The rule's settings for the program."""
        alone = ",".join(["1", *["0"] * (RANKS - 1)])
        weight = alone if self.way == ALONE else WEIGHTINGS.get(self.way, "uniform")
        return FreezeConfig(
            freeze=self.criterion, quorum=self.quorum, min_gain=self.min_gain, vote_weight=weight, eta_max=0.2
        )


def rules(criterion: str, *, min_gain: float) -> list[Rule]:
    """Return every rule with a criterion, the program's default first."""
    voted = [Rule(criterion, way, quorum, min_gain) for way in WEIGHTINGS for quorum in QUORUMS]
    others = [Rule(criterion, way, 0.5, min_gain) for way in (ALONE, AVERAGED)]
    return sorted([*voted, *others], key=lambda rule: rule != default(criterion, min_gain))


def default(criterion: str, min_gain: float) -> Rule:
    """Return the program's default way of voting with a criterion."""
    return Rule(criterion, min_gain=min_gain)


class InTurn(SoloWorld):
    """Ranks that vote one after another: each adds its ballot, and the last one knows the outcome."""

    def __init__(self) -> None:
        self.size, self.ballots = RANKS, torch.zeros(1, dtype=torch.int64)

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the sum of the ballots so far."""
        self.ballots = self.ballots + tensor
        return self.ballots


class Voting:
    """A rule under way, on logged intervals."""

    def __init__(self, rule: Rule, log: Log) -> None:
        chain = network()
        optimizer = sgd(chain, LR)
        self.rule, self.settings, self.log = rule, rule.settings, log
        self.prefix = FrozenPrefix(chain, optimizer)
        self.proposers = [Proposer(rule.criterion) for _ in range(RANKS)]
        self.coherent = [
            Coherence(self.prefix, optimizer, Reducer(SoloWorld()), every=gap(INTERVAL)) for _ in range(RANKS)
        ]
        self.norms: list[list[tuple[float, ...]]] = []
        """Norms of the last intervals at this cut, by rank."""
        self._move(0, step=0)

    def decide(self, interval: Interval) -> int:
        """Return the cut after an interval, of which there is a vote at the end behind the warm-up."""
        cut = self.prefix.cut
        own = interval["norms"]
        rows = [own[RANKS if self.rule.way == AVERAGED else rank] for rank in range(RANKS)]
        self.norms = [*self.norms, [tuple(row) for row in rows]][-2:]
        watches = CRITERIA[self.rule.criterion].watches
        for rank, (proposer, coherent) in enumerate(zip(self.proposers, self.coherent, strict=True)):
            proposer.intervals += 1
            if watches == "gains":
                coherent.latest = [[0.0] * cut + row[cut:] for row in self._gains(interval, rank)]
                coherent.end_interval()
                coherent.restart()
        if interval["step"] < WARMUP:
            return cut
        world = InTurn()
        for rank, proposer in enumerate(self.proposers):
            world.rank = rank
            decision = hold_vote(
                world,
                self.settings,
                [proposer],
                self._evidence(rank),
                weight=self._weight(interval, rank),
                broken=False,
                step=interval["step"],
                epoch=0,
            )
        if decision.cut_after > cut:
            self._move(decision.cut_after, step=interval["step"])
        return self.prefix.cut

    def _gains(self, interval: Interval, rank: int) -> list[list[float]]:
        if self.rule.way != AVERAGED:
            return interval["gains"][rank]
        return [[sum(column) / RANKS for column in zip(*row)] for row in zip(*interval["gains"])]

    def _evidence(self, rank: int) -> Evidence:
        count, known = len(self.prefix.chain.blocks), [norms[rank] for norms in self.norms]
        previous, current = known if len(known) == 2 else (None, None)
        return Evidence(
            cut=self.prefix.cut,
            num_blocks=count,
            has_parameters=(True,) * count,
            previous_norms=previous,
            norms=current,
            epoch=0.0,
            num_epochs=1,
            warmup_epochs=0.0,
            eta_max=self.settings.eta_max,
            min_gain=self.settings.min_gain,
            gains=self.coherent[rank].gains,
            peaks=tuple(self.coherent[rank].peaks),
            work=tuple(map(float, self.log["work"])),
        )

    def _weight(self, interval: Interval, rank: int) -> float:
        return voting_weight(
            self.settings.vote_weight,
            rank=rank,
            voter=Voter(samples=self.log["samples"][rank], coverage=self.log["coverage"][rank]),
            mean_loss=interval["losses"][rank],
            signal_to_noise=interval["signals"][rank],
        )

    def _move(self, cut: int, *, step: int) -> None:
        self.prefix.move(Move(0, step, cut))
        self.norms = []
        for proposer, coherent in zip(self.proposers, self.coherent, strict=True):
            coherent.follow()
            if step:
                proposer.moved(cut)


def replayed(rule: Rule, log: Log) -> list[int]:
    """Return the cut after every interval of a run in which nothing froze, had the rule decided."""
    voting = Voting(rule, log)
    return [voting.decide(interval) for interval in log["intervals"]]


LEVEL = 0.3
"""A front is better frozen where the rest of the run gains by it less than this part of what its share of the time
would, if all blocks gained as much for their time."""
LEFT = 0.05
"""Least remaining share of a run's gain for which a vote is judged; less is noise."""


T = TypeVar("T")


def voted(each: Sequence[T], log: Log) -> list[T]:
    """Return what belongs to intervals with a vote at their end."""
    return [own for own, interval in zip(each, log["intervals"], strict=True) if interval["step"] >= WARMUP]


def hindsight(log: Log, *, level: float = LEVEL) -> list[int | None]:
    """Return after every vote the deepest cut that the later intervals of a run in which nothing froze bear out.

    With R_b the sum of block b's gains in the later intervals (0 where it is negative) and w_b its work, that is the
    deepest k with sum_{b<k} R_b < level * (sum_{b<k} w_b / sum w) * sum R; None where sum R is less than `LEFT` of
    the same after the first vote.
    """
    rests = [[0.0] * len(log["work"])]
    for interval in reversed(voted(log["intervals"], log)[1:]):
        rests.append([before + gain for before, gain in zip(rests[-1], interval["gained"], strict=True)])
    positive = [[max(0.0, gain) for gain in rest] for rest in reversed(rests)]
    enough = LEFT * sum(positive[0])
    return [borne_out(gains, log["work"], level) if sum(gains) > max(enough, 0.0) else None for gains in positive]


def borne_out(gains: Sequence[float], work: Sequence[float], level: float) -> int:
    """Return the deepest cut whose blocks have less than `level` of the gain that their part of the work would have."""
    cuts = range(1, len(gains))
    cheap = [k for k in cuts if sum(gains[:k]) * sum(work) < level * sum(work[:k]) * sum(gains)]
    return max(cheap, default=0)


@dataclass(frozen=True)
class Judged:
    """How a rule fared in one run. All are parts, 0-1."""

    early: float
    """Share of votes after which more blocks were frozen than hindsight supports."""
    late: float
    """Share of votes after which fewer blocks were frozen than hindsight supports."""
    forgone: float
    """Share of the total gain from the first vote on that frozen blocks would have had."""
    saved: float
    """Share of the blocks' work from the first vote on that freezing saves."""
    final: float
    """The cut at the end, as a part of the deepest."""


def judged(cuts: Sequence[int], log: Log, right: Sequence[int | None]) -> Judged:
    """Judge the cuts after every vote by a run in which nothing froze, and by `hindsight` of it."""
    cuts = voted(cuts, log)
    known = [(cut, best) for cut, best in zip(cuts, right, strict=True) if best is not None]
    # The blocks that a vote freezes are frozen in the interval before the next vote, and so in its evidence.
    gains = [(cut, interval["gained"]) for cut, interval in zip(cuts, voted(log["intervals"], log)[1:])]
    whole = sum(sum(gained) for _, gained in gains)
    lost = sum(sum(gained[:cut]) for cut, gained in gains)
    work = sum(log["work"])
    return Judged(
        early=sum(cut > best for cut, best in known) / max(1, len(known)),
        late=sum(cut < best for cut, best in known) / max(1, len(known)),
        forgone=lost / whole if whole > 0 else math.nan,
        saved=sum(sum(log["work"][:cut]) for cut in cuts) / (work * len(cuts)),
        final=cuts[-1] / (len(log["work"]) - 1),
    )


def bootstrap(values: Sequence[float]) -> Spread:
    """Return the mean over seeds with the middle 95 % of the means of as many drawn with replacement."""
    mean = statistics.fmean(values) if values else math.nan
    ends = bootstrap_interval(values, np.mean) if len(values) > 1 else (math.nan, math.nan)
    return Spread(mean, *ends, len(values))


def by_seed(values: Mapping[tuple[str, int], float]) -> list[float]:
    """Return for every seed the mean over skews; values are by skew and seed."""
    seeds = sorted({seed for _, seed in values})
    return [statistics.fmean(value for (_, own), value in values.items() if own == seed) for seed in seeds]
