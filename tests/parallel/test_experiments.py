"""An experiment trains under mpirun and is written up, also after it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from analysis import baseline, photographs
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.sweep import main, plan
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
    planned = [run for run in photographs.planned(photographs.PRESETS["smoke"]) if run.part == "allocator"]
    # The other way has the same command without its switch; its line is taken as kept.
    (before,), (now,) = ([run for run in planned if run.way == way] for way in (photographs.BEFORE, photographs.NOW))
    used = {"seconds": 1.0, "steps": 1, "kernel_seconds": [0.1, 0.1], "peak_bytes": [10**9, 10**9]}
    told = {"commit": "abc", "machine": "one", "finished": ""}
    out.mkdir()
    (out / photographs.MEASURED).write_text(json.dumps({**asdict(now), **used, **told}) + "\n")
    words = ["--preset", "smoke", "--only", "allocator", "--out", str(out), "--work", str(work)]
    assert photographs.main(words) == 0
    _, line = photographs.kept(out / photographs.MEASURED)
    assert asdict(before).items() <= line.items()
    assert line["seconds"] > 0 < line["steps"] and len(line["peak_bytes"]) == photographs.RANKS
    assert photographs.words(out.parent)["measured"] == {"allocator"}


def test_a_killed_sweep_leaves_no_rank_behind_and_goes_on_and_writes_its_results_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(work=folder / "work" / "baseline")
    words = ["--preset", "smoke", "--work", str(site.work), "--results", str(folder / "results")]
    command = [sys.executable, "-m", "analysis.baseline", *words]
    job = subprocess.Popen(command, cwd=ROOT, env=variables(), start_new_session=True)
    wait_until(lambda: list(site.work.glob("*/config.yaml")), what="a run under way")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(
        lambda: subprocess.run(["pgrep", "-f", str(site.work)], capture_output=True).returncode,
        what="the end of the killed sweep's ranks",
    )
    # This process keeps its handlers.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(baseline.EXPERIMENT, words) == 0
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
