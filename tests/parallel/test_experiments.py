"""An experiment trains under mpirun and is written up, also after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis import baseline, photographs
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.sweep import plan
from tests.parallel.mpirun import ROOT, environment
from tests.parallel.nodes import scratch, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.seldom]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def variables() -> dict[str, str]:
    """A user's shell with little parallelism."""
    known = environment({}, timeout=300)
    of_tests = ("OMPI_", "HVFREEZE_")
    return {name: value for name, value in known.items() if not name.startswith(of_tests)}


def test_photographs_are_measured(folder: Path) -> None:
    out, work = folder / "photographs", folder / "work" / "photographs"
    command = [sys.executable, "-m", "analysis.photographs", "--preset", "smoke", "--only", "allocator"]
    command += ["--out", str(out), "--work", str(work)]
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = photographs.kept(out / photographs.MEASURED)
    planned = photographs.planned(photographs.PRESETS["smoke"])
    assert len(lines) == sum(run.part == "allocator" for run in planned)
    assert photographs.words(out.parent)["measured"] == {"allocator"}


def test_a_killed_sweep_leaves_no_rank_behind_and_goes_on_and_writes_its_results_up(folder: Path) -> None:
    site = Site(work=folder / "work" / "baseline")
    where = ["--work", str(site.work), "--results", str(folder / "results")]
    command = [sys.executable, "-m", "analysis.baseline", "--preset", "smoke", *where]
    job = subprocess.Popen(command, cwd=ROOT, env=variables(), start_new_session=True)
    wait_until(lambda: list(site.work.glob("*/config.yaml")), what="a run under way")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(
        lambda: subprocess.run(["pgrep", "-f", str(site.work)], capture_output=True).returncode,
        what="the end of the killed sweep's ranks",
    )
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = baseline.EXPERIMENT.open(folder / "results")
    assert [row["run"] for row in results.rows] == [run.name for run in plan(baseline.EXPERIMENT, SMOKE, results)]
    assert all(row["train_seconds"] > 0 < row["step_seconds"] for row in results.rows)
    assert all(0 <= row["test_accuracy"] <= 1 for row in results.rows)
    # PyTorch's DistributedDataParallel does the same work, and sends the gradients of what it trains alone.
    rows = {row["run"]: row for row in results.rows}
    ours, theirs = rows["epochs1-s0"], rows["ddp-static-s0"]
    assert (theirs["program"], theirs["steps"]) == ("analysis.ddp", SMOKE.epochs * ours["steps"])
    assert theirs["allreduce_bytes"] < SMOKE.epochs * ours["allreduce_bytes"]
    left = [path.name for path in site.work.iterdir() if not path.name.endswith(".log")]
    assert left == [], "checkpoints or weights are left"
