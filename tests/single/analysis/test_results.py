from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.sweeps.estimates import bits_per_second, duration
from analysis.sweeps.experiment import RESULTS
from analysis.sweeps.front import Budget, Front
from analysis.sweeps.results import Results, best_lr
from analysis.sweeps.rows import cell, read_rows, steady_columns, unlike, wire_bytes_per_step, write_rows
from hvfreeze.runs.reading import Run


def test_a_hash_that_looks_like_a_number_stays_a_hash(tmp_path: Path) -> None:
    write_rows(
        tmp_path, [{"run": "a", "seed": 0, "lr": 0.1, "commit": "9e59029", "parameter_digest": "0012345678901234"}]
    )
    (row,) = read_rows(tmp_path)
    assert row == {"run": "a", "seed": 0, "lr": 0.1, "commit": "9e59029", "parameter_digest": "0012345678901234"}


def test_the_front_is_linear_between_budgets_and_flat_beyond() -> None:
    front = Front((Budget(20.0, 0.8, epochs=10), Budget(10.0, 0.6, epochs=5)))
    assert front.accuracy(15.0) == pytest.approx(0.7)
    assert front.accuracy(5.0) == 0.6
    assert front.accuracy(99.0) == 0.8
    assert front.seconds(5) == 10.0
    assert front.seconds(7) is None


def test_the_front_is_taken_at_the_pace_of_full_fine_tuning_among_the_same_runs() -> None:
    """Twice as slow throughout: half of the full run's time is half of the front's time too."""
    front = Front((Budget(20.0, 0.8, epochs=10), Budget(10.0, 0.6, epochs=5)))
    made = {"full": (40.0, 0.8), "frozen": (30.0, 0.75)}
    rows = [
        {"label": label, "seed": seed, "epochs": 10, "train_seconds": seconds, "test_accuracy": accuracy}
        for seed in (0, 1)
        for label, (seconds, accuracy) in made.items()
    ]
    results = Results(Path(), rows, front, {0: front, 1: front}, "full")
    assert results.paces() == {0: 2.0, 1: 2.0}
    assert results.over_front("frozen").mean == pytest.approx(0.75 - 0.7)
    assert Results(Path(), rows[1:], front, {0: front, 1: front}, "full").over_front("frozen").n == 1


def test_a_caption_counts_the_seeds_of_what_it_shows() -> None:
    rows = [{"label": label, "seed": seed} for label, n in (("a", 3), ("b", 5), ("c", 4)) for seed in range(n)]
    assert Results(Path(), rows).count(["a"]) == "n = 3 seeds"
    assert Results(Path(), rows).count(["a", "b", "c"]) == "n = 3 to 5 seeds"


def test_the_learning_rate_is_chosen_on_held_out_samples_by_the_mean() -> None:
    def row(label: str, lr: float, accuracy: float, held_out: float) -> dict[str, object]:
        return {"label": label, "lr": lr, "test_accuracy": accuracy, "validation_fraction": held_out}

    rows = [
        row("lr1", 0.1, 0.9, 0.2),
        row("lr1", 0.1, 0.5, 0.2),
        row("lr2", 0.2, 0.8, 0.2),
        row("epochs1", 9.0, 1.0, 0.0),
    ]
    assert best_lr(rows) == 0.2
    assert best_lr([]) is None


def test_cells_come_back_as_what_they_were() -> None:
    assert [cell(text) for text in ("", "True", "3", "0.5", "1gbit", "1,0,0,0")] == [
        None,
        True,
        3,
        0.5,
        "1gbit",
        "1,0,0,0",
    ]


@pytest.mark.parametrize("experiment", ["static_sweep", "adaptive", "votes"])
def test_vote_columns_are_empty_where_nobody_votes_and_numbers_where_ranks_do(experiment: str) -> None:
    rows = read_rows(RESULTS / experiment)
    voting = {row["freeze"] for row in rows if row["votes"] is not None}
    silent = {row["freeze"] for row in rows if {row["votes"], row["moves"], row["disagreements"]} == {None}}
    assert silent <= {"none", "static"} and not voting & {"none", "static"}
    assert voting | silent == {row["freeze"] for row in rows}


def test_rates_and_durations_are_read_and_written() -> None:
    assert bits_per_second("200mbit") == 2e8
    assert bits_per_second("") == float("inf")
    assert [duration(seconds) for seconds in (30, 600, 7200)] == ["30 s", "10 min", "2.0 h"]


@pytest.mark.parametrize(
    ("compression", "epochs", "left_out"), [("none", 6, 1), ("fp16", 1, 0), ("powersgd:4", 6, 3), ("powersgd:4", 2, 1)]
)
def test_epochs_before_low_rank_sets_in_are_not_timed(
    compression: str, epochs: int, left_out: int, tmp_path: Path
) -> None:
    metrics = [
        {"step": 4 * (epoch + 1), "seconds": {"forward": 9.0 if epoch < left_out else 1.0}} for epoch in range(epochs)
    ]
    run = Run(
        name="low-rank",
        directory=tmp_path,
        config={"exchange": {"compression": compression}},
        environment={},
        metrics=tuple(metrics),
        decisions=(),
        summary=None,
    )
    assert unlike(run) == left_out
    assert steady_columns(run)["step_seconds"] == pytest.approx(0.25)
    (tmp_path / "wire.json").write_text(json.dumps({str(epoch + 1): {"node0": 8 * epoch} for epoch in range(epochs)}))
    assert wire_bytes_per_step(run) == (2.0 if epochs > 1 else None)
