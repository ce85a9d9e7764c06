"""Experiments with synthetic runs: planned, made once, resumed, waited for and refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from pathlib import Path

import pytest

from analysis import (
    adaptive,
    baseline,
    caching,
    communication,
    experiments,
    peers,
    pixels64,
    static_sweep,
)
from analysis.experiments import EVERY, EXPERIMENTS
from analysis.sweeps import experiment as experiment_pages
from analysis.sweeps import launching, repeat, sweep
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import RESULTS, KeptRuns, by_name
from analysis.sweeps.launching import Site, command_of, flags_of
from analysis.sweeps.presets import FULL, REDUCED, SMOKE, PlannedRun, Preset
from analysis.sweeps.results import Results, open_results
from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.errors import RefusedError, UsageError
from tests.single.analysis.runs_material import carried_out, made_up

pytestmark = pytest.mark.usefixtures("no_files")
SMALL = dataclasses.replace(REDUCED, seeds=(0, 1))
ONE = dataclasses.replace(REDUCED, seeds=(0,))
STUDY = (*EXPERIMENTS, pixels64.EXPERIMENT)
"""The study's questions."""


@functools.cache
def listed(experiment: Experiment, preset: Preset) -> dict[str, list[PlannedRun]]:
    """Return an experiment's runs by label, unchecked: those of a label differ in the seed."""
    found: dict[str, list[PlannedRun]] = {}
    for run in [*experiment.runs(preset), *experiment.then(preset, Results(Path()))]:
        found.setdefault(run.label, []).append(run)
    return found


@pytest.mark.parametrize("experiment", EVERY, ids=lambda experiment: experiment.name)
def test_every_run_is_a_configuration_that_the_program_accepts(experiment: Experiment) -> None:
    planned = sweep.plan(experiment, SMOKE, Results(Path()))
    for preset in (REDUCED, FULL) if experiment in STUDY else (REDUCED,):
        planned += [runs[0] for runs in listed(experiment, preset).values()]
    # Values are checked of each label, the words of a command line of each set of flags.
    commands = {frozenset(run.flags): run for run in planned if run.config()}
    assert commands
    for run in commands.values():
        given = configuration(parse(flags_of(run, Site(work=Path("work")), Path("work") / run.name)))
        placed = dataclasses.replace(given.cache, cache_dir=run.config().cache.cache_dir)
        assert dataclasses.replace(given, run=run.config().run, cache=placed) == run.config()
    if experiment in STUDY:
        for runs in listed(experiment, REDUCED).values():
            assert runs[0].flags.get("validation_fraction") or {run.seed for run in runs} >= {0, 1, 2}


def test_the_reduced_presets_take_a_day_at_most_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def hours(chosen: list[Experiment]) -> float:
        labels = [runs for each in chosen for runs in listed(each, REDUCED).values()]
        return sum(len({run.name for run in runs}) * sweep.seconds_of(runs[0], REDUCED) for runs in labels) / 3600

    assert hours(list(STUDY)) < 6
    assert hours([each for each in EVERY if each.name.startswith("peers")]) < 8
    assert [sweep.duration(seconds) for seconds in (30, 600, 7200)] == ["30 s", "10 min", "2.0 h"]


