"""Rules of voting, replayed on what ranks knew, and how often each freezes too early or too late."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from analysis.parts.vote_log import INTERVAL, MILLIONTHS, RANKS, THOUSANDTHS, WARMUP, Log, Vote, pairs
from analysis.sweeps.statistics import Interval
from hvfreeze.freezing.criteria import CRITERIA, LEARNED, USABLE_INTERVALS, Evidence
from hvfreeze.freezing.vote import Voter, ballot, deepest_supported, fixed_point, voting_weight

WEIGHTINGS = ("uniform", "samples", "loss", "coverage", "snr", "fixed")
FIXED = "1,1,1,0"
"""The list of weights: the rank that is spoilt or small has no vote, as if one knew."""
QUORUMS = (0.25, 0.5, 0.75)
ETA_MAX = 0.2
"""The program's own default."""


@dataclass(frozen=True)
class Rule:
    """Who decides on a cut, and by what."""

    criterion: str
    way: str = "uniform"
    """One of `WEIGHTINGS`, or `rank 0` alone, `median` of the ranks' scores, `averaged` gradients."""
    quorum: float = 0.5
    min_gain: float = 0.02
    """Of coherence."""

    @property
    def name(self) -> str:
        """What a table calls it, without the criterion."""
        return f"{self.way}, {self.quorum:g}" if self.way in WEIGHTINGS else self.way


def rules(criterion: str, *, min_gain: float) -> list[Rule]:
    """Return every rule with a criterion, the program's default first."""
    voted = [Rule(criterion, way, quorum, min_gain) for way in WEIGHTINGS for quorum in QUORUMS]
    others = [Rule(criterion, way, 0.5, min_gain) for way in ("rank 0", "median", "averaged")]
    return sorted([*voted, *others], key=lambda rule: rule != default(criterion, min_gain))


def default(criterion: str, min_gain: float) -> Rule:
    """Return the program's default way of voting with a criterion."""
    return Rule(criterion, min_gain=min_gain)


@functools.cache
def places(num_blocks: int) -> dict[tuple[int, int], int]:
    """Return where each pair of cuts stands among `pairs`."""
    return {pair: place for place, pair in enumerate(pairs(num_blocks))}


