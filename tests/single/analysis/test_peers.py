"""All ways of fine-tuning: their runs and learning rates, times as sums over steps, and the reported first one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis import peers
from analysis.parts.peers import (
    Cell,
    ahead,
    best_rates,
    by_samples,
    cell_of,
    shortest,
    steps_of,
    summed,
    timed,
)
from analysis.sweeps.presets import REDUCED
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import plan

EVERYWHERE = peers.Task(counts=list(peers.BUDGETS))
KINDS = {
    "ddp": 7.0,
    **{f"live{cut}": 10.0 - cut for cut in range(6)},
    **{f"cached{cut}": 1 / cut for cut in range(1, 6)},
}
PLAIN: dict[str, Any] = {"label": "n5000-full-e4", "program": "hvfreeze", "ranks": 2, "batch_size": 64}
PLAIN |= {"image_size": 32, "steps": 40, "epochs": 4, "final_cut": 0, "cut_history": "0@0", "cache": "off"}
PLAIN |= {"augment": "fresh", "train_seconds": 3.0}


def test_what_the_front_page_shows_has_ten_seeds_other_ways_five_and_20_000_samples_three() -> None:
    every = [run for name in ("peers", "peers_more") for run in plan(peers.EXPERIMENTS[name], REDUCED, Results(Path()))]
    tested = [run for run in every if "validation_fraction" not in run.flags]
    for label in {run.label for run in tested}:
        cell = cell_of(label)
        shown = cell.peer == "full" or (cell.peer in {"auto", "auto-one-view"} and cell.epochs == 1)
        seeds = 3 if cell.samples == 20_000 else 10 if shown else 5
        assert {run.seed for run in tested if run.label == label} == set(range(seeds)), label


def test_auto_has_budgets_of_its_own_and_no_learning_rate_to_choose() -> None:
    chosen = [(cell.samples, cell.epochs) for cell, _ in peers.cells(REDUCED, EVERYWHERE) if cell.peer == "auto"]
    assert chosen == [(1_000, 1), (5_000, 1), (5_000, 4), (20_000, 1), (20_000, 4)]
    assert not [run for run in peers.runs(REDUCED, peers.Task()) if "auto" in run.label]
    used = {run.label: run.flags for run in peers.then(REDUCED, Results(Path(), []), peers.Task())}
    assert used["n5000-auto-e4"]["lr"] == 0.05 and used["n5000-auto-e4"]["epochs"] == 4


def tried(label: str, accuracy: float) -> dict[str, Any]:
    lr = float(label.partition("-")[0].removeprefix("lr"))
    return {"label": label, "lr": lr, "test_accuracy": accuracy, "validation_fraction": 0.2}


def test_each_budget_has_the_learning_rate_that_was_best_for_it() -> None:
    accuracies = (("0.02", 2, 0.5), ("0.1", 2, 0.6), ("0.02", 4, 0.7), ("0.1", 4, 0.6))
    rows = [tried(f"lr{lr}-n1000-full-e{epochs}", accuracy) for lr, epochs, accuracy in accuracies]
    rows.append({**tried("lr9-n1000-full-e4", 1.0), "label": "n1000-full-e4", "validation_fraction": 0.0})
    rates = best_rates(rows)
    assert {cell.label: lr for cell, lr in rates.items()} == {"n1000-full-e2": 0.1, "n1000-full-e4": 0.02}
    used = {run.label: run.flags["lr"] for run in peers.then(REDUCED, Results(Path(), rows), peers.Task())}
    assert used["n1000-full-e4"] == used["n1000-ddp-e16"] == 0.02
    assert used["n1000-full-e2"] == 0.1
    assert used["n1000-voted-e8"] == peers.LEARNING_RATES[0]


def test_rates_are_taken_from_another_experiment_but_those_of_the_longest_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (
        "lr0.1-n5000-full-e1",
        "lr0.05-n5000-full-e4",
        "lr0.02-n5000-full-e16",
        "lr0.1-n1000-full-e4",
        "lr0.05-n5000-last-stage-e2",
    )
    read = {tmp_path / "peers": [tried(label, 0.9) for label in kept]}
    monkeypatch.setattr(peers, "KeptRuns", lambda path: SimpleNamespace(rows=lambda: read[path]))
    task = peers.Task(counts=(1_000, 20_000), peers=peers.STRONGEST, rates_of="peers", like={16: 4})
    tries = {run.label for run in peers.runs(REDUCED, task)}
    assert tries == {f"lr{lr:g}-n1000-full-e16" for lr in peers.LEARNING_RATES}
    own = [tried("lr0.02-n1000-full-e16", 0.9)]
    planned = peers.then(REDUCED, Results(tmp_path / "peers_more", own), task)
    used = {run.label: run.flags["lr"] for run in planned}
    assert used["n20000-full-e1"] == 0.1 and used["n20000-full-e4"] == used["n20000-full-e16"] == 0.05
    assert used["n1000-full-e4"] == 0.1 and used["n1000-full-e16"] == 0.02
    assert used["n20000-last-stage-cached-e2"] == 0.05
    assert {cell_of(label).peer for label in used} == set(peers.STRONGEST)
    near = [tried("lr0.05-n5000-full-e4", 0.895), tried("lr0.1-n5000-full-e4", 0.9)]
    cell = cell_of("n5000-full-e4")
    assert task.rates(Results(tmp_path / "peers_more", near))[cell] == 0.05
    assert best_rates(near, {cell: 0.05}) == {cell: 0.05}
    assert best_rates(near, {cell: 0.02}) == {cell: 0.1}


def test_labels_are_read_as_they_are_written() -> None:
    cell = Cell(samples=5000, peer="last-stage-cached", epochs=8)
    assert cell_of(cell.label) == cell_of(f"lr0.05-{cell.label}") == cell
    with pytest.raises(ValueError, match="must look like n5000-full-e4"):
        cell_of("full")


def row(label: str, seed: int, seconds: float, accuracy: float) -> dict[str, Any]:
    row = {**PLAIN, "ranks": 9, "validation_fraction": 0.0, "cache_bytes": 0, "lr": 0.1, "allreduce_bytes": 1e6}
    times = {"train_seconds": seconds + 0.001 * seed, "test_accuracy": accuracy + 0.001 * seed}
    return {**row, **times, "label": label, "seed": seed, "epochs": cell_of(label).epochs}


def test_the_answer_names_who_reaches_the_best_of_full_fine_tuning_first() -> None:
    made = (("full-e2", 10.0, 0.70), ("full-e4", 20.0, 0.80), ("exact-e1", 2.0, 0.797), ("voted-e4", 15.0, 0.72))
    rows = [row(f"n1000-{label}", seed, took, right) for seed in range(3) for label, took, right in made]
    ((_, own),) = by_samples(Results(Path(), rows))
    assert shortest(own, full=False) == "n1000-exact-e1"
    assert "linear head, fitted +9.7 points" in ahead(own)[0]
    ((_, without),) = by_samples(Results(Path(), [each for each in rows if "exact" not in each["label"]]))
    assert shortest(without, full=False) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 40 * 10.0),
        ({"program": "analysis.ddp"}, 40 * 7.0),
        ({"cut_history": "0@0 2@10 5@30"}, 10 * 10.0 + 20 * 8.0 + 10 * 5.0),
        ({"cut_history": "4@0", "final_cut": 4}, 40 * 6.0),
        ({"cut_history": "4@0", "final_cut": 4, "cache": "on", "augment": "views:2"}, 20 * 6.0 + 20 * 0.25),
        (
            # Each view comes again after two epochs: what was stored then is where its forward pass begins.
            {"cut_history": "0@0 2@10 4@30", "final_cut": 4, "cache": "on", "augment": "views:2"},
            10 * 10.0 + 20 * 8.0 + 10 * (6.0 - (8.0 - 0.5)),
        ),
        ({"program": "analysis.lp_ft", "steps": 140, "epochs": 4}, 20 * 5.0 + 80 * 0.2 + 40 * 10.0),
    ],
)
def test_a_run_takes_what_its_steps_cost(changes: dict[str, Any], expected: float) -> None:
    steps = steps_of({**PLAIN, **changes})
    assert steps is not None and summed(steps, KINDS) == pytest.approx(expected)


def test_what_is_solved_and_what_was_not_timed_keeps_its_clock(tmp_path: Path) -> None:
    path = tmp_path / "step_costs/32px.json"
    path.parent.mkdir()
    seconds = {"2 ranks, batches of 64": {kind: [0.0, value, 1e9] for kind, value in KINDS.items()}}
    path.write_text(json.dumps({"seconds": seconds}))
    others = ({}, {"label": "n5000-exact-e1"}, {"ranks": 3}, {"image_size": 64}, {"model": "mobilenet_v3_small"})
    found = timed(Results(tmp_path / "peers", [{**PLAIN, **changes} for changes in others]))
    assert [row["train_seconds"] for row in found.rows] == [400.0, 3.0, 3.0, 3.0, 3.0]


def test_intervals_have_the_error_of_what_a_step_costs_and_a_ratio_of_the_same_steps_has_none(tmp_path: Path) -> None:
    path = tmp_path / "step_costs/32px.json"
    path.parent.mkdir()
    rounds = [10.0, 12.0, 8.0, 13.0, 9.0]
    seconds = {kind: [mean * each / 10 for each in rounds] for kind, mean in KINDS.items()}
    path.write_text(json.dumps({"seconds": {"2 ranks, batches of 64": seconds}}))
    made = ({"label": "n5000-full-e4"}, {"label": "n5000-full-e2", "steps": 20, "epochs": 2})
    made += ({"label": "n5000-exact-e1"}, {"label": "n5000-ddp-e4", "program": "analysis.ddp", "seed": 0})
    rows = [{**PLAIN, "seed": seed, **changes} for changes in made for seed in range(3)]
    found = timed(Results(tmp_path / "peers", rows[:10]))
    once = found.mean("n5000-full-e4", "train_seconds")
    assert (once.mean, once.n) == (400.0, 3) and 300 < once.low < 380 < 420 < once.high < 530
    assert found.time("n5000-full-e4") == timed(Results(tmp_path / "peers", rows)).time("n5000-full-e4")
    same, other = (found.ratio(label, "n5000-full-e4") for label in ("n5000-full-e2", "n5000-exact-e1"))
    assert (same.low, same.mean, same.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (other.low / other.mean, other.high / other.mean) == pytest.approx((once.low / 400, once.high / 400))
    assert found.mean("n5000-ddp-e4", "train_seconds").n == 1 and "to" not in found.time("n5000-ddp-e4")
    assert found.time("n5000-exact-e1") == "3.00 s (3.00 to 3.00)"
