"""Rules of voting on logged evidence decide as the program does, and are judged by what the rest of a run gains."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from analysis.parts import vote_log
from analysis.parts.vote_log import RANKS, SKEWS, Log, Ranks, Shards, Vote, bounds, learned, pairs, thousandths
from analysis.parts.vote_rules import (
    ETA_MAX,
    WEIGHTINGS,
    Rule,
    Scores,
    Voting,
    bootstrap,
    by_seed,
    decided,
    hindsight,
    judged,
    replayed,
    rules,
)
from hvfreeze.freezing.criteria import CRITERIA, Evidence, Proposer, rates_of_change
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.runs.reading import Move

BLOCKS = 5
WORK = (1.0, 2.0, 4.0, 2.0, 0.5)


def evidence(draw: random.Random, *, cut: int = 0, min_gain: float = 0.5) -> Evidence:
    """Return a rank's evidence, of which some asks for a deeper cut by either criterion."""
    size = [10 ** draw.uniform(-2, 0) for _ in range(BLOCKS)]
    gains = tuple(
        tuple(0.0 if b < cut else size[b] * (1 + draw.gauss(0, 0.3)) for b in range(BLOCKS)) for _ in range(32)
    )
    return Evidence(
        cut=cut,
        num_blocks=BLOCKS,
        has_parameters=(True,) * BLOCKS,
        previous_norms=(1.0,) * BLOCKS,
        # The head's norm is never among the observed ones.
        norms=tuple(1 + draw.uniform(-0.15, 0.15) if b < BLOCKS - 1 else 0.0 for b in range(BLOCKS)),
        epoch=1.0,
        num_epochs=9,
        warmup_epochs=0.0,
        eta_max=ETA_MAX,
        gains=gains,
        peaks=tuple(each * draw.choice((1.2, 5.0, 20.0)) for each in size),
        work=WORK,
        min_gain=min_gain,
    )


def vote_of(known: list[Evidence], step: int = 0) -> Vote:
    """Return the vote whose rows are this evidence, with equal losses and signals."""
    bound = [[None if abs(each) == float("inf") else thousandths(each) for each in bounds(e)] for e in known]
    return Vote(
        step=step,
        losses=[1000] * RANKS,
        signals=[1000] * RANKS,
        etas=[[None if eta is None else round(1e6 * eta) for eta in rates_of_change(e)[:-1]] for e in known],
        learned=[[thousandths(part) for part in learned(e)] for e in known],
        bounds=bound,
        gained=[1.0] * BLOCKS,
    )


@pytest.mark.parametrize("criterion", ["coherence", "gradient-norm"])
def test_what_a_rank_wants_by_its_logged_scores_is_what_the_criterion_proposes(criterion: str) -> None:
    draw, moved = random.Random(0), 0
    for _ in range(200):
        cut = draw.randrange(BLOCKS - 1)
        known = evidence(draw, cut=cut)
        wanted = Scores.of(vote_of([known]), 0).wanted(Rule(criterion, min_gain=0.5), cut)
        assert wanted == CRITERIA[criterion].propose(known)
        moved += wanted > cut
    assert 20 < moved < 180


@pytest.mark.parametrize("criterion", ["coherence", "gradient-norm"])
def test_a_replay_waits_as_long_as_the_programs_proposers_do(criterion: str) -> None:
    draw = random.Random(1)
    voting = Voting(Rule(criterion, min_gain=0.5), [1] * RANKS, [1.0] * RANKS)
    proposers = [Proposer(criterion, intervals=1) for _ in range(RANKS)]
    cut, cuts = 0, []
    for _ in range(30):
        # The same evidence for a while, so that patience is met.
        if len(cuts) % 3 == 0:
            seeds = [draw.random() for _ in range(RANKS)]
        known = [evidence(random.Random(seed), cut=cut) for seed in seeds]
        for proposer in proposers:
            proposer.intervals += 1
        proposals = [proposer.propose(own, 1) for proposer, own in zip(proposers, known, strict=True)]
        after = decided(proposals, [1.0] * RANKS, quorum=0.5, cut=cut, deepest=BLOCKS - 1)
        assert voting.decide(vote_of([*known, known[0]])) == after
        for proposer in proposers if after != cut else ():
            proposer.moved(after)
        cut = after
        cuts.append(cut)
    assert len(set(cuts)) > 2


