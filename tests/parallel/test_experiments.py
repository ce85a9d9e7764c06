"""An experiment of each kind of program trains under mpirun, or on nodes of the local cluster, and is written up."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis import photographs
from analysis.experiments import EVERY
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.sweep import plan
from tests.parallel.mpirun import ROOT, environment
from tests.parallel.nodes import launch, scratch, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.seldom]
KINDS = {"communication": (), "cores": ("full-1x", "copies-2x")}
"""Experiments, and which of their runs are made; all where none is named."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def sweep(name: str, folder: Path, only: Sequence[str] = ()) -> list[str]:
    """The command that runs an experiment's smoke preset in a folder."""
    chosen = ["--only", ",".join(only)] if only else []
    where = ["--work", str(folder / "work" / name), "--results", str(folder / "results")]
    return [sys.executable, "-m", f"analysis.{name}", "--preset", "smoke", *where, *chosen]


def variables() -> dict[str, str]:
    """A user's shell with little parallelism."""
    known = environment({}, timeout=300)
    of_tests = ("OMPI_", "HVFREEZE_")
    return {name: value for name, value in known.items() if not name.startswith(of_tests)}


Rows = dict[str, dict[str, Any]]


def check_baseline(rows: Rows) -> None:
    """PyTorch's DistributedDataParallel does the same work, and sends the gradients of what it trains alone."""
    ours, theirs = rows["epochs1-s0"], rows["ddp-static-s0"]
    assert (theirs["program"], theirs["steps"]) == ("analysis.ddp", SMOKE.epochs * ours["steps"])
    assert theirs["allreduce_bytes"] < SMOKE.epochs * ours["allreduce_bytes"]


def check_communication(rows: Rows) -> None:
    assert rows["full-1x-s0"]["allreduce_bytes"] == 0
    assert rows["full-2x-1gbit-s0"]["allreduce_bytes"] > 0 < rows["full-2x-1gbit-s0"]["wire_bytes_per_step"]


def check(name: str, folder: Path, command: list[str]) -> Rows:
    """Run an experiment's command, and return the rows of its results."""
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    experiment = next(each for each in EVERY if each.name == name)
    results = experiment.open(folder / "results")
    only = KINDS.get(name, ())
    runs = [run.name for run in plan(experiment, SMOKE, results) if not only or run.label in only]
    assert [row["run"] for row in results.rows] == runs
    assert all(row["train_seconds"] > 0 < row["step_seconds"] for row in results.rows)
    assert all(0 <= row["test_accuracy"] <= 1 for row in results.rows)
    left = [path.name for path in (folder / "work" / name).iterdir() if not path.name.endswith(".log")]
    assert left == [], "checkpoints or weights are left"
    return {row["run"]: row for row in results.rows}


@pytest.mark.parametrize("name", KINDS)
def test_an_experiment_trains_and_writes_its_results_up(name: str, folder: Path) -> None:
    if name == "communication" and launch([str(ROOT / "launch/cluster"), "check"]).returncode != 0:
        pytest.skip("no local cluster on this machine; launch/cluster check says why")
    rows = check(name, folder, sweep(name, folder, KINDS[name]))
    if name == "communication":
        check_communication(rows)


PARTS = ("allocator", "command")


@pytest.mark.timeout(620)
def test_photographs_are_measured_and_whole_commands_are_divided_into_phases(folder: Path) -> None:
    out, work = folder / "photographs", folder / "work" / "photographs"
    command = [sys.executable, "-m", "analysis.photographs", "--preset", "smoke", "--only", *PARTS]
    command += ["--out", str(out), "--work", str(work)]
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = photographs.kept(out / photographs.MEASURED)
    planned = photographs.planned(photographs.PRESETS["smoke"])
    assert len(lines) == sum(run.part in PARTS for run in planned)
    phases = [line["phases"] for line in lines if line["part"] == "command"]
    assert phases and all(value >= 0 for found in phases for value in found.values()), phases
    assert photographs.words(out.parent)["measured"] == set(PARTS)


def test_a_killed_sweep_leaves_no_rank_behind_and_goes_on(folder: Path) -> None:
    site = Site(work=folder / "work" / "baseline")
    job = subprocess.Popen(sweep("baseline", folder), cwd=ROOT, env=variables(), start_new_session=True)
    wait_until(lambda: list(site.work.glob("*/config.yaml")), what="a run under way")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(
        lambda: subprocess.run(["pgrep", "-f", str(site.work)], capture_output=True).returncode,
        what="the end of the killed sweep's ranks",
    )
    check_baseline(check("baseline", folder, sweep("baseline", folder)))
    for line in KeptRuns(folder / "results" / "baseline").lines.values():
        assert [epoch["epoch"] for epoch in line["epochs"]] == list(range(len(line["epochs"])))
