"""The study of voting rules, from evidence to the sentence: what is kept, what is trained with, what the page says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from analysis import votes
from analysis.parts import vote_pages, vote_study
from analysis.parts.vote_log import RANKS, SKEWS, Log, Vote
from analysis.parts.vote_rules import Judged, Rule, Voting, default, replayed
from analysis.sweeps.kept import RESULTS, publish, texts_of
from hvfreeze.report.tables import to_csv
from tests.single.analysis.test_vote_rules import a_log

SEEDS = 3
NOTHING, ALL = [900_000, 900_000], [1_000, 2_000]
"""Rates of change of two blocks, in millionths, by which nothing freezes, and by which the first does."""


def a_run(skew: str, seed: int) -> Log:
    """Return evidence by which two ranks freeze the first block at once, and two others late."""
    log = a_log([[8.0, 4.0, 4.0], *[[1.0, 4.0, 4.0]] * 8], [1, 1, 1])
    for place, vote in enumerate(log["votes"]):
        late = ALL if place > 5 else NOTHING
        vote["etas"] = [ALL, ALL, late, late, late]
    log.update(skew=skew, seed=seed, accuracy=0.9 + seed / 1000)
    return log


def trained_by(skew: str, seed: int, decide: object) -> Log:
    """Return a run that is as accurate as it froze late, and whose evidence does not depend on what is frozen."""
    log = a_run(skew, seed)
    assert isinstance(decide, type(Voting(Rule(""), [], []).decide))
    cuts = [decide(vote) for vote in log["votes"]]
    log.update(cuts=cuts, accuracy=0.9 + seed / 1000 - 0.001 * sum(cuts))
    return log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the evidence, the replay and the training of a study."""
    monkeypatch.setattr(vote_study, "trained", trained_by)
    logs = [a_run(skew, seed) for seed in range(SEEDS) for skew in SKEWS]
    vote_study.write_logs(tmp_path / vote_study.EVIDENCE, logs)
    assert vote_study.read_logs(tmp_path / vote_study.EVIDENCE) == logs
    publish(tmp_path / vote_study.RULES, to_csv(vote_study.replay(logs)))
    vote_study.train_missing(tmp_path, seeds=range(SEEDS))
    return tmp_path


def test_a_deep_quorum_is_early_and_a_high_one_is_not_and_only_rules_that_differ_are_trained_with(folder: Path) -> None:
    rows = {row["rule"]: row for row in vote_study.rows_of(folder / vote_study.RULES, "gradient-norm", 0.02)}
    assert float(rows["uniform, 0.5"]["early"]) > float(rows["uniform, 0.75"]["early"])
    assert float(rows["uniform, 0.25"]["other_votes"]) == float(rows["uniform, 0.25"]["early_change"]) == 0.0
    assert vote_study.diverge(rows["uniform, 0.75"]) and not vote_study.diverge(rows["uniform, 0.25"])
    chosen = {rule.name for rule in vote_study.diverging(folder / vote_study.RULES)}
    assert {"uniform, 0.5", "uniform, 0.75", "averaged"} <= chosen
    assert "uniform, 0.25" not in chosen and "rank 0" not in chosen
    done = texts_of(folder / vote_study.TRAINED)
    assert {row["rule"] for row in done} == chosen
    # Nothing is made twice.
    before = (folder / vote_study.TRAINED).read_bytes()
    vote_study.train_missing(folder, seeds=range(SEEDS))
    assert (folder / vote_study.TRAINED).read_bytes() == before


def test_the_advice_is_a_rule_that_is_more_accurate_in_every_seed_and_else_the_default(folder: Path) -> None:
    best, _ = max(vote_pages.trained_changes(folder), key=lambda each: each[1].mean)
    assert best == "a quorum of 0.75 with gradient-norm"
    assert vote_pages.advice(folder).startswith(f"Choose {best}: against the defaults ")
    (table,) = [table for table in vote_pages.tables(folder) if table.title.startswith("gradient-norm")]
    assert table.rows[0][0] == "uniform, 0.5" and table.rows[0][-1] == ""
    rows = [{**row, "accuracy": "0.9"} for row in texts_of(folder / vote_study.TRAINED)]
    publish(folder / vote_study.TRAINED, to_csv(rows))
    assert vote_pages.advice(folder) == f"{vote_pages.KEEP}: nothing else is shown to be more accurate."
    assert "coherence, --min-gain 0.02: no rule froze anything." in vote_pages.said(folder)


def test_what_a_rule_forgoes_is_held_against_uniform_weights_that_save_as_much() -> None:
    logs = [a_run("iid", seed) for seed in range(2)]

    def fared(saved: float, forgone: float) -> dict[tuple[str, int], Judged]:
        return {vote_study.key(log): Judged(early=0, late=0, forgone=forgone, saved=saved, final=0) for log in logs}

    uniform = [fared(0.8, 0.4), fared(0.4, 0.1), fared(0.2, 0.0)]
    assert vote_study.excess(fared(0.6, 0.2), uniform, logs) == pytest.approx([-0.05] * 2)
    assert vote_study.excess(fared(0.1, 0.1), uniform, logs) == pytest.approx([0.1] * 2)


def test_a_rule_that_decides_alike_on_a_runs_evidence_repeats_that_run() -> None:
    first, other = default("gradient-norm", 0.02), Rule("gradient-norm", "uniform", 0.75)
    made = trained_by("iid", 0, Voting(first, [1] * RANKS, [1.0] * RANKS).decide)
    plain = a_run("iid", 0)
    assert vote_study.alike(first, [plain, made]) is made
    assert vote_study.alike(other, [plain, made]) is None
    assert vote_study.alike(default("coherence", 0.02), [plain, made]) is plain


def test_the_kept_rules_are_what_the_kept_evidence_says() -> None:
    folder = RESULTS / votes.EXPERIMENT.name
    logs = vote_study.read_logs(folder / vote_study.EVIDENCE)
    assert len({vote_study.key(log) for log in logs}) == len(logs)
    assert min(len(log["votes"]) for log in logs) >= 50
    for criterion, min_gain in vote_study.GROUPS:
        rows = vote_study.rows_of(folder / vote_study.RULES, criterion, min_gain)
        frozen = sum(replayed(default(criterion, min_gain), log)[-1] > 0 for log in logs)
        assert (int(rows[0]["runs"]), int(rows[0]["frozen_runs"])) == (len(logs), frozen)


def test_evidence_is_the_same_bytes_for_the_same_runs(tmp_path: Path) -> None:
    draw = random.Random(0)
    log = a_run("iid", draw.randrange(9))
    paths = [tmp_path / name for name in ("a.gz", "b.gz")]
    for path in paths:
        vote_study.write_logs(path, [log])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert set(vote_study.read_logs(paths[0])[0]["votes"][0]) == set(Vote.__annotations__)
