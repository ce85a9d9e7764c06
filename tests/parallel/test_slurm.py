from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.mpirun import ROOT
from tests.parallel.nodes import Nodes, attempts, digest, scratch, training, up, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.seldom, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with up("local_slurm", "--nodes", "2", "--slots", "2") as cluster:
        yield cluster


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def submit(nodes: Nodes, log: Path, *command: str, options: tuple[str, ...] = (), **variables: str) -> str:
    """The job's number. A controller that has no time for a connection drops it; sbatch is then started again."""
    words = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", *options, *command]
    for _ in range(5):
        done = nodes.run(*words, **variables)
        if "socket error" not in done.stderr:
            break
        time.sleep(2)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_end(nodes: Nodes, job: str) -> None:
    wait_until(lambda: not nodes.run("squeue", "--noheader", f"--jobs={job}").stdout, what=f"the end of job {job}")


@pytest.mark.fault
def test_a_job_that_lost_a_rank_and_was_preempted_ends_as_the_undisturbed_one(nodes: Nodes, folder: Path) -> None:
    script = str(ROOT / "launch/slurm.sbatch")
    options = ["--train-samples", "64", "--epochs", "6"]
    whole = submit(
        nodes,
        folder / "whole.log",
        script,
        *training(folder / "whole", *options),
        OMP_NUM_THREADS="1",
        HVFREEZE_LAUNCHER="srun.sh",
    )
    wait_for_end(nodes, whole)
    assert (folder / "whole/summary.json").exists(), (folder / "whole.log").read_text()

    job = submit(
        nodes,
        folder / "disturbed.log",
        script,
        *training(folder / "disturbed", *options),
        OMP_NUM_THREADS="1",
    )
    wait_until(lambda: list(folder.glob("disturbed/checkpoints/step-*.pt")), what="a checkpoint")
    killed = nodes.run("pkill", "-KILL", "-f", "[h]vfreeze train", on="node1")
    assert killed.returncode == 0, killed.stderr
    wait_until(lambda: "resumed after step" in (folder / "disturbed.log").read_text(), what="the restart")
    # A job of a higher priority takes both nodes; Slurm tells the first one with the signal that it asked for.
    urgent = submit(nodes, folder / "urgent.log", options=("--partition=high", "--wrap=true"))
    wait_for_end(nodes, urgent)
    wait_for_end(nodes, job)

    log = (folder / "disturbed.log").read_text()
    assert (folder / "disturbed/summary.json").exists(), log
    assert digest(folder / "disturbed") == digest(folder / "whole"), log
    lost, preempted, last = attempts(folder / "disturbed")
    assert lost["code"] not in (0, 75) and lost["next"].startswith("restart"), log
    assert (preempted["code"], preempted["signals"], preempted["next"]) == (75, ["SIGUSR1"], "end"), log
    assert (last["attempt"], last["code"]) == (1, 0), log
    assert log.count("resumed after step") == 2


def test_a_job_does_not_carry_the_environment_of_its_submitter(nodes: Nodes, folder: Path) -> None:
    words = [sys.executable, "-c", "import os; print(dict(os.environ))", "--run-dir", str(folder / "run")]
    job = submit(nodes, folder / "log", str(ROOT / "launch/slurm.sbatch"), *words, FAKE_API_KEY="sesame")
    wait_for_end(nodes, job)
    log = (folder / "log").read_text()
    assert log.count("'HOROVOD_FUSION_THRESHOLD': '0'") == 2, log
    assert "sesame" not in log


def test_a_job_has_all_cores_of_its_nodes(nodes: Nodes, folder: Path) -> None:
    words = [sys.executable, "-c", "import os; print(dict(os.environ))", "--run-dir", str(folder / "run")]
    job = submit(nodes, folder / "log", str(ROOT / "launch/slurm.sbatch"), *words)
    wait_for_end(nodes, job)
    log = (folder / "log").read_text()
    assert log.count("'SLURM_CPUS_ON_NODE': '2'") == 2, log