def test_what_failed_is_made_up_for_and_others_take_the_baselines_learning_rate_and_front(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, experiment = sweep.launch, adaptive.EXPERIMENT

    def failing(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        if len(launches) % 2:
            launches.append(planned.name)
            raise RefusedError("made to fail")
        return working(planned, site, timeout=timeout)

    monkeypatch.setattr(sweep, "launch", failing)
    site, root = Site(work=tmp_path / "work"), tmp_path / "results"
    assert sweep.carry_out(experiment, SMALL, site, root=root) == 1
    half = set(KeptRuns(root / experiment.name).lines)
    assert not (root / experiment.name / "README.md").exists()
    monkeypatch.setattr(sweep, "launch", working)
    base = carried_out(baseline.EXPERIMENT, SMALL, tmp_path).rows
    assert {row["lr"] for row in base if row["label"].startswith("lr")} == set(baseline.LEARNING_RATES)
    assert {row["lr"] for row in base if row["label"].startswith("epochs")} == {0.005}
    assert all(not row["validation_fraction"] for row in base if not row["label"].startswith("lr"))
    options = sweep.parse(experiment, ["--results", str(root)])
    assert sweep.preset_of(options, root=options.results).lr == 0.005
    launches.clear()
    results = carried_out(experiment, SMALL, tmp_path)
    assert half and not half & set(launches)
    assert len(results.rows) == len(half) + len(set(launches))
    assert len(results.front.budgets) == len(baseline.BUDGETS) and results.over_front("linear").n == 2
    text = (results.directory / "README.md").read_text()
    for wanted in ("## Limits", "python -m analysis.adaptive --preset reduced", "Some CPU, 2 cores", "n = 2"):
        assert wanted in text
    assert str(tmp_path) not in text


def test_a_command_that_makes_no_run_changes_no_file(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "commit", lambda: "aaa")
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    assert launches == ["full-s0", "linear-s0"]
    assert {row["commit"] for row in results.rows} == {"aaa"}
    files = {path: path.read_bytes() for path in sorted(results.directory.rglob("*")) if path.is_file()}
    monkeypatch.setattr(sweep, "commit", lambda: "bbb")
    carried_out(adaptive.EXPERIMENT, dataclasses.replace(SMOKE, weights_digest="another"), tmp_path)
    assert launches == ["full-s0", "linear-s0"]
    assert {path: path.read_bytes() for path in sorted(results.directory.rglob("*")) if path.is_file()} == files
    assert experiment_pages.sources(results.rows).startswith("source (runs): aaa (2)")
    assert not list((tmp_path / "work").iterdir())


def test_a_run_that_another_experiment_has_made_is_copied(launches: list[str], tmp_path: Path) -> None:
    carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    launches.clear()
    more = [*adaptive.runs(SMOKE), SMOKE.run("more", 0)]
    carried_out(dataclasses.replace(adaptive.EXPERIMENT, name="another", runs=lambda preset: more), SMOKE, tmp_path)
    assert launches == ["more-s0"]
    here, there = (KeptRuns(tmp_path / "results" / name).lines for name in ("another", "adaptive"))
    assert {name: here[name] for name in there} == there


def test_without_a_local_cluster_nothing_is_begun_and_no_row_is_lost(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out(communication.EXPERIMENT, SMOKE, tmp_path)
    directory, before = tmp_path / "results/communication", len(launches)
    kept = (directory / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "runs.jsonl").write_bytes(kept[0])
    monkeypatch.setattr(sweep, "require_cluster", launching.require_cluster)
    program = tmp_path / "cluster"
    program.write_text("#!/bin/sh\necho 'cluster: sshd is missing' >&2\nexit 2\n")
    program.chmod(0o700)
    monkeypatch.setattr(launching, "CLUSTER", program)
    with pytest.raises(UsageError, match=r"need the local cluster.*sshd is missing"):
        sweep.carry_out(communication.EXPERIMENT, SMOKE, Site(work=tmp_path / "work"), root=tmp_path / "results")
    assert len(launches) == before
    assert (directory / "runs.jsonl").read_bytes() == kept[0]


def test_some_runs_can_be_made_first_and_the_rest_another_time(launches: list[str], tmp_path: Path) -> None:
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path, only=["residual8"]) == 0
    assert launches == ["residual8-s0"]
    with pytest.raises(UsageError, match=r"--only \(residual9\) must name labels: groups5, residual8"):
        sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path, only=["residual9"])
    assert sweep.carry_out(static_sweep.EXPERIMENT, SMOKE, site, root=tmp_path) == 0
    assert launches == ["residual8-s0", "groups5-s0"]
    assert list(KeptRuns(tmp_path / "static_sweep").lines) == ["residual8-s0", "groups5-s0"]


def test_runs_of_another_configuration_are_refused_by_name(launches: list[str], tmp_path: Path) -> None:
    carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    for seeds in ((0,), (1,)):
        other = dataclasses.replace(SMOKE, lr=0.5, seeds=seeds)
        with pytest.raises(RefusedError, match=r"runs.jsonl holds another run full-s0 \(lr: 0.02 before, 0.5 now\)"):
            sweep.carry_out(adaptive.EXPERIMENT, other, Site(work=tmp_path / "work"), root=tmp_path / "results")


def test_two_different_runs_of_one_name_are_refused() -> None:
    twice = dataclasses.replace(
        caching.EXPERIMENT, runs=lambda preset: [preset.run("a", 0), preset.run("a", 0, {"lr": 0.5})]
    )
    with pytest.raises(UsageError, match="two different runs of the name a-s0"):
        sweep.plan(twice, SMOKE, Results(Path()))


def test_more_seeds_stand_beside_those_that_are_there(launches: list[str], tmp_path: Path) -> None:
    site, root = Site(work=tmp_path / "work"), tmp_path / "results"
    for seeds in ("0", "3,4", "3,4"):
        options = sweep.parse(adaptive.EXPERIMENT, ["--preset", "smoke", "--seeds", seeds])
        preset = sweep.preset_of(options, root=root)
        assert sweep.carry_out(adaptive.EXPERIMENT, preset, site, root=root) == 0
    found = [(row["label"], row["seed"]) for row in KeptRuns(root / "adaptive").rows()]
    assert sorted(found) == [(label, seed) for label in ("full", "linear") for seed in (0, 3, 4)]
    assert not math.isnan(open_results(root, "adaptive").mean("full", "test_accuracy").low)
    with pytest.raises(SystemExit):
        sweep.parse(adaptive.EXPERIMENT, ["--seeds", "one"])


def test_dependent_runs_keep_their_rows_while_others_are_missing(launches: list[str], tmp_path: Path) -> None:
    site, root = Site(work=tmp_path / "work"), tmp_path / "results"
    runs = [SMOKE.run("first", seed) for seed in (0, 1)]
    experiment = dataclasses.replace(
        caching.EXPERIMENT, runs=lambda preset: runs[: 1 + len(preset.seeds)], then=lambda *_: [SMOKE.run("then", 0)]
    )
    assert sweep.carry_out(experiment, dataclasses.replace(SMOKE, seeds=()), site, root=root) == 0
    sweep.carry_out(experiment, SMOKE, site, root=root, only=["then"])
    assert list(KeptRuns(root / "caching").lines) == ["first-s0", "then-s0"]


def test_another_weights_file_of_the_same_name_is_refused(launches: list[str], tmp_path: Path) -> None:
    kept = dataclasses.replace(SMOKE, weights_digest=64 * "a")
    carried_out(adaptive.EXPERIMENT, kept, tmp_path)
    presets, before = tmp_path / "results/presets.json", len(launches)
    files = presets.read_bytes()
    wanted = r"--weights \(none, SHA-256 bbbbbbbbbbbbbbbb\.\.\.\) must be the file with SHA-256 aaaaaaaaaaaaaaaa\.\.\."
    more = dataclasses.replace(kept, seeds=(1,))
    with pytest.raises(UsageError, match=wanted):
        carried_out(adaptive.EXPERIMENT, dataclasses.replace(more, weights_digest=64 * "b"), tmp_path)
    assert len(launches) == before and presets.read_bytes() == files
    assert len(carried_out(adaptive.EXPERIMENT, more, tmp_path).rows) == 4


@pytest.mark.parametrize(("every", "timed"), [("5", False), ("0", True)])
def test_whole_seconds_are_those_of_a_run_that_was_made_in_one_go(
    every: str, timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(planned: PlannedRun, site: Site, *, timeout: float) -> Path:
        shutil.rmtree(site.work / planned.name, ignore_errors=True)
        return made_up(planned, site)

    monkeypatch.setattr(sweep, "launch", launch)
    site, (new, begun) = Site(work=tmp_path), (SMOKE.run(name, 0, {"checkpoint_every": every}) for name in "ab")
    (tmp_path / begun.name).mkdir()
    assert sweep.make([new, begun], SMOKE, site, tmp_path / "x") == []
    lines = KeptRuns(tmp_path / "x").lines
    assert ["whole_seconds" in lines[run.name] for run in (new, begun)] == [True, timed]


@pytest.mark.parametrize(
    ("experiment", "flags", "said"),
    [
        (baseline.EXPERIMENT, "--ranks 0 --estimate", "--ranks (0) must be 1 or more"),
        (baseline.EXPERIMENT, "--ranks -1 --estimate", "--ranks (-1) must be 1 or more"),
        (peers.EXPERIMENTS["peers64"], "--seeds 7,8", "--seeds (7,8) must be left out: peers64 has its own"),
    ],
)
def test_ranks_and_seeds_that_no_run_can_have_are_refused(
    experiment: Experiment, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(experiment, flags.split()) == 2
    assert f"{experiment.name}: error: {said}" in capsys.readouterr().err


def test_experiments_of_one_command_begin_with_the_same_weights() -> None:
    presets = by_name(RESULTS / "presets.json")
    assert len({presets[each.name]["weights_sha256"] for each in EXPERIMENTS}) == 1


def test_the_command_of_several_experiments_goes_by_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiments.main(["--help"])
    said = capsys.readouterr().out
    assert "python -m analysis.experiments" in said and "one after another" in said and "baseline/" not in said


def test_an_estimate_says_for_how_many_cores(capsys: pytest.CaptureFixture[str]) -> None:
    for preset, cores in (("reduced", f"on {os.cpu_count()} cores"), ("full", "with a core for each rank")):
        assert sweep.main(baseline.EXPERIMENT, ["--preset", preset, "--estimate"]) == 0
        assert capsys.readouterr().out.rstrip().endswith(cores)


def test_without_a_baseline_no_learning_rate_is_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    assert sweep.main(adaptive.EXPERIMENT, where) == 2
    assert "holds no baseline, which chooses the learning rate" in capsys.readouterr().err
    assert not (tmp_path / "adaptive").exists()
    options = sweep.parse(adaptive.EXPERIMENT, [*where, "--lr", "0.03"])
    sweep.require_lr(options, adaptive.EXPERIMENT, root=tmp_path)
    assert sweep.preset_of(options, root=tmp_path).lr == 0.03
    assert sweep.main(adaptive.EXPERIMENT, [*where, "--lr", "0.03", "--weights", "nowhere.pt"]) == 2
    assert "--weights (nowhere.pt) must be a file" in capsys.readouterr().err


def test_runs_at_a_chosen_learning_rate_wait_for_the_choice(
    launches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(work=tmp_path / "work")
    assert sweep.carry_out(pixels64.EXPERIMENT, ONE, site, root=tmp_path, only=["lr0.01", "full"]) == 0
    assert "depend on these, which are not all there yet" in capsys.readouterr().err
    assert {row["label"] for row in KeptRuns(tmp_path / "pixels64").rows()} == {"lr0.01"}
    assert sweep.carry_out(pixels64.EXPERIMENT, ONE, site, root=tmp_path) == 0
    chosen = max(pixels64.LEARNING_RATES)
    assert {row["lr"] for row in KeptRuns(tmp_path / "pixels64").rows() if row["label"] == "full"} <= {0.01, chosen}


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
    scratch = flags_of(preset.run("scratch", 0, {"weights": "none"}), site, run_dir)
    assert scratch[scratch.index("--weights") + 1] == "none", "no file of that name beside it"
    assert command_of(preset.run("a", 0), site, run_dir)[:3] == ["mpirun", "-n", "2"]
    nodes = command_of(preset.run("a", 0, ranks=4, nodes=4), site, run_dir, cluster="c7")
    assert nodes[1:5] == ["run", "--name", "c7", "--"]
    hosts = command_of(FULL.run("a", 0), Site(work=Path("work"), hosts="n0:2,n1:2"), run_dir)
    assert hosts[1:5] == ["-np", "4", "-H", "n0:2,n1:2"]


def repeated(names: str, folder: Path, *more: str) -> int:
    """Runs the command that makes kept runs once more."""
    where = ["--results", str(folder / "results"), "--work", str(folder / "work")]
    return sweep.main(adaptive.EXPERIMENT, ["--preset", "smoke", "--repeat", names, *where, *more])


def test_a_kept_run_is_made_once_more_and_compared_and_nothing_kept_changes(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    monkeypatch.setattr(repeat, "launch", sweep.launch)
    files = {path: path.read_bytes() for path in sorted((tmp_path / "results").rglob("*")) if path.is_file()}
    launches.clear()
    assert repeated("full-s0", tmp_path) == 0
    assert launches == ["full-s0"]
    assert "full-s0: 72.0 % of the test samples are right, as is kept" in capsys.readouterr().out

    def otherwise(planned, site, *, timeout):  # type: ignore[no-untyped-def]
        return made_up(dataclasses.replace(planned, seed=1), site).rename(site.work / planned.name)

    monkeypatch.setattr(repeat, "launch", otherwise)
    assert repeated("full-s0", tmp_path) == 1
    said = capsys.readouterr().out
    assert "73.0 % of the test samples are right, 72.0 % are kept; the kept run was made by source" in said
    assert {path: path.read_bytes() for path in sorted((tmp_path / "results").rglob("*")) if path.is_file()} == files
    assert not [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert len(results.rows) == 2


def test_repeating_what_is_not_kept_or_lacks_its_files_is_refused(
    launches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    launches.clear()
    assert repeated("full-s7", tmp_path) == UsageError.exit_code
    assert "--repeat (full-s7) must name a run of" in capsys.readouterr().err
    carried_out(adaptive.EXPERIMENT, dataclasses.replace(SMOKE, weights="some.pt"), tmp_path / "other")
    launches.clear()
    assert repeated("full-s0", tmp_path / "other") == UsageError.exit_code
    assert "wants --weights some.pt" in capsys.readouterr().err
    (tmp_path / "another.pt").write_bytes(b"")
    assert repeated("full-s0", tmp_path / "other", "--weights", str(tmp_path / "another.pt")) == UsageError.exit_code
    assert "must be next to some.pt" in capsys.readouterr().err
    assert launches == []
