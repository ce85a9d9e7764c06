"""Every experiment's real code path: its smoke preset trains under mpirun, or on nodes of the local cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
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
ON_NODES = {"communication", "strategies"}
NAMES = ("baseline", "communication", "peers", "static_sweep", "adaptive", "caching", "pixels64")
NAMES += ("strategies", "tasks", "cores", "script_heads")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def sweep(name: str, folder: Path) -> list[str]:
    """The command that runs an experiment's smoke preset in a folder."""
    where = ["--work", str(folder / "work" / name), "--results", str(folder / "results")]
    return [sys.executable, "-m", f"analysis.{name}", "--preset", "smoke", *where]


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


def check_static_sweep(rows: Rows) -> None:
    assert rows["groups5-s0"]["final_cut"] == 5
    assert rows["groups5-s0"]["allreduce_bytes"] < rows["residual8-s0"]["allreduce_bytes"]


def check_communication(rows: Rows) -> None:
    assert rows["full-1x-s0"]["allreduce_bytes"] == 0
    assert rows["full-2x-1gbit-s0"]["allreduce_bytes"] > 0 < rows["full-2x-1gbit-s0"]["wire_bytes_per_step"]


CHECKS = {"baseline": check_baseline, "static_sweep": check_static_sweep, "communication": check_communication}


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_trains_and_writes_its_results_up(name: str, folder: Path) -> None:
    if name in ON_NODES and launch([str(ROOT / "launch/cluster"), "check"]).returncode != 0:
        pytest.skip("no local cluster on this machine; launch/cluster check says why")
    ended = subprocess.run(sweep(name, folder), cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    experiment = next(each for each in EVERY if each.name == name)
    results = experiment.open(folder / "results")
    assert [row["run"] for row in results.rows] == [run.name for run in plan(experiment, SMOKE, results)]
    assert all(row["train_seconds"] > 0 < row["step_seconds"] for row in results.rows)
    assert all(0 <= row["test_accuracy"] <= 1 for row in results.rows)
    CHECKS.get(name, lambda rows: None)({row["run"]: row for row in results.rows})
    left = [path.name for path in (folder / "work" / name).iterdir() if not path.name.endswith(".log")]
    assert left == [], "checkpoints or weights are left"


@pytest.mark.timeout(620)
def test_photographs_are_measured_in_every_part(folder: Path) -> None:
    out, work = folder / "photographs", folder / "work" / "photographs"
    command = [sys.executable, "-m", "analysis.photographs", "--preset", "smoke"]
    command += ["--out", str(out), "--work", str(work)]
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = photographs.kept(out / photographs.MEASURED)
    assert len(lines) == len(photographs.planned(photographs.PRESETS["smoke"]))
    phases = [line["phases"] for line in lines if line["part"] == "command"]
    assert phases and all(value >= 0 for found in phases for value in found.values()), phases
    words = photographs.words(out.parent)
    assert words["measured"] == set(photographs.MEASURES) and "DDP" in words["step_table"]


def test_a_killed_sweep_leaves_no_rank_behind_and_goes_on(folder: Path) -> None:
    own = folder / "killed"
    site = Site(work=own / "work" / "adaptive")
    job = subprocess.Popen(sweep("adaptive", own), cwd=ROOT, env=variables(), start_new_session=True)
    wait_until(lambda: (site.work / "full-s0" / "config.yaml").exists(), what="a run under way")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(
        lambda: subprocess.run(["pgrep", "-f", str(site.work)], capture_output=True).returncode,
        what="the end of the killed sweep's ranks",
    )
    ended = subprocess.run(
        sweep("adaptive", own), cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = KeptRuns(own / "results" / "adaptive").lines
    assert sorted(kept) == ["full-s0", "linear-s0"]
    assert [line["epoch"] for line in kept["full-s0"]["epochs"]] == list(range(SMOKE.epochs))
