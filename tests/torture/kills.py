"""Signals at random moments to random processes of a job, again and again, until the run is complete all the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvfreeze.errors import HvfreezeError
from hvfreeze.runs import checkpoint_file as checkpoint
from tests.parallel.mpirun import ROOT, end_all, environment, processes_of

# Ten steps an epoch with two ranks; everything that a state may hold: cache, votes, an interval under way.
TRAINING = ["--model", "shufflenet_v2_x0_5", "--train-samples", "100", "--validation-fraction", "0.2", "--threads", "1"]
TRAINING += ["--batch-size", "4", "--epochs", "3", "--lr", "0.05", "--freeze", "percentile", "--eta-max", "inf"]
TRAINING += ["--interval", "3", "--freeze-warmup", "3", "--quorum", "0.25", "--augment", "views:2", "--cache", "on"]
TRAINING += ["--checkpoint-every", "4steps"]
SIZES = (2, 2, 2, 3)
TO_RANKS = ("KILL", "KILL", "KILL", "TERM", "SEGV", "USR1", "INT", "STOP")
TO_LAUNCHER = ("KILL", "TERM", "INT", "USR1")
STALL_SECONDS = 10
LONGEST_SECONDS = STALL_SECONDS + 10 + 40
"""A stopped rank ends the job at the limit and 10 s; the rest is for a machine that does other work."""
GONE_SECONDS = 20.0
IN_ORDER = (0, 75)


@dataclass
class Life:
    """A run directory that is killed and resumed until its run is complete."""

    size: int
    folder: Path
    resumes: int = 0

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def is_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return checkpoint.newest(self.run / "checkpoints") is not None


def outcome(run: Path) -> dict[str, Any]:
    """What a complete run came to, which must not depend on where it was killed."""
    summary = json.loads((run / "summary.json").read_text())
    decisions = (run / "decisions.jsonl").read_text()
    kept = ("epoch", "step", "cut", "train_loss", "test_accuracy", "allreduce_bytes")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [[line[key] for key in kept] for line in lines]
    found = {key: summary[key] for key in ("parameter_digest", "cut_history", "test_accuracy")}
    return {**found, "epochs": epochs, "decisions": decisions}


class Job:
    """A started job."""

    def __init__(self, life: Life, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        program = [sys.executable, "-m", "hvfreeze", "train", *TRAINING, "--run-dir", str(life.run), "--resume"]
        variables = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS)}
        with (out / "output").open("wb") as output:
            self.launcher = subprocess.Popen(
                ["mpirun", "-n", str(life.size), "--oversubscribe", "--bind-to", "none", *program],
                env=environment(
                    variables,
                    out=out,
                    timeout=3600,
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, None where the job has not ended after so long."""
        try:
            return self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that there is."""
        found: dict[int, int] = {}
        for pid in sorted(processes_of(self.out)):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for value in (v.partition(b"=")[2] for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")):
                    found.setdefault(int(value), pid)
        return found

    def clear_up(self) -> dict[int, str]:
        """Kill all processes that are still alive, and return them."""
        left = end_all(processes_of(self.out), grace_seconds=GONE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()
        return left


def disturb(
    job: Job, life: Life, chance: random.Random, *, delay: float, ready: Callable[[], object]
) -> dict[str, Any] | None:
    """Send a signal `delay` after it is `ready`; return what was sent, None where the job had ended before."""
    while not ready() and job.wait(0.05) is None:
        pass
    if job.wait(delay) is not None:
        return None
    to_launcher = chance.random() < 0.2
    name = chance.choice(TO_LAUNCHER if to_launcher else TO_RANKS)
    rank = chance.randrange(life.size)
    # A rank that has not been started yet, or has ended: the launcher, then.
    pid = job.launcher.pid if to_launcher else job.ranks().get(rank, job.launcher.pid)
    receiver = "launcher" if pid == job.launcher.pid else "rank"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[f"SIG{name}"])
    if name == "STOP" and receiver == "launcher":
        # A stopped launcher is stopped by who can let it go on; nobody is left behind by that.
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
    return {"signal": name, "to": receiver, "rank": rank if receiver == "rank" else None, "after": round(delay, 3)}


def state_is_whole(life: Life) -> str:
    """Return the faults of the newest checkpoint; none if it can be read, or if there is no checkpoint."""
    newest = checkpoint.newest(life.run / "checkpoints")
    if newest is None:
        return ""
    try:
        opened = checkpoint.open_checkpoint(newest, size=life.size)
        for number in range(1 + life.size):
            checkpoint.unpacked(opened.section(number), name=str(newest))
    except HvfreezeError as error:
        return str(error)
    return ""


def round_of(
    life: Life,
    chance: random.Random,
    *,
    expected: dict[str, Any],
    longest: float,
    ready: Callable[[], object] = lambda: True,
) -> dict[str, Any]:
    """Resume a life, disturb it at most `longest` after it is `ready`, and return what was found.

    `complete` tells that it needs no more.
    """
    begun = time.monotonic()
    faults: list[str] = []
    job = Job(life, life.folder / f"job{life.resumes}")
    life.resumes += 1
    try:
        sent = disturb(job, life, chance, delay=chance.uniform(0, longest), ready=ready)
        since = time.monotonic()
        code = job.wait(LONGEST_SECONDS)
        ended_after = time.monotonic() - since
        if code is None:
            faults.append("hang")
            job.launcher.kill()
    finally:
        left = job.clear_up()
    # Processes that a hang leaves are reported as the hang.
    faults += ["orphans"] if left and code is not None else []
    said = (job.out / "output").read_text(errors="replace").replace(f"{ROOT}/", "")
    faults += ["traceback"] if "Traceback" in said else []
    why = state_is_whole(life)
    faults += ["corrupt"] if why else []
    if sent is None and code not in IN_ORDER:
        faults.append("ended by itself")
    complete = (life.run / "summary.json").exists()
    if complete and code == 0 and outcome(life.run) != expected:
        faults.append("wrong resume")
    found = {"size": life.size, "code": code, "ended_after": round(ended_after, 2), "complete": complete}
    details = {"left": list(left.values()), "why": why, "said": said[-2000:]} if faults else {}
    return {
        "seconds": time.monotonic() - begun,
        "faults": faults,
        **found,
        **(sent or {}),
        **details,
        "sent": bool(sent),
    }


def straight(size: int, folder: Path) -> tuple[dict[str, Any], float]:
    """Return what an undisturbed run of `size` ranks comes to, and its seconds."""
    begun = time.monotonic()
    life = Life(size, folder)
    job = Job(life, folder / "job")
    code = job.wait(600)
    left = job.clear_up()
    said = (job.out / "output").read_text(errors="replace")
    assert code == 0 and not left, f"an undisturbed run ends with {code}, leaves {left}\n{said}"
    return outcome(life.run), time.monotonic() - begun