@dataclass(frozen=True)
class Scores:
    """One voter's evidence, of a rank or of several together."""

    etas: Sequence[int | None]
    learned: Sequence[int]
    bounds: Sequence[int | None]

    @classmethod
    def of(cls, vote: Vote, row: int) -> Scores:
        """Return a row of a vote's evidence."""
        return cls(vote["etas"][row], vote["learned"][row], vote["bounds"][row])

    @classmethod
    def medians(cls, vote: Vote) -> Scores:
        """Return the ranks' medians, score by score; of an even number the lower one."""

        def middle(rows: Sequence[Sequence[int | None]]) -> list[int | None]:
            return [
                None if None in column else sorted(v for v in column if v is not None)[(RANKS - 1) // 2]
                for column in zip(*rows[:RANKS])
            ]

        known = [value for value in middle(vote["learned"]) if value is not None]
        return cls(middle(vote["etas"]), known, middle(vote["bounds"]))

    def wanted(self, rule: Rule, cut: int) -> int:
        """Return the cut that the criterion asks for, as it is now; see `criteria.coherence` and `gradient_norm`."""
        return self._coherent(rule.min_gain, cut) if rule.criterion == "coherence" else self._steady(rule, cut)

    def _coherent(self, min_gain: float, cut: int) -> int:
        blocks, best = len(self.learned) + 1, cut
        place = places(blocks)
        for k in range(cut + 1, blocks):
            most = self.bounds[place[cut, k]]
            if self.learned[k - 1] > LEARNED * THOUSANDTHS:
                break
            if most is not None and most < min_gain * THOUSANDTHS:
                best = k
        return best

    def _steady(self, rule: Rule, cut: int) -> int:
        blocks = len(self.etas) + 1
        if None in self.etas[cut:]:
            return cut
        evidence = Evidence(
            cut=cut,
            num_blocks=blocks,
            # The head has no eta.
            has_parameters=(*(True,) * (blocks - 1), False),
            # Norms whose rate of change is eta.
            previous_norms=(1.0,) * blocks,
            norms=(*(1 + (eta or 0) / MILLIONTHS for eta in self.etas), 1.0),
            epoch=0.0,
            num_epochs=1,
            warmup_epochs=0.0,
            eta_max=ETA_MAX,
        )
        return CRITERIA[rule.criterion].propose(evidence)


@dataclass
class Voting:
    """A rule under way: what the program's `Proposer` and `hold_vote` do, from logged evidence. Cuts never fall."""

    rule: Rule
    samples: Sequence[int]
    coverage: Sequence[float]
    cut: int = 0
    intervals: int = WARMUP // INTERVAL - 1
    """Complete ones at this cut."""
    recent: list[list[int]] = field(default_factory=list)
    """What each voter wanted by the last votes."""

    def decide(self, vote: Vote) -> int:
        """Return the cut after a vote."""
        self.intervals += 1
        if self.cut == self._deepest(vote):
            return self.cut
        patience = CRITERIA[self.rule.criterion].patience
        voters = self._voters(vote)
        usable = self.intervals >= USABLE_INTERVALS
        wanted = [scores.wanted(self.rule, self.cut) if usable else self.cut for scores in voters]
        self.recent = [*self.recent, wanted][-patience:]
        whole = len(self.recent) == patience
        proposals = [min(column) if whole else self.cut for column in zip(*self.recent)]
        after = decided(
            proposals, self._weights(vote), quorum=self.rule.quorum, cut=self.cut, deepest=self._deepest(vote)
        )
        if after > self.cut:
            self.cut, self.intervals, self.recent = after, -1, []
        return self.cut

    def _voters(self, vote: Vote) -> list[Scores]:
        if self.rule.way == "median":
            return [Scores.medians(vote)]
        if self.rule.way in ("rank 0", "averaged"):
            return [Scores.of(vote, 0 if self.rule.way == "rank 0" else RANKS)]
        return [Scores.of(vote, rank) for rank in range(RANKS)]

    def _weights(self, vote: Vote) -> list[float]:
        if self.rule.way not in WEIGHTINGS:
            return [1.0]
        kind = FIXED if self.rule.way == "fixed" else self.rule.way
        return [
            voting_weight(
                kind,
                rank=rank,
                voter=Voter(samples=self.samples[rank], coverage=self.coverage[rank]),
                mean_loss=vote["losses"][rank] / THOUSANDTHS,
                signal_to_noise=vote["signals"][rank] / MILLIONTHS,
            )
            for rank in range(RANKS)
        ]

    def _deepest(self, vote: Vote) -> int:
        return len(vote["learned"][0])


def decided(proposals: Sequence[int], weights: Sequence[float], *, quorum: float, cut: int, deepest: int) -> int:
    """Return the cut after a vote, by the program's own tally."""
    cast = [fixed_point(weight, max(weights)) for weight in weights]
    ballots = [ballot(proposal, weight, deepest=deepest) for proposal, weight in zip(proposals, cast, strict=True)]
    return deepest_supported([sum(column) for column in zip(*ballots)], quorum=quorum, cut=cut)


def replayed(rule: Rule, log: Log) -> list[int]:
    """Return the cut after every vote of a run in which nothing froze, had the rule decided."""
    voting = Voting(rule, log["samples"], log["coverage"])
    return [voting.decide(vote) for vote in log["votes"]]


LEVEL = 0.3
"""A front is better frozen where the rest of the run gains by it less than this part of what its share of the time
would, if all blocks gained as much for their time."""
LEFT = 0.05
"""Part of a run's gain that must be still to come for a vote to be judged: what is less is noise."""


def hindsight(log: Log, *, level: float = LEVEL) -> list[int | None]:
    """Return after every vote the deepest cut that the later votes of a run in which nothing froze bear out.

    With R_b the sum of block b's gains in the later intervals (0 where it is negative) and w_b its work, that is the
    deepest k with sum_{b<k} R_b < level * (sum_{b<k} w_b / sum w) * sum R; None where sum R is less than `LEFT` of
    the same after the first vote.
    """
    rests = [[0.0] * len(log["work"])]
    for vote in reversed(log["votes"][1:]):
        rests.append([before + gain for before, gain in zip(rests[-1], vote["gained"], strict=True)])
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
    """Of the votes, after which it had more frozen than hindsight bears out."""
    late: float
    """Of the votes, after which it had less frozen."""
    forgone: float
    """Of all that was gained from the first vote on, what blocks gained that it would have had frozen."""
    saved: float
    """Of the blocks' work from the first vote on, what is that of blocks that it would have had frozen."""
    final: float
    """The cut at the end, as a part of the deepest."""


def judged(cuts: Sequence[int], log: Log, right: Sequence[int | None]) -> Judged:
    """Judge the cuts after every vote by a run in which nothing froze, and by `hindsight` of it."""
    known = [(cut, best) for cut, best in zip(cuts, right, strict=True) if best is not None]
    # What a vote freezes is frozen in the interval before the next vote, which that one's evidence is about.
    gains = [(cut, vote["gained"]) for cut, vote in zip(cuts, log["votes"][1:])]
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


RESAMPLES = 2000


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the mean over seeds with the middle 95 % of the means of as many drawn with replacement."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2:
        return Interval(float(given.mean()) if len(given) else math.nan, math.nan, math.nan, len(given))
    low, high = np.quantile(given[drawn(len(given), seed)].mean(1), [0.025, 0.975])
    return Interval(float(given.mean()), float(low), float(high), len(given))


@functools.cache
def drawn(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `RESAMPLES` rows of as many places, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def by_seed(values: Mapping[tuple[str, int], float]) -> list[float]:
    """Return for every seed the mean over skews; values are by skew and seed."""
    seeds = sorted({seed for _, seed in values})
    return [statistics.fmean(value for (_, own), value in values.items() if own == seed) for seed in seeds]
