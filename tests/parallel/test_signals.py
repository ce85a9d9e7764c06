"""Signals to what a user sees of a job, its launcher or a script: ranks leave, or the job ends, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hvfreeze.runs import checkpoint_file as checkpoint
from tests.parallel.mpirun import OUT_VARIABLE, ROOT, command_of, end_all, environment, processes_of
from tests.parallel.nodes import wait_until
from tests.parallel.sizes import seldom

LONG = ["--model", "shufflenet_v2_x0_5", "--train-samples", "64", "--batch-size", "16", "--epochs", "500"]
LONG += ["--threads", "1", "--evaluate-every", "500", "--checkpoint-every", "1"]
LAUNCHERS = {
    "horovodrun": ["horovodrun", "-np", "2", "-H", "localhost:2"],
    "mpirun": ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none"],
    "launch/mpirun.sh": [str(ROOT / "launch/mpirun.sh"), "-np", "2"],
}

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


@contextmanager
def job(launcher: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job of two ranks that would train for long; afterwards none of its processes is left."""
    kept = {"HVFREEZE_KEEP": f"{OUT_VARIABLE} OMPI_MCA_plm OMPI_MCA_rmaps_base_oversubscribe"}
    with (out / "output").open("wb") as output:
        started = subprocess.Popen(
            [*LAUNCHERS[launcher], sys.executable, "-m", "hvfreeze", "train", *LONG, "--run-dir", str(out / "run")],
            env=environment(kept, out=out, timeout=200),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        left = end_all(processes_of(out), grace_seconds=60)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        assert not left, f"still alive after the job's end: {left}\n{(out / 'output').read_text()}"


def ranks_that_notice(out: Path) -> int:
    """How many ranks of the job have begun to collect SIGUSR1."""
    count = 0
    for pid in processes_of(out):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            caught = int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)
            count += bool(caught >> (signal.SIGUSR1 - 1) & 1) and "-m hvfreeze" in command_of(pid)[:200]
    return count


def trains(out: Path) -> Callable[[], object]:
    return lambda: checkpoint.newest(out / "run/checkpoints")


@pytest.mark.parametrize(
    ("launcher", "number", "early"),
    [
        seldom("horovodrun", signal.SIGTERM, True),
        seldom("mpirun", signal.SIGINT, False),
        ("launch/mpirun.sh", signal.SIGUSR1, False),
    ],
)
def test_a_signal_to_a_launchers_process_reaches_the_ranks_or_ends_the_job(
    launcher: str, number: signal.Signals, early: bool, tmp_path: Path
) -> None:
    with job(launcher, tmp_path) as started:
        if early:
            wait_until(lambda: ranks_that_notice(tmp_path) == 2, what="two ranks that have begun")
            assert not (tmp_path / "run").exists()
        else:
            wait_until(trains(tmp_path), what="a checkpoint")
        # Ctrl-C in a terminal comes to the whole group; a shell that waits heeds none of its own.
        (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
    said = (tmp_path / "output").read_text()
    assert "Traceback" not in said, said
    newest = checkpoint.newest(tmp_path / "run/checkpoints")
    assert newest is not None, said
    opened = checkpoint.open_checkpoint(newest, size=2)
    if number != signal.SIGINT:
        # Also where the shell before mpirun could not tell which signal ended it.
        assert f"hvfreeze: stopped after step {opened.step} of 1000" in said, said
        assert re.search(r"last checkpoint \(step \d+\) with: mpirun -np 2 --bind-to none hvfreeze train ", said), said
        assert opened.step == 1 or not early
    if launcher != "horovodrun":
        assert started.returncode == (1 if launcher == "mpirun" else 75), said


def test_an_end_of_a_shell_that_has_put_mpirun_into_the_background_asks_nobody_to_leave(tmp_path: Path) -> None:
    probe = tmp_path / "mpirun"
    probe.write_text(
        f"#!{sys.executable}\nimport os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hvfreeze.comm.mpi_environment import waiting_shell\n"
        "child = os.fork()\n"
        "if child == 0:\n    print(waiting_shell(os.getppid()))\n"
        "else:\n    os.waitpid(child, 0)\n"
    )
    probe.chmod(0o700)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def found(line: str) -> str:
        done = subprocess.run(["dash", "-c", line], env=variables, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    assert found("mpirun -np 2 true").isdigit()
    assert found("mpirun -np 2 true & wait") == "None"
    assert found(":; mpirun -np 2 true") == "None"
