from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import lp_ft, peers, peers64, peers_mobilenet, peers_more
from analysis.parts.peers import answers
from analysis.parts.peers.labels import Cell, best_rates, cell_of
from analysis.sweeps import experiment as sweep
from analysis.sweeps import writeup
from analysis.sweeps.estimates import total_seconds
from analysis.sweeps.launching import Site, flags_of
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.results import Results
from hvfreeze.commands import parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import Config, from_dict
from hvfreeze.errors import RefusedError, UsageError
from tests.single.analysis.runs_material import made_up
from tests.single.report.run_directories import write_run

EVERYWHERE = peers.Ground(counts=list(peers.BUDGETS))
FEW = dataclasses.replace(REDUCED, data="digits", model="resnet18")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One number of samples, two budgets and two seeds; names of the runs that were started, none of which trains."""
    started: list[str] = []

    def launch(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        started.append(planned.name)
        if "broken" in started:
            raise RefusedError("made to fail")
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(writeup, "save_figure", lambda figure, path: None)
    monkeypatch.setattr(peers, "BUDGETS", {1_000: (2, 4)})
    monkeypatch.setattr(peers, "SEEDS", {1_000: 2})
    return started


def carried_out(folder: Path) -> Results:
    site = Site(work=folder / "work")
    assert sweep.carry_out(peers.EXPERIMENT, FEW, site, root=folder / "results") == 0
    return sweep.open_results(folder / "results", "peers")


def test_every_planned_run_is_a_configuration_that_the_program_accepts() -> None:
    for experiment, preset, samples in (
        (peers.EXPERIMENT, SMOKE, 64),
        (peers64.EXPERIMENT, REDUCED, 1_000),
        (peers_mobilenet.EXPERIMENT, REDUCED, 5_000),
    ):
        runs = [*experiment.runs(preset), *experiment.then(preset, Results(Path()))]
        for run in {run.label: run for run in runs if run.flags["train_samples"] == samples}.values():
            given = configuration(parse(flags_of(run, Site(work=Path("work")), Path("work") / run.name)))
            assert dataclasses.replace(given, run=run.config().run) == run.config()
            assert cell_of(run.label).samples == samples


def test_the_reduced_presets_take_at_most_eight_hours_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    every = (peers.EXPERIMENT, peers_more.EXPERIMENT, peers64.EXPERIMENT, peers_mobilenet.EXPERIMENT)
    planned = [run for each in every for run in sweep.plan(each, REDUCED, Results(Path()))]
    assert total_seconds(planned, REDUCED) < 8 * 3600


def test_accuracy_at_1_000_and_5_000_samples_has_five_seeds_and_at_20_000_three() -> None:
    every = [run for each in (peers, peers_more) for run in sweep.plan(each.EXPERIMENT, REDUCED, Results(Path()))]
    tested = [run for run in every if "validation_fraction" not in run.flags]
    for samples, seeds in ((1_000, 5), (5_000, 5), (20_000, 3)):
        for label in {run.label for run in tested if run.flags["train_samples"] == samples}:
            assert {run.seed for run in tested if run.label == label} == set(range(seeds))


def test_the_exact_head_waits_for_the_version_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: field for name, field in peers.leaves().items() if name != "head_fit"}
    monkeypatch.setattr(peers, "leaves", lambda: without)
    assert "exact" not in peers.known_peers()
    monkeypatch.setattr(peers, "leaves", lambda: {**without, "head_fit": None})
    assert peers.known_peers()["exact"].flags["head_fit"] == "exact"
    chosen = [cell for cell, _ in peers.cells(REDUCED, EVERYWHERE) if cell.peer == "exact"]
    assert {(cell.samples, cell.epochs) for cell in chosen} == {(samples, 1) for samples in peers.BUDGETS}


def test_auto_has_budgets_of_its_own_and_no_learning_rate_to_choose() -> None:
    budgets = {samples: [] for samples in peers.BUDGETS}  # type: dict[int, list[int]]
    for cell, _ in peers.cells(REDUCED, EVERYWHERE):
        if cell.peer == "auto":
            budgets[cell.samples].append(cell.epochs)
    assert budgets == {1_000: [1], 5_000: [1, 4], 20_000: [1, 4]}
    assert not [run for run in peers.runs(REDUCED, peers.Ground()) if "auto" in run.label]
    used = {run.label: run.flags for run in peers.then(REDUCED, Results(Path(), []), peers.Ground())}
    assert used["n5000-auto-e4"]["lr"] == 0.05 and used["n5000-auto-e4"]["epochs"] == 4


def tried(label: str, accuracy: float) -> dict[str, Any]:
    lr = float(label.partition("-")[0].removeprefix("lr"))
    return {"label": label, "lr": lr, "test_accuracy": accuracy, "validation_fraction": 0.2}


def test_each_budget_has_the_learning_rate_that_was_best_for_it() -> None:
    rows = [
        tried("lr0.02-n1000-full-e2", 0.5),
        tried("lr0.1-n1000-full-e2", 0.6),
        tried("lr0.02-n1000-full-e4", 0.7),
        tried("lr0.1-n1000-full-e4", 0.6),
        {**tried("lr9-n1000-full-e4", 1.0), "label": "n1000-full-e4", "validation_fraction": 0.0},
    ]
    rates = best_rates(rows)
    assert {cell.label: lr for cell, lr in rates.items()} == {"n1000-full-e2": 0.1, "n1000-full-e4": 0.02}
    planned = peers.then(REDUCED, Results(Path(), rows), peers.Ground())
    used = {run.label: run.flags["lr"] for run in planned}
    assert used["n1000-full-e4"] == used["n1000-ddp-e16"] == 0.02
    assert used["n1000-full-e2"] == 0.1
    assert used["n1000-voted-e8"] == peers.LEARNING_RATES[0]


def test_rates_are_taken_from_another_experiment_but_those_of_the_longest_budget(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    kept = [
        tried("lr0.1-n5000-full-e1", 0.9),
        tried("lr0.05-n5000-full-e4", 0.9),
        tried("lr0.1-n1000-full-e4", 0.9),
        tried("lr0.05-n5000-last-stage-e2", 0.9),
    ]
    read = {tmp_path / "peers": kept}
    monkeypatch.setattr(peers, "read_rows", read.__getitem__)
    ground = peers.Ground(counts=(1_000, 20_000), peers=peers64.PEERS, rates_of="peers")
    tries = {run.label for run in peers.runs(REDUCED, ground)}
    assert tries == {f"lr{lr:g}-n1000-full-e16" for lr in peers.LEARNING_RATES}
    own = [tried("lr0.02-n1000-full-e16", 0.9)]
    planned = peers.then(REDUCED, Results(tmp_path / "peers_more", own), ground)
    used = {run.label: run.flags["lr"] for run in planned}
    assert used["n20000-full-e1"] == 0.1 and used["n20000-full-e4"] == 0.05
    assert used["n1000-full-e4"] == 0.1 and used["n1000-full-e16"] == 0.02
    assert used["n20000-last-stage-cached-e2"] == 0.05
    near = [tried("lr0.05-n5000-full-e4", 0.895), tried("lr0.1-n5000-full-e4", 0.9)]
    rates = ground.rates(Results(tmp_path / "peers_more", near))
    assert rates[cell_of("n5000-full-e4")] == 0.05
    assert peers.best_rates(near, {cell_of("n5000-full-e4"): 0.05}) == {cell_of("n5000-full-e4"): 0.05}
    assert peers.best_rates(near, {cell_of("n5000-full-e4"): 0.02}) == {cell_of("n5000-full-e4"): 0.1}
    assert {cell_of(label).peer for label in used} == set(peers64.PEERS)


def test_labels_are_read_as_they_are_written() -> None:
    cell = Cell(samples=5000, peer="last-stage-cached", epochs=8)
    assert cell_of(cell.label) == cell_of(cell.tried(0.05)) == cell
    with pytest.raises(ValueError, match="must look like n5000-full-e4"):
        cell_of("full")


def test_the_runs_are_resumable_and_their_results_written_up(few: list[str], tmp_path: Path) -> None:
    results = carried_out(tmp_path)
    made = len(few)
    assert made == len(set(few)) == len(results.rows)
    text = (results.directory / "README.md").read_text()
    assert "Which way is the soonest as good as full fine-tuning, with 1000 samples?" in text
    assert "n1000-lp-ft-e4" in text
    (results.directory / "runs/n1000-lp-ft-e4-s1/summary.json").unlink()
    carried_out(tmp_path)
    assert few[made:] == ["n1000-lp-ft-e4-s1"]


def row(label: str, seed: int, seconds: float, accuracy: float) -> dict[str, Any]:
    common = {"validation_fraction": 0.0, "cache": "off", "cache_bytes": 0, "augment": "fresh", "lr": 0.1}
    times = {"train_seconds": seconds, "test_accuracy": accuracy, "epochs": cell_of(label).epochs}
    return {**common, "label": label, "seed": seed, "allreduce_bytes": 1e6, **times}


def test_the_answer_names_who_reaches_the_best_of_full_fine_tuning_first() -> None:
    rows = []
    for seed in range(3):
        noise = 0.001 * seed
        rows += [
            row("n1000-full-e2", seed, 10.0 + noise, 0.70 + noise),
            row("n1000-full-e4", seed, 20.0 + noise, 0.80 + noise),
            row("n1000-exact-e1", seed, 2.0 + noise, 0.797 + noise),
            row("n1000-voted-e4", seed, 15.0 + noise, 0.72 + noise),
        ]
    answer = answers.answers_of(Results(Path(), rows))[0]
    assert "linear head, solved, 10.00x" in answer.text
    assert "Ahead of full fine-tuning trained for as many seconds: linear head, solved +9.7 points" in answer.text
    assert not answer.negative
    without = [each for each in rows if "exact" not in each["label"]]
    assert answers.answers_of(Results(Path(), without))[0].negative
    assert "nothing else gets there" in answers.answers_of(Results(Path(), without))[0].text


def test_probing_and_tuning_are_told_as_one_run(tmp_path: Path) -> None:
    config = from_dict({"freeze": "static", "cut": 5, "lr": 0.01, "epochs": 2, "run_dir": str(tmp_path)})
    probing, tuning = lp_ft.parts(config)
    assert (probing.freeze.cut, probing.cache.cache, probing.optimizer.epochs) == (5, "on", lp_ft.PROBE_EPOCHS)
    assert (tuning.freeze.freeze, tuning.cache.cache, tuning.optimizer.lr) == ("none", "off", 0.01)
    assert tuning.model.weights == str(tmp_path / "probe/model.pt")
    for name, accuracies in (("probe", [None, 0.5]), ("tune", [0.6, 0.7])):
        write_run(tmp_path / name, accuracies=accuracies)
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("probe", "tune"))
    for part in (first, second):
        part.setdefault("epochs", 2)
        part.setdefault("steps", 20)
        part.setdefault("other_collective_bytes", 1)
        part.setdefault("final_cut", 0)
        part.setdefault("cut_history", [[0, 0, 0]])
        part.setdefault("cache", {})
    lp_ft.tell_both(config, first, second)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    whole = json.loads((tmp_path / "summary.json").read_text())
    assert whole["train_seconds"] == pytest.approx(first["train_seconds"] + second["train_seconds"])
    phases = [sum(part["seconds"].values()) for part in (first, second, whole)]
    assert phases[0] + phases[1] == pytest.approx(phases[2])
    assert whole["test_accuracy"] == second["test_accuracy"]
    assert whole["cut_history"][-1] == [2, 20, 0]


def test_probing_without_a_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match="needs --freeze static"):
        lp_ft.parts(Config())
