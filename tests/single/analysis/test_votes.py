"""Rules of voting decide on what ranks observed as the program does, and are judged by what the rest of a run gains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis import votes
from analysis.parts import vote_log
from analysis.parts.vote_log import RANKS, SKEWS, Interval, Log, Ranks, Shards
from analysis.parts.vote_replay import (
    WEIGHTINGS,
    Judged,
    Rule,
    Voting,
    bootstrap,
    by_seed,
    hindsight,
    judged,
    replayed,
    rules,
)
from analysis.sweeps.kept import publish
from hvfreeze.freezing import criteria
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.report.tables import to_csv
from hvfreeze.runs.reading import Move

WARM = 8
"""Step of the one interval before the first vote; those behind it are a vote each."""


def a_log(gained: list[list[float]], work: list[int], norms: list[list[float]] | None = None) -> Log:
    """Return a run of which the gains that hindsight sums are known, and for each rank norms of all blocks alike."""
    steps = [WARM, *(WARM * (2 + n) for n in range(len(gained)))]
    rows = [gained[0], *gained]
    intervals = [
        Interval(
            step=step,
            losses=[0.5] * RANKS,
            signals=[0.1] * RANKS,
            norms=[[1.0] * len(work)] * (RANKS + 1) if norms is None else [[each] * len(work) for each in norms[n]],
            gains=[[[1.0] * len(work)] * 4] * RANKS,
            gained=row,
        )
        for n, (step, row) in enumerate(zip(steps, rows, strict=True))
    ]
    told = {"samples": [1] * RANKS, "coverage": [1.0] * RANKS, "accuracy": 0.9, "commit": "", "processor": ""}
    return Log(skew="iid", seed=0, work=work, intervals=intervals, cuts=[0] * len(steps), **told)  # type: ignore[typeddict-item]


@pytest.fixture(scope="module")
def full() -> Iterator[Log]:
    """A training of few steps without freezing; others of its steps may follow."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STEPS", 56), ("KNOWN_STEPS", 2), ("BATCH", 16)):
            patch.setattr(vote_log, name, value)
        vote_log.known.cache_clear()
        yield vote_log.trained("iid", 0)
    vote_log.known.cache_clear()


