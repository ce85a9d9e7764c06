"""Starts ranks for a test, with a deadline, and leaves no process behind.

The pytest process never loads MPI itself; worker scripts hand their findings back as one JSON file per rank.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).with_name("startup")
OUT_VARIABLE = "HVFREEZE_TEST_OUT"
GRACE_SECONDS = 10.0
TIMED_OUT = 110
"""Exit code of `mpirun --timeout` when the time is over; also used when mpirun itself had to be killed."""

_FROM_ANOTHER_JOB = re.compile(
    r"PMIX_|OMPI_COMM_WORLD|OMPI_UNIVERSE|OMPI_MCA_ess|OMPI_MCA_orte_|HOROVOD_|SLURM_|HVFREEZE_"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_SET_BY_LIBRARIES = ("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""By torch's compiler and scikit-learn, when a test loads them: with these, jobs would begin otherwise than before."""
_FOR_TESTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_plm": "isolated",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, repr=False)
class Result:
    """What a job left: its exit code, its output, and `ranks[r]`, the JSON object of rank r.

    In a test: `assert result.returncode == 0, str(result)`.
    """

    returncode: int
    stdout: str
    stderr: str
    ranks: list[dict[str, Any]]

    def __repr__(self) -> str:
        """One line, because pytest repeats it."""
        return f"<exit {self.returncode}, {len(self.ranks)} reports>"

    def __str__(self) -> str:
        """The exit code, the end of the output, and the errors, whose first ones say what went wrong first."""
        errors = self.stderr
        if len(errors) > 12_000:
            errors = f"{errors[:6000]}\n[...]\n{errors[-6000:]}"
        return f"exit {self.returncode}\n--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{errors}"


def mpirun(
    n: int,
    script: Path | Sequence[str],
    *,
    timeout: float,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    every_rank_reports: bool | None = None,
) -> Result:
    """Runs `n` ranks and waits for their end.

    Args:
        n: Number of ranks on this machine.
        script: A worker script, or a list with everything that follows `python`.
        timeout: Seconds after which the job is ended; the exit code is then 110.
        args: Arguments of the worker script.
        env: Variables to add, or with None to drop.
        cwd: Folder to start in; the repository's root when None.
        every_rank_reports: Fail unless every rank wrote its JSON file. By default so for a worker script.

    Raises:
        AssertionError: a rank did not report, or a process was still alive after the job's end (it is then killed).
    """
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, *script]
    if every_rank_reports is None:
        every_rank_reports = isinstance(script, Path)
    with tempfile.TemporaryDirectory(prefix="hvfreeze-test-") as folder:
        out = Path(folder)
        variables = environment(env or {}, out=out, timeout=timeout)
        returncode = _run([*launch(n, timeout), *command, *args], variables, out, timeout=timeout, cwd=cwd or ROOT)
        left = end_all(processes_of(out), grace_seconds=GRACE_SECONDS)
        ranks = [json.loads(path.read_text()) for r in range(n) if (path := out / f"rank{r}.json").exists()]
        stdout, stderr = (_text(out / name) for name in ("stdout", "stderr"))
    result = Result(returncode, stdout, stderr, ranks)
    assert not left, f"still alive after the job's end: {left}\n{result}"
    assert not every_rank_reports or len(ranks) == n, f"{len(ranks)} of {n} ranks reported\n{result}"
    return result


def hvfreeze(n: int, *args: str, timeout: float = 120.0, **options: Any) -> Result:
    """Runs `python -m hvfreeze ARGS` on `n` ranks; `options` are those of `mpirun`."""
    return mpirun(n, ["-m", "hvfreeze", *args], timeout=timeout, **options)


def report(rank: int, **values: Any) -> None:
    """Called by a worker script at its end: `values` become `Result.ranks[rank]`."""
    path = Path(os.environ[OUT_VARIABLE]) / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path)


def environment(
    changes: Mapping[str, str | None], *, out: Path = Path("/nonexistent"), timeout: float | None = None
) -> dict[str, str]:
    """Return the ranks' variables: this process's without other jobs' and secrets, those for tests, then `changes`.

    A process shows its stacks shortly before `timeout` seconds are over.
    """
    own = {k: v for k, v in os.environ.items() if k not in _SET_BY_LIBRARIES}
    variables = {k: v for k, v in own.items() if not _FROM_ANOTHER_JOB.match(k) and not _SECRET.search(k)}
    variables |= _FOR_TESTS
    variables |= {
        OUT_VARIABLE: str(out),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), str(ROOT)]),
    }
    if timeout is not None:
        variables["HVFREEZE_TEST_TRACE_AFTER"] = str(max(1.0, timeout - 3.0))
    for name, value in changes.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return variables


def launch(n: int, timeout: float | None = None) -> list[str]:
    """Return the words that start `n` ranks of the command that follows, for so many seconds at most."""
    deadline = [] if timeout is None else ["--timeout", str(int(timeout))]
    return ["mpirun", *deadline, "-n", str(n), "--oversubscribe", "--bind-to", "none"]


def _run(command: Sequence[str], variables: Mapping[str, str], out: Path, *, timeout: float, cwd: Path) -> int:
    with (out / "stdout").open("wb") as stdout, (out / "stderr").open("wb") as stderr:
        job = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            return job.wait(timeout + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def processes_of(out: Path) -> set[int]:
    """Every process that this job started, however far away it forked: all have the job's folder in their variables."""
    mark = f"{OUT_VARIABLE}={out}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def end_all(processes: Iterable[int], *, grace_seconds: float) -> dict[int, str]:
    """Waits for `processes` to go; those that stay are killed and returned with their command lines."""
    deadline = time.monotonic() + grace_seconds
    alive = {pid: command for pid in processes if (command := command_of(pid))}
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {pid: command for pid in alive if (command := command_of(pid))}
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return alive


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended, also if its parent has not waited for it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
