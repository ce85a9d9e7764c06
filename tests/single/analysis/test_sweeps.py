from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from analysis import caching, communication, experiments, scaling, static_sweep
from analysis.sweeps import experiment as sweep
from analysis.sweeps import launching, writeup
from analysis.sweeps.estimates import total_seconds
from analysis.sweeps.kept import is_kept
from analysis.sweeps.launching import Site, command_of, flags_of
from analysis.sweeps.presets import FULL, PRESETS, REDUCED, SMOKE, Preset
from analysis.sweeps.questions import Experiment
from analysis.sweeps.results import Results
from analysis.sweeps.rows import read_rows
from hvfreeze.commands import parse
from hvfreeze.config.flags import configuration
from hvfreeze.errors import RefusedError, UsageError
from tests.single.analysis.runs_material import carried_out, made_up

EACH = pytest.mark.parametrize("experiment", experiments.EXPERIMENTS, ids=lambda experiment: experiment.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; none of them trains."""
    started: list[str] = []

    def launch(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        started.append(planned.name)
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(sweep, "require_cluster", lambda: None)
    return started


@EACH
@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_run_is_a_configuration_that_the_program_accepts(experiment: Experiment, preset: Preset) -> None:
    planned = sweep.plan(experiment, preset, Results(Path()))
    assert planned
    for run in planned:
        options = parse(flags_of(run, Site(work=Path("work")), Path("work") / run.name))
        given = configuration(options)
        assert dataclasses.replace(given, run=run.config().run) == run.config()


def test_all_reduced_presets_together_take_at_most_six_hours_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    planned = [run for each in experiments.EXPERIMENTS for run in sweep.plan(each, REDUCED, Results(Path()))]
    assert total_seconds(planned, REDUCED) < 6 * 3600


@EACH
def test_where_accuracy_is_claimed_there_are_three_seeds(experiment: Experiment) -> None:
    planned = sweep.plan(experiment, REDUCED, Results(Path()))
    reported = [run for run in planned if not run.flags.get("validation_fraction")]
    for label in {run.label for run in reported}:
        assert {run.seed for run in reported if run.label == label} >= {0, 1, 2}


@EACH
def test_results_have_a_claim_with_its_limits_and_every_figure_twice(
    experiment: Experiment, launches: list[str], tmp_path: Path
) -> None:
    results = carried_out(experiment, REDUCED, tmp_path)
    text = (results.directory / "README.md").read_text()
    assert len(results.rows) == len(set(launches))
    for wanted in ("## Limits", f"python -m analysis.{experiment.name} --preset reduced", "Some CPU, 2 cores", "n = "):
        assert wanted in text
    assert text.count("**") >= 2, "no claim is made"
    figures = {path.name for path in (results.directory / "figures").iterdir()}
    assert figures
    assert {Path(name).with_suffix(".svg").name for name in figures} <= figures
    assert {Path(name).with_suffix(".png").name for name in figures} <= figures
    assert str(tmp_path) not in text


@EACH
def test_half_of_the_results_are_written_up_too(
    experiment: Experiment, launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        launches.append(planned.name)
        if len(launches) % 2:
            raise RefusedError("made to fail")
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(writeup, "save_figure", lambda figure, path: None)
    one = dataclasses.replace(REDUCED, seeds=(0,))
    assert sweep.carry_out(experiment, one, Site(work=tmp_path / "work"), root=tmp_path) == 1


def test_what_is_done_is_not_done_again(launches: list[str], tmp_path: Path) -> None:
    carried_out(static_sweep.EXPERIMENT, SMOKE, tmp_path)
    assert launches == ["groups5-s0", "residual8-s0"]
    before = (tmp_path / "results/static_sweep/rows.csv").read_bytes()
    carried_out(static_sweep.EXPERIMENT, SMOKE, tmp_path)
    assert launches == ["groups5-s0", "residual8-s0"]
    assert (tmp_path / "results/static_sweep/rows.csv").read_bytes() == before


def test_a_run_that_another_experiment_has_made_is_copied(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeup, "save_figure", lambda figure, path: None)
    preset = dataclasses.replace(REDUCED, seeds=(0,))
    carried_out(communication.EXPERIMENT, preset, tmp_path)
    made = set(launches)
    launches.clear()
    results = carried_out(scaling.EXPERIMENT, preset, tmp_path)
    assert {row["nodes"] for row in results.rows} == {1, 2, 3, 4}
    assert launches and all("-3x-" in name for name in launches)
    copied = [row["run"] for row in results.rows if row["run"] in made]
    assert len(copied) == len(results.rows) - len(launches)
    for name in copied:
        here, there = (tmp_path / f"results/{experiment}/runs/{name}" for experiment in ("scaling", "communication"))
        assert {path.name: path.read_bytes() for path in here.iterdir()} == {
            path.name: path.read_bytes() for path in there.iterdir()
        }


def test_without_a_local_cluster_nothing_is_begun_and_no_row_is_lost(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out(communication.EXPERIMENT, SMOKE, tmp_path)
    directory, before = tmp_path / "results/communication", len(launches)
    rows = (directory / "rows.csv").read_bytes()
    shutil.rmtree(directory / "runs")
    monkeypatch.setattr(sweep, "require_cluster", launching.require_cluster)
    program = tmp_path / "cluster"
    program.write_text("#!/bin/sh\necho 'cluster: sshd is missing' >&2\nexit 2\n")
    program.chmod(0o700)
    monkeypatch.setattr(launching, "CLUSTER", program)
    with pytest.raises(UsageError, match=r"need the local cluster.*sshd is missing"):
        sweep.carry_out(communication.EXPERIMENT, SMOKE, Site(work=tmp_path / "work"), root=tmp_path / "results")
    assert len(launches) == before
    assert (directory / "rows.csv").read_bytes() == rows


def test_a_failed_run_does_not_stop_the_others_and_is_made_up_for(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    working = sweep.launch

    def failing(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        if planned.label == "groups5":
            raise RefusedError("run groups5-s0 ended with exit code 5")
        return working(planned, site, timeout=timeout)

    monkeypatch.setattr(sweep, "launch", failing)
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path) == 1
    assert "ended with exit code 5" in capsys.readouterr().err
    assert [row["run"] for row in read_rows(tmp_path / "static_sweep")] == ["residual8-s0"]
    monkeypatch.setattr(sweep, "launch", working)
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path) == 0
    assert [row["run"] for row in read_rows(tmp_path / "static_sweep")] == ["groups5-s0", "residual8-s0"]


def test_some_runs_can_be_made_first_and_the_rest_another_time(launches: list[str], tmp_path: Path) -> None:
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path, only=["residual8"]) == 0
    assert launches == ["residual8-s0"]
    with pytest.raises(UsageError, match=r"--only \(residual9\) must name labels: groups5, residual8"):
        sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path, only=["residual9"])
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path) == 0
    assert launches == ["residual8-s0", "groups5-s0"]
    assert [row["run"] for row in read_rows(tmp_path / "static_sweep")] == ["groups5-s0", "residual8-s0"]


def test_results_of_another_configuration_are_refused_by_name(launches: list[str], tmp_path: Path) -> None:
    carried_out(static_sweep.EXPERIMENT, SMOKE, tmp_path)
    other = dataclasses.replace(SMOKE, lr=0.5)
    with pytest.raises(RefusedError, match=r"groups5-s0 holds another run \(lr: 0.02 there, 0.5 here\)"):
        sweep.carry_out(static_sweep.EXPERIMENT, other, Site(work=tmp_path / "work"), root=tmp_path / "results")


def test_kept_logs_hold_no_path_and_no_host_of_the_machine_and_no_weights(launches: list[str], tmp_path: Path) -> None:
    carried_out(static_sweep.EXPERIMENT, SMOKE, tmp_path)
    kept = tmp_path / "results/static_sweep/runs/groups5-s0"
    assert sorted(path.name for path in kept.iterdir()) == [
        "config.yaml",
        "decisions.jsonl",
        "environment.json",
        "made.json",
        "metrics.jsonl",
        "plan.json",
        "summary.json",
    ]
    tree = yaml.safe_load((kept / "config.yaml").read_text())
    assert (tree["data"]["data_dir"], tree["run"]["run_dir"]) == (None, None)
    assert json.loads((kept / "environment.json").read_text())["hosts"] == ["host0", "host0"]
    assert not (tmp_path / "work" / "groups5-s0").exists()


def test_a_run_without_summary_is_not_kept(tmp_path: Path) -> None:
    run = sweep.plan(static_sweep.EXPERIMENT, SMOKE, Results(Path()))[0]
    assert not is_kept(run, tmp_path / "nothing")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/plan.json").write_text(json.dumps(run.identity()))
    assert not is_kept(run, tmp_path / "half")


def test_two_different_runs_of_one_name_are_refused() -> None:
    twice = dataclasses.replace(
        caching.EXPERIMENT, runs=lambda preset: [preset.run("a", 0), preset.run("a", 0, {"lr": 0.5})]
    )
    with pytest.raises(UsageError, match="two different runs of the name a-s0"):
        sweep.plan(twice, SMOKE, Results(Path()))


def test_the_time_left_follows_what_finished_runs_took() -> None:
    progress = sweep.Progress({"a": 10.0, "b": 10.0, "c": 20.0, "d": 10.0})
    assert progress.left() == 50.0
    progress.done["a"] = 0.0
    assert progress.left() == 40.0
    progress.done["b"] = 30.0
    assert progress.left() == 90.0


def test_commands_start_one_rank_alone_several_under_mpirun_and_nodes_on_the_cluster() -> None:
    site, run_dir = Site(work=Path("work"), data_dir=Path("data"), weights=Path("w.pt")), Path("work/a")
    preset = dataclasses.replace(REDUCED, weights="w.pt")
    alone = command_of(preset.run("a", 0, ranks=1), site, run_dir)
    assert alone[1:4] == ["-m", "hvfreeze", "train"]
    assert alone[-1] == "--resume"
    assert alone[alone.index("--weights") + 1] == str(Path("w.pt").resolve())
    assert command_of(preset.run("a", 0), site, run_dir)[:3] == ["mpirun", "-n", "2"]
    nodes = command_of(preset.run("a", 0, ranks=4, nodes=4), site, run_dir, cluster="c7")
    assert nodes[1:5] == ["run", "--name", "c7", "--"]
    hosts = command_of(FULL.run("a", 0), Site(work=Path("work"), hosts="n0:2,n1:2"), run_dir)
    assert hosts[1:5] == ["-np", "4", "-H", "n0:2,n1:2"]
