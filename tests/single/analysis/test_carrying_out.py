"""What an experiment's command does to results that are there, and what it waits for or refuses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from analysis import adaptive, figures, pixels64
from analysis.sweeps import experiment as sweep
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.results import open_results
from analysis.sweeps.rows import read_rows
from hvfreeze.errors import RefusedError
from tests.single.analysis.runs_material import carried_out, made_up

pytestmark = pytest.mark.usefixtures("no_training", "no_files")


def test_a_command_that_makes_no_run_rewrites_no_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "commit", lambda: "aaa")
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    assert {row["commit"] for row in results.rows} == {"aaa"}
    files = {path: path.read_bytes() for path in sorted(results.directory.rglob("*")) if path.is_file()}
    monkeypatch.setattr(sweep, "commit", lambda: "bbb")
    other = dataclasses.replace(SMOKE, weights_digest="another")
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(adaptive.EXPERIMENT, other, site, root=tmp_path / "results") == 0
    assert {path: path.read_bytes() for path in sorted(results.directory.rglob("*")) if path.is_file()} == files
    assert "source (runs): aaa (2)" in (results.directory / "README.md").read_text()


def test_a_page_drawn_elsewhere_leaves_the_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sweep, "launch", made_up)
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    (results.directory / "README.md").write_text("by hand")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")}
    assert figures.main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / "page")]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")} == files
    assert (tmp_path / "page/adaptive/figures/cuts.svg").exists()


def test_without_a_baseline_no_learning_rate_is_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    assert sweep.main(adaptive.EXPERIMENT, where) == 2
    assert "holds no baseline, which chooses the learning rate" in capsys.readouterr().err
    assert not (tmp_path / "adaptive").exists()
    options = sweep.parse(adaptive.EXPERIMENT, [*where, "--lr", "0.03"])
    sweep.require_lr(options, adaptive.EXPERIMENT, root=tmp_path)
    assert sweep.preset_of(options, root=tmp_path).lr == 0.03
    assert pixels64.EXPERIMENT.chooses_lr


def test_runs_at_a_chosen_learning_rate_wait_for_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(pixels64.EXPERIMENT, REDUCED, site, root=tmp_path, only=["lr0.01", "full"]) == 0
    assert "depend on these, which are not all there yet" in capsys.readouterr().err
    assert {row["label"] for row in read_rows(tmp_path / "pixels64")} == {"lr0.01"}
    one = dataclasses.replace(REDUCED, seeds=(0,))
    assert sweep.carry_out(pixels64.EXPERIMENT, one, site, root=tmp_path) == 0
    chosen = max(pixels64.LEARNING_RATES)
    assert {row["lr"] for row in read_rows(tmp_path / "pixels64") if row["label"] == "full"} <= {0.01, chosen}


def test_more_seeds_stand_beside_those_that_are_there(tmp_path: Path) -> None:
    site, root = Site(work=tmp_path / "work"), tmp_path / "results"
    for seeds in ("0", "3,4", "3,4"):
        options = sweep.parse(adaptive.EXPERIMENT, ["--preset", "smoke", "--seeds", seeds])
        preset = sweep.preset_of(options, root=root)
        assert sweep.carry_out(adaptive.EXPERIMENT, preset, site, root=root) == 0
    found = [(row["label"], row["seed"]) for row in read_rows(root / "adaptive")]
    assert sorted(found) == [(label, seed) for label in ("full", "linear") for seed in (0, 3, 4)]
    assert not math.isnan(open_results(root, "adaptive").mean("full", "test_accuracy").low)


def test_seeds_of_another_configuration_are_refused(tmp_path: Path) -> None:
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(adaptive.EXPERIMENT, SMOKE, site, root=tmp_path) == 0
    other = dataclasses.replace(SMOKE, lr=0.5, seeds=(1,))
    with pytest.raises(RefusedError, match=r"full-s0 holds another run \(lr: 0.02 there, 0.5 here\)"):
        sweep.carry_out(adaptive.EXPERIMENT, other, site, root=tmp_path)
    with pytest.raises(SystemExit):
        sweep.parse(adaptive.EXPERIMENT, ["--seeds", "one"])