@pytest.mark.parametrize("rule", [Rule("gradient-norm", "snr", 0.25), Rule("coherence", min_gain=3.0)], ids=str)
def test_a_rule_decides_on_its_own_evidence_as_it_has_decided_and_what_it_froze_changes_no_more(
    rule: Rule, full: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In so few steps no block gains a quarter of what it has gained at best.
    monkeypatch.setattr(criteria, "LEARNED", 100.0)
    log = vote_log.trained("iid", 0, Voting(rule, full).decide)
    assert full["cuts"] == [0] * 6 and log["cuts"] == sorted(log["cuts"]) and log["cuts"][-1] > 0
    assert replayed(rule, log) == log["cuts"]
    first = log["cuts"].index(log["cuts"][-1]) + 1
    frozen = log["cuts"][-1]
    for interval in log["intervals"][first:]:
        assert interval["gained"][:frozen] == [0.0] * frozen
        assert all(row[:frozen] == [0.0] * frozen for row in interval["norms"])


def test_weights_and_quorum_decide_whose_cut_it_is() -> None:
    steady, restless = [1.0] * 16, [1.0, 2.0] * 8
    # By the criterion a block freezes where its norm stays; ranks 0 and 1 want that.
    each = [steady, steady, restless, restless, restless]
    log = a_log([[1.0] * 5] * 15, [1] * 5, [list(column) for column in zip(*each)])
    ends = {rule.name: replayed(rule, log)[-1] for rule in rules("gradient-norm", min_gain=0.02)}
    assert ends["uniform, 0.25"] == ends["uniform, 0.5"] == ends["rank 0"] == 4
    assert ends["uniform, 0.75"] == ends["averaged"] == ends["fixed, 0.75"] == 0


def test_no_rule_freezes_where_all_blocks_gain_alike() -> None:
    log = a_log([[1.0] * 5] * 9, [1] * 5)
    listed = rules("coherence", min_gain=0.5)
    assert len({rule.name for rule in listed}) == len(listed) == 3 * len(WEIGHTINGS) + 2
    assert {tuple(replayed(rule, log)) for rule in listed} == {(0,) * 10}


def test_hindsight_freezes_what_the_later_votes_gain_nothing_by() -> None:
    log = a_log([[9.0, 9.0, 9.0], [4.0, 4.0, 4.0], [0.0, 4.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.1]], [1, 1, 1])
    # Gains after each vote: 4, 8, 12.1; 0, 4, 8.1; 0, 0, 4.1; and one too small to judge.
    assert hindsight(log, level=0.4) == [0, 1, 2, None, None]
    # The first block has 4 of 24.1 with a third of the work, both together 12 of 24.1 with two thirds.
    assert hindsight(log, level=0.6) == [1, 2, 2, None, None]


def test_a_rule_is_early_where_it_has_frozen_more_than_hindsight_and_late_where_less() -> None:
    log = a_log([[9.0, 9.0, 9.0], [4.0, 4.0, 4.0], [0.0, 4.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.1]], [1, 1, 2])
    right = hindsight(log, level=0.5)
    assert right == [0, 1, 2, None, None]
    eager, slow = judged([2] * 6, log, right), judged([0] * 6, log, right)
    assert (eager.early, eager.late, slow.early, slow.late) == pytest.approx((2 / 3, 0, 0, 2 / 3))
    assert (eager.forgone, slow.forgone) == pytest.approx((12 / 24.1, 0))
    assert (eager.saved, slow.saved, eager.final) == pytest.approx((0.5, 0, 1))
    good = judged([0, 0, 1, 2, 2, 2], log, right)
    assert good.early == good.late == 0


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
    assert sum(each.latest[0][0] for each in ranks.coherent) / RANKS == pytest.approx(pairwise, rel=1e-3)
    in_a_row = 0.1 * float(torch.stack(seen[0]).mean(0) @ torch.stack(seen[1]).mean(0))
    assert ranks.agreed[0][0] == pytest.approx(in_a_row, rel=1e-3)
    assert len(ranks.coherent[0].latest) == len(ranks.agreed) == 1


def test_ranks_differ_as_the_skew_says() -> None:
    plain = Shards.of(SKEWS["iid"], 1)
    for skew in ("iid", "sizes", "tenth", "labels", "noise"):
        kind = Shards.of(SKEWS[skew], 1)
        sizes = [len(shard) for shard in kind.plan.shards]
        own = torch.from_numpy(kind.plan.shards[RANKS - 1])
        wrong = (kind.labels != plain.labels).nonzero()[:, 0]
        changed = (kind.images != plain.images).flatten(1).any(1).nonzero()[:, 0]
        assert (max(sizes) > 2 * min(sizes)) is (skew in ("sizes", "tenth")), skew
        assert (len(wrong) > 0.5 * len(own)) is (skew == "labels") and set(wrong.tolist()) <= set(own.tolist()), skew
        assert (len(changed) == len(own)) is (skew == "noise") and set(changed.tolist()) <= set(own.tolist()), skew
        assert kind.honest == ((0, 1, 2) if SKEWS[skew].spoilt else (0, 1, 2, 3)), skew


SEEDS = 2


def a_run(skew: str, seed: int) -> Log:
    """Return evidence by which two ranks freeze the first block at once, and two others late."""
    steady, late = [1.0] * 10, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    rows = [list(column) for column in zip(steady, steady, late, late, late)]
    return {**a_log([[8.0, *[4.0] * 4], *[[1.0, *[4.0] * 4]] * 8], [1] * 5, rows), "skew": skew, "seed": seed}


def trained_by(skew: str, seed: int, decide: object) -> Log:
    """Return a run that is more accurate the later it froze, and whose evidence does not depend on frozen blocks."""
    log = a_run(skew, seed)
    cuts = [decide(interval) for interval in log["intervals"]]  # type: ignore[operator]
    return {**log, "cuts": cuts, "accuracy": 0.9 + seed / 1000 - 0.001 * sum(cuts)}


def test_only_rules_that_differ_are_trained_with_and_nothing_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes, "trained", trained_by)
    monkeypatch.setattr(votes, "GROUPS", votes.GROUPS[:1])
    monkeypatch.setattr(votes, "TRAINED_SKEWS", votes.TRAINED_SKEWS[:1])
    monkeypatch.setattr(votes, "SKEWS", {skew: SKEWS[skew] for skew in votes.TRAINED_SKEWS})
    logs = [a_run(skew, seed) for seed in range(SEEDS) for skew in votes.TRAINED_SKEWS]
    votes.write_logs(tmp_path / votes.EVIDENCE, logs)
    assert votes.read_logs(tmp_path / votes.EVIDENCE) == logs
    publish(tmp_path / votes.RULES, to_csv(votes.replay(logs)))
    study = votes.Study(tmp_path)
    rows = study.rows("gradient-norm", 0.02)
    assert rows.early["uniform, 0.5"] > rows.early["uniform, 0.75"]
    assert rows.other_votes["uniform, 0.25"] == rows.early_change["uniform, 0.25"] == 0.0
    chosen = {rule.name for rule in study.diverging()}
    assert {"uniform, 0.5", "uniform, 0.75", "averaged"} <= chosen
    assert "uniform, 0.25" not in chosen and "rank 0" not in chosen
    votes.train_missing(tmp_path, seeds=range(SEEDS))
    before = (tmp_path / votes.TRAINED).read_bytes()
    votes.train_missing(tmp_path, seeds=range(SEEDS))
    assert (tmp_path / votes.TRAINED).read_bytes() == before
    assert set(pd.read_csv(tmp_path / votes.TRAINED)["rule"]) == chosen
    assert votes.Study(tmp_path).gained("gradient-norm", 0.02, "uniform, 0.75").low > 0


def test_what_a_rule_forgoes_is_held_against_uniform_weights_that_save_as_much() -> None:
    logs = [a_run("iid", seed) for seed in range(2)]

    def fared(saved: float, forgone: float) -> dict[tuple[str, int], Judged]:
        return {votes.key(log): Judged(early=0, late=0, forgone=forgone, saved=saved, final=0) for log in logs}

    uniform = [fared(0.8, 0.4), fared(0.4, 0.1), fared(0.2, 0.0)]
    assert votes.excess(fared(0.6, 0.2), uniform, logs) == pytest.approx([-0.05] * 2)
    assert votes.excess(fared(0.1, 0.1), uniform, logs) == pytest.approx([0.1] * 2)