def test_weights_and_quorum_decide_whose_cut_it_is() -> None:
    proposals = [3, 2, 1, 0]
    assert [decided(proposals, [1.0] * 4, quorum=q, cut=0, deepest=4) for q in (0.25, 0.5, 0.75)] == [3, 2, 1]
    assert decided(proposals, [1.0, 1.0, 1.0, 9.0], quorum=0.5, cut=0, deepest=4) == 0
    assert decided(proposals, [9.0, 1.0, 1.0, 1.0], quorum=0.5, cut=0, deepest=4) == 3
    assert decided(proposals, [0.0] * 4, quorum=0.5, cut=2, deepest=4) == 2


def a_log(gained: list[list[float]], work: list[int]) -> Log:
    """Return a run of which only the gains are known."""
    quiet = [[1000] * (len(work) - 1)] * (RANKS + 1)
    votes = [
        Vote(
            step=n,
            losses=[0] * RANKS,
            signals=[1] * RANKS,
            etas=[[None] * (len(work) - 1)] * (RANKS + 1),
            learned=quiet,
            bounds=[[None] * len(pairs(len(work)))] * (RANKS + 1),
            gained=row,
        )
        for n, row in enumerate(gained)
    ]
    constant = {"skew": "iid", "seed": 0, "accuracy": 0.9, "cuts": [0] * len(votes), "commit": "", "processor": ""}
    return Log(samples=[1] * RANKS, coverage=[1.0] * RANKS, work=work, votes=votes, **constant)  # type: ignore[typeddict-item]


def test_hindsight_freezes_what_the_later_votes_gain_nothing_by() -> None:
    log = a_log([[9.0, 9.0, 9.0], [4.0, 4.0, 4.0], [0.0, 4.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.1]], [1, 1, 1])
    # Of the gains after each vote: 4, 8, 12.1; 0, 4, 8.1; 0, 0, 4.1; and what is too little to judge by.
    assert hindsight(log, level=0.4) == [0, 1, 2, None, None]
    # The first block has 4 of 24.1 with a third of the work, both together 12 of 24.1 with two thirds.
    assert hindsight(log, level=0.6) == [1, 2, 2, None, None]


def test_a_rule_is_early_where_it_has_frozen_more_than_hindsight_and_late_where_less() -> None:
    log = a_log([[9.0, 9.0, 9.0], [4.0, 4.0, 4.0], [0.0, 4.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.1]], [1, 1, 2])
    right = hindsight(log, level=0.5)
    assert right == [0, 1, 2, None, None]
    eager, slow = judged([2] * 5, log, right), judged([0] * 5, log, right)
    assert (eager.early, eager.late, slow.early, slow.late) == pytest.approx((2 / 3, 0, 0, 2 / 3))
    assert (eager.forgone, slow.forgone) == pytest.approx((12 / 24.1, 0))
    assert (eager.saved, slow.saved, eager.final) == pytest.approx((0.5, 0, 1))
    good = judged([0, 1, 2, 2, 2], log, right)
    assert good.early == good.late == 0


def test_nothing_is_frozen_by_any_rule_where_nobody_knows_anything() -> None:
    log = a_log([[1.0] * 3] * 9, [1, 1, 1])
    for criterion in ("gradient-norm", "coherence"):
        listed = rules(criterion, min_gain=0.5)
        assert len({rule.name for rule in listed}) == len(listed) == 3 * len(WEIGHTINGS) + 3
        assert {tuple(replayed(rule, log)) for rule in listed} == {(0,) * 9}


def test_medians_are_of_the_ranks_alone_and_unknown_where_one_is() -> None:
    log = a_log([[1.0] * 3], [1, 1, 1])
    vote = log["votes"][0]
    vote["learned"] = [[1, 9], [2, 8], [3, 7], [4, 6], [99, 99]]
    vote["etas"] = [[5, 5], [6, None], [7, 7], [8, 8], [0, 0]]
    assert Scores.medians(vote).learned == [2, 7]
    assert Scores.medians(vote).etas == [6, None]


