"""Kept runs and the rows that are made of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis.experiments import EVERY
from analysis.sweeps.kept import (
    COUNTED,
    RESULTS,
    RUNS,
    VERSIONS,
    KeptRuns,
    steady_columns,
    unlike,
    wire_bytes_per_step,
)
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import SMOKE
from hvfreeze.errors import RefusedError
from hvfreeze.runs.reading import Run
from tests.single.analysis.runs_material import made_up


def kept(folder: Path, *labels: str) -> KeptRuns:
    """Returns runs of some labels, made up and kept in `folder`/results/few."""
    runs = KeptRuns(folder / "results" / "few")
    for planned in (SMOKE.run(label, 0) for label in labels):
        runs.keep(made_up(planned, Site(work=folder / "work")), planned, source="abc")
    return runs


def test_kept_runs_hold_no_path_and_no_host_of_the_machine(tmp_path: Path) -> None:
    line = kept(tmp_path, "a").lines["a-s0"]
    assert (line["config"]["data"]["data_dir"], line["config"]["run"]["run_dir"]) == (None, None)
    (environment,) = json.loads((tmp_path / "results/environments.json").read_text()).values()
    assert environment["hosts"] == ["host0", "host0"]
    assert str(tmp_path) not in (tmp_path / "results/few/runs.jsonl").read_text()


def test_every_kept_experiment_can_be_borrowed_from() -> None:
    assert not KeptRuns(RESULTS / "strategies").borrow(SMOKE.run("no experiment's", 0))


def test_a_line_that_was_cut_short_is_not_there_and_a_damaged_one_refused(tmp_path: Path) -> None:
    runs = kept(tmp_path, "a", "b")
    whole = runs.path.read_text()
    runs.path.write_text(whole[:-40])
    assert list(KeptRuns(runs.directory).lines) == ["a-s0"]
    KeptRuns(runs.directory).append(runs.lines["b-s0"])
    assert runs.path.read_text() == whole
    runs.path.write_text(whole[40:])
    with pytest.raises(RefusedError, match=r"runs.jsonl line 1 is damaged: .*; remove it"):
        KeptRuns(runs.directory)
    runs.path.write_text(whole)
    (tmp_path / "results/environments.json").write_text("{}")
    with pytest.raises(RefusedError, match=r"environments.json lacks [0-9a-f]{8}, of run a-s0"):
        KeptRuns(runs.directory).rows()


def test_sweeps_side_by_side_keep_every_run(tmp_path: Path) -> None:
    def sweep(number: int) -> None:
        runs = KeptRuns(tmp_path / f"results/{number % 2}")
        for planned in (SMOKE.run(f"label{number}", seed) for seed in range(3)):
            runs.keep(made_up(planned, Site(work=tmp_path / "work")), planned, source="a")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sweep, range(4)))
    found = [KeptRuns(tmp_path / f"results/{place}") for place in (0, 1)]
    assert [len(each.rows()) for each in found] == [6, 6]


def test_checkpoints_do_not_make_equal_work_look_unequal(tmp_path: Path) -> None:
    runs = kept(tmp_path, "a")
    (before,) = runs.rows()
    told = runs.lines["a-s0"]["summary"]
    told["seconds"]["checkpoint"] = told["seconds"].get("checkpoint", 0.0) + 30.0
    told["train_seconds"] += 30.0
    (after,) = runs.rows()
    assert after["train_seconds"] == pytest.approx(before["train_seconds"])
    assert runs.run("a-s0").seconds["checkpoint"] == 0.0
    assert after["seconds_checkpoint"] >= 30.0


@pytest.mark.parametrize("name", [each.name for each in EVERY if (RESULTS / each.name / RUNS).exists()])
def test_recorded_runs_have_one_training_time_a_source_and_a_machine(name: str) -> None:
    runs = KeptRuns(RESULTS / name)
    rows = runs.rows()
    assert rows
    for row in rows[::7]:
        run, raw = runs.run(row["run"]), runs.lines[row["run"]]["summary"]
        assert row["train_seconds"] == pytest.approx(sum(row[f"seconds_{phase}"] for phase in COUNTED))
        assert row["train_seconds"] == pytest.approx(raw["train_seconds"] - row["seconds_checkpoint"], rel=1e-3)
        assert run.train_seconds == pytest.approx(row["train_seconds"])
        epochs = sum(line["train_seconds"] for line in run.metrics)
        # Readers of images begin before an epoch, and a last trial is judged after its epoch's line.
        for phase in ("data", *(["optimizer"] if "trial" in raw else [])):
            epochs += run.seconds[phase] - sum(line["seconds"].get(phase, 0.0) for line in run.metrics)
        assert epochs == pytest.approx(run.train_seconds, rel=0.01, abs=0.5)
    for row in rows:
        told = [row[key] for key in ("commit", "finished", "stamped", "processor", "cores", *VERSIONS)]
        assert None not in told, row["run"]


@pytest.mark.parametrize(
    ("compression", "epochs", "left_out"), [("none", 6, 1), ("fp16", 1, 0), ("powersgd:4", 6, 3), ("powersgd:4", 2, 1)]
)
def test_epochs_before_low_rank_sets_in_are_not_timed(compression: str, epochs: int, left_out: int) -> None:
    metrics = [
        {"step": 4 * (epoch + 1), "seconds": {"forward": 9.0 if epoch < left_out else 1.0}} for epoch in range(epochs)
    ]
    run = Run(
        name="low-rank",
        directory=Path(),
        config={"exchange": {"compression": compression}},
        environment={},
        metrics=tuple(metrics),
        decisions=(),
        summary=None,
    )
    assert unlike(run) == left_out
    assert steady_columns(run)["step_seconds"] == pytest.approx(0.25)
    wire = {str(epoch + 1): {"node0": 8 * epoch} for epoch in range(epochs)}
    assert wire_bytes_per_step(wire, run) == (2.0 if epochs > 1 else None)
    assert wire_bytes_per_step({}, run) is None
