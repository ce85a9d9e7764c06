"""Every experiment's real code path: its smoke preset trains under mpirun, or on nodes of the local cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.experiments import EVERY, EXPERIMENTS
from analysis.sweeps.experiment import plan
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.results import open_results
from tests.parallel.mpirun import ROOT, environment
from tests.parallel.nodes import launch, scratch, wait_until
from tests.parallel.sizes import seldom
from tests.parallel.startup.handover import STANDING

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
ON_NODES = {"communication", "scaling", "strategies"}
SELDOM = ("pixels64", "strategies", "auto_parts")
"""Long, and what each does others do too."""
NAMES = [*(experiment.name for experiment in EXPERIMENTS), "exact_head", "compression", "peers"]


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
    known = environment({}, out=Path("/nonexistent"), timeout=300, ranks=2)
    of_tests = ("OMPI_", "HVFREEZE_")
    return {name: value for name, value in known.items() if name == STANDING or not name.startswith(of_tests)}


@pytest.mark.parametrize(
    "name", [seldom(name) if name in SELDOM else name for name in (*NAMES, "strategies", "auto_parts")]
)
def test_an_experiment_trains_and_writes_its_results_up(name: str, folder: Path) -> None:
    if name in ON_NODES and launch([str(ROOT / "launch/cluster"), "check"]).returncode != 0:
        pytest.skip("no local cluster on this machine; launch/cluster check says why")
    ended = subprocess.run(sweep(name, folder), cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = open_results(folder / "results", name)
    experiment = next(each for each in EVERY if each.name == name)
    assert [row["run"] for row in results.rows] == [run.name for run in plan(experiment, SMOKE, results)]
    for row in results.rows:
        assert row["train_seconds"] > 0
        assert row["step_seconds"] > 0
        assert 0 <= row["test_accuracy"] <= 1
    assert "## Limits" in (results.directory / "README.md").read_text()
    # The static sweep's smoke preset has no full run, and so nothing that a figure could compare.
    assert name == "static_sweep" or list((results.directory / "figures").glob("*.svg"))
    left = [path.name for path in (folder / "work" / name).iterdir() if not path.name.endswith(".log")]
    assert left == [], "checkpoints or weights are left"


def test_frozen_blocks_send_nothing_and_a_cut_is_what_was_asked_for(folder: Path) -> None:
    rows = {row["run"]: row for row in open_results(folder / "results", "static_sweep").rows}
    assert rows["groups5-s0"]["final_cut"] == 5
    assert rows["groups5-s0"]["allreduce_bytes"] < rows["residual8-s0"]["allreduce_bytes"]


def test_distributed_data_parallel_does_the_same_work(folder: Path) -> None:
    rows = {row["run"]: row for row in open_results(folder / "results", "baseline").rows}
    ours, theirs = rows["epochs1-s0"], rows["ddp-static-s0"]
    assert theirs["steps"] == SMOKE.epochs * ours["steps"]
    assert theirs["program"] == "analysis.ddp"
    assert theirs["allreduce_bytes"] < SMOKE.epochs * ours["allreduce_bytes"]


def test_bytes_on_the_wire_are_counted(folder: Path) -> None:
    rows = {row["run"]: row for row in open_results(folder / "results", "communication").rows}
    if not rows:
        pytest.skip("no local cluster on this machine")
    assert rows["full-1x-s0"]["allreduce_bytes"] == 0
    assert rows["full-2x-1gbit-s0"]["allreduce_bytes"] > 0
    assert rows["full-2x-1gbit-s0"]["wire_bytes_per_step"] > 0


def test_a_killed_sweep_leaves_no_rank_behind_and_goes_on(folder: Path) -> None:
    own = folder / "killed"
    site = Site(work=own / "work" / "adaptive")
    job = subprocess.Popen(sweep("adaptive", own), cwd=ROOT, env=variables(), start_new_session=True)
    wait_until(lambda: (site.work / "full-s0" / "config.yaml").exists(), what="a run under way")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not running(str(site.work)), what="the end of the killed sweep's ranks")
    ended = subprocess.run(
        sweep("adaptive", own), cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = own / "results" / "adaptive" / "runs"
    assert sorted(path.name for path in kept.iterdir()) == ["full-s0", "linear-s0"]
    epochs = [json.loads(line)["epoch"] for line in (kept / "full-s0" / "metrics.jsonl").read_text().splitlines()]
    assert epochs == list(range(SMOKE.epochs))


def running(mark: str) -> list[str]:
    """Processes whose command line holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found