def test_the_bootstrap_draws_seeds_and_repeats_itself() -> None:
    assert bootstrap([0.25] * 10) == bootstrap([0.25] * 10)
    assert (bootstrap([0.25] * 10).low, bootstrap([0.25] * 10).high) == (0.25, 0.25)
    spread = bootstrap([0.0, 1.0] * 5)
    assert spread.low < 0.35 < spread.mean == 0.5 < 0.65 < spread.high
    assert spread.low > 0.0 and spread.high < 1.0
    # Skews of a seed are no draws of their own.
    assert by_seed({("a", 0): 0.0, ("b", 0): 1.0, ("a", 1): 1.0, ("b", 1): 1.0}) == [0.5, 1.0]


def test_ranks_estimate_gains_from_all_pairs_of_ranks_and_the_judge_from_two_steps_in_a_row() -> None:
    torch.manual_seed(0)
    chain = vote_log.network()
    optimizer = vote_log.sgd(chain, 0.1)
    prefix = FrozenPrefix(chain, optimizer)
    ranks = Ranks(prefix, optimizer, range(RANKS))
    prefix.on_move(ranks.follow)
    prefix.move(Move(0, 0, 0))
    shards = Shards.of(SKEWS["iid"], 0)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(2):
        gradients, losses = vote_log.gradients_of(prefix, shards, step, generator)
        ranks.observe(gradients, losses)
        seen.append([torch.cat([g.reshape(-1) for g in own[:3]]) for own in gradients])
    # The first block's three parameters: all pairs of ranks in the sampled step, and the averages of both steps.
    own, count = torch.stack(seen[0]), RANKS * (RANKS - 1)
    pairwise = 0.1 * float(own.sum(0).square().sum() - own.square().sum()) / count
    assert ranks.coherent[RANKS].latest[0][0] == pytest.approx(pairwise, rel=1e-3)
    in_a_row = 0.1 * float(torch.stack(seen[0]).mean(0) @ torch.stack(seen[1]).mean(0))
    assert ranks.agreed[0][0] == pytest.approx(in_a_row, rel=1e-3)
    assert len(ranks.coherent[RANKS].latest) == len(ranks.agreed) == 1


@pytest.mark.parametrize("skew", list(SKEWS))
def test_ranks_differ_as_the_skew_says(skew: str) -> None:
    kind, plain = Shards.of(SKEWS[skew], 1), Shards.of(SKEWS["iid"], 1)
    sizes = [len(shard) for shard in kind.plan.shards]
    own = torch.from_numpy(kind.plan.shards[RANKS - 1])
    wrong = (kind.labels != plain.labels).nonzero()[:, 0]
    changed = (kind.images != plain.images).flatten(1).any(1).nonzero()[:, 0]
    assert (max(sizes) > 2 * min(sizes)) is (skew in ("sizes", "tenth"))
    assert (len(wrong) > 0.5 * len(own)) is (skew == "labels") and set(wrong.tolist()) <= set(own.tolist())
    assert (len(changed) == len(own)) is (skew == "noise") and set(changed.tolist()) <= set(own.tolist())
    assert kind.honest == ((0, 1, 2) if SKEWS[skew].spoilt else (0, 1, 2, 3))


def test_what_a_rule_froze_does_not_change_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vote_log, "STEPS", 60)
    monkeypatch.setattr(vote_log, "KNOWN_STEPS", 2)
    vote_log.known.cache_clear()
    full, frozen = vote_log.trained("iid", 0), vote_log.trained("iid", 0, lambda vote: 2 if vote["step"] >= 24 else 0)
    vote_log.known.cache_clear()
    assert full["cuts"] == [0] * 6 and frozen["cuts"] == [0, 2, 2, 2, 2, 2]
    assert full["votes"][:2] == frozen["votes"][:2]
    assert frozen["votes"][3]["gained"][:2] == [0.0, 0.0] and min(full["votes"][3]["gained"]) != 0.0
    assert frozen["votes"][3]["etas"][0][:2] == [None, None]
