"""Starts a planned run: alone, under mpirun, on given hosts or on nodes of the local cluster. Never loads MPI."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.benchmarks.launching import environment
from analysis.sweeps.presets import PlannedRun
from hvfreeze.config.flags import words_of
from hvfreeze.config.tree import applying
from hvfreeze.errors import RefusedError, UsageError

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "launch" / "cluster"
GRACE_SECONDS = 15.0
LOOK_SECONDS = 0.05
_SET_PARENT_DEATH_SIGNAL = 1
BELOW = "./"
"""How a run's data folder begins that lies below the site's."""
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where runs find what they need on this machine."""

    work: Path
    """Folder for run directories while they are under way."""
    data_dir: Path | None = None
    weights: Path | None = None
    """Path of a weights file; other files that runs ask for are in the same folder."""
    hosts: str = ""
    """HOST:SLOTS,... that see the same folders; empty is this machine."""


def count_sent(processes: dict[str, int], run_dir: Path, sent: dict[int, dict[str, int]]) -> None:
    """Write down what each node has sent, in the run directory's wire.json, when another epoch has ended.

    Args:
        processes: node -> a process in its network.
        run_dir: of the run under way.
        sent: epochs -> node -> bytes so far, which is added to.
    """
    path = run_dir / "metrics.jsonl"
    epochs = path.read_bytes().count(b"\n") if path.exists() else 0
    if epochs and epochs not in sent:
        sent[epochs] = {name: sent_bytes(pid) for name, pid in processes.items()}
        (run_dir / "wire.json").write_text(json.dumps(sent), encoding="utf-8")


def sent_bytes(pid: int) -> int:
    """Return what the interface eth0 of this process's network has sent."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(counters[8])


def flags_of(planned: PlannedRun, site: Site, run_dir: Path) -> list[str]:
    """Return the arguments behind the program's name."""
    values: dict[str, object] = {**planned.flags, "seed": planned.seed, "run_dir": run_dir.resolve()}
    # For a text this would be a file; runs read the text that every machine has.
    if site.data_dir is not None and values.get("data") != "text":
        asked = str(values.get("data_dir", ""))
        values["data_dir"] = site.data_dir.resolve() / (asked if asked.startswith(BELOW) else "")
    if "cache_dir" in values:
        values["cache_dir"] = site.work.resolve() / str(values["cache_dir"])
    if site.weights is not None and values.get("weights", "none") != "none":
        values["weights"] = site.weights.resolve().with_name(str(values["weights"]))
    return [*words_of(applying(values)), "--resume"]


def command_of(planned: PlannedRun, site: Site, run_dir: Path, *, cluster: str = "") -> list[str]:
    """Return the command that starts or continues the run."""
    program = [sys.executable, "-m", planned.program, *flags_of(planned, site, run_dir)]
    launcher = [str(ROOT / "launch" / "horovodrun.sh"), "-np", str(planned.ranks)]
    if cluster:
        return [str(CLUSTER), "run", "--name", cluster, "--", *launcher, *program]
    if site.hosts:
        return [*launcher, "-H", site.hosts, *program]
    if planned.ranks == 1:
        return program
    return ["mpirun", "-n", str(planned.ranks), "--bind-to", "none", "--oversubscribe", *program]


def begins_anew(planned: PlannedRun) -> bool:
    """Return True if a stopped run must restart from scratch, with an empty cache.

    Bytes are counted over a whole run, other programs cannot continue, and a run without checkpoints restarts: with the
    rows that it cached before, it would be too fast.
    """
    return bool(planned.nodes or planned.program != "hvfreeze" or planned.flags.get("checkpoint_every") == "0")


def launch(planned: PlannedRun, site: Site, *, timeout: float) -> Path:
    """Bring a run to its end and return its directory.

    Raises:
        RefusedError: it failed, with its last lines; or the local cluster cannot be brought up.
    """
    run_dir = site.work / planned.name
    if begins_anew(planned):
        shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{planned.name}.log")
    with contextlib.ExitStack() as stack:
        cluster, look = "", None
        if planned.nodes:
            cluster, processes = stack.enter_context(nodes_up(planned))
            look = functools.partial(count_sent, processes, run_dir, {})
        code = follow(command_of(planned, site, run_dir, cluster=cluster), log, look, timeout=timeout)
    if code != 0 or not (run_dir / "summary.json").exists():
        last = "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-12:])
        raise RefusedError(f"run {planned.name} ended with exit code {code}:\n{last}\n    all: {log}")
    return run_dir


def require_cluster() -> None:
    """Refuse to begin where this machine cannot have a local cluster.

    Raises:
        UsageError: data or weights are missing; the message says how to get them.
    """
    said = subprocess.run([str(CLUSTER), "check"], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise UsageError(f"these runs need the local cluster, which this machine cannot have: {said.stderr.strip()}")


@contextlib.contextmanager
def nodes_up(planned: PlannedRun) -> Iterator[tuple[str, dict[str, int]]]:
    """Bring a local cluster up for a run; yields its name and each node's process."""
    program, name = str(CLUSTER), f"sweep{os.getpid()}"
    up = [program, "up", "--name", name, "--nodes", str(planned.nodes), "--owner", str(os.getpid())]
    up += ["--slots", str(-(-planned.ranks // planned.nodes))]
    up += [*(["--bandwidth", planned.bandwidth] if planned.bandwidth else [])]
    said = subprocess.run(up, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise RefusedError(f"run {planned.name} needs a local cluster: {said.stderr.strip()}")
    try:
        asked = [program, "status", "--name", name, "--json"]
        status = subprocess.run(asked, capture_output=True, text=True, check=True)
        yield name, {node["name"]: int(node["pid"]) for node in json.loads(status.stdout)[0]["nodes"]}
    finally:
        subprocess.run([program, "down", "--name", name], check=False)


def follow(command: Sequence[str], log: Path, look: Callable[[], None] | None = None, *, timeout: float) -> int:
    """Run a command to its end with its output in a file; returns its exit code, 110 when it took too long.

    `look` is called now and then while it is under way.
    """
    with log.open("ab") as output:
        job = subprocess.Popen(
            command,
            env=environment(os.environ),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    deadline = time.monotonic() + timeout
    try:
        while job.poll() is None and time.monotonic() < deadline:
            if look is not None:
                look()
            time.sleep(LOOK_SECONDS)
        return 110 if job.poll() is None else job.returncode
    finally:
        end(job)


def die_with_parent() -> None:
    """End the job with the sweep, however that ends, because two jobs in one run directory would spoil each other."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(GRACE_SECONDS)


def bits_per_second(bandwidth: str) -> float:
    """Return tc's notation of a rate as a number, infinity for none."""
    match = re.fullmatch(r"([0-9.]+)([kmg]?)bit", bandwidth)
    return float(match[1]) * BITS[match[2]] if match else float("inf")
