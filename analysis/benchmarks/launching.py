"""Starts the ranks of a case and passes on what they print. This process itself never loads MPI."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from analysis.benchmarks.cases import Case
from analysis.benchmarks.judging import Row
from analysis.benchmarks.table import read_rows

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
PATIENCE = 3.0
"""A case that takes this many times what is planned for it hangs. Where time is short it is given less, but a pair of
whole runs takes as long as ever: so much is left to it."""
TIMED_OUT = 110
"""The exit code of mpirun where --timeout has ended it."""

_FROM_ANOTHER_JOB = re.compile(r"PMIX_|OMPI_COMM_WORLD|OMPI_UNIVERSE|OMPI_MCA_|HOROVOD_|SLURM_|GLOO_")
_FIXED = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:torchvision:RuntimeWarning",
}


def run_case(
    case: Case, wanted: Sequence[str], *, seconds: float, left: float, quick: bool, folder: Path
) -> tuple[list[Row], int]:
    """Measure `wanted` rows of a case.

    Args:
        case: what to start.
        wanted: rows of it.
        seconds: for each row.
        left: seconds after which no row is begun.
        quick: only see that it runs.
        folder: where files may lie meanwhile.

    Returns:
        The rows that were finished, and the exit code of mpirun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"bench-{case.module}-", dir=folder) as scratch:
        out = Path(scratch) / "rows.json"
        deadline = patience(case, wanted)
        command = [
            *("mpirun", "-n", str(NUM_RANKS), "--bind-to", "none", "--oversubscribe", "--timeout", str(deadline)),
            *(sys.executable, "-m", "analysis.benchmarks.worker", case.module, "--only", ",".join(wanted)),
            *("--seconds", str(seconds), "--left", str(left), "--scratch", scratch, "--out", str(out)),
            *(["--quick"] if quick else []),
        ]
        code = _run(command, environment(os.environ), seconds=deadline + 30)
        return read_rows(out), code


def patience(case: Case, wanted: Sequence[str]) -> int:
    """Return the seconds after which a case that measures `wanted` is ended."""
    return int(PATIENCE * case.planned_seconds(tuple(wanted))) + 60


def why_missing(case: Case, wanted: Sequence[str], code: int) -> str:
    """Return why rows are missing of a case whose ranks ended with exit code `code`."""
    if code == TIMED_OUT:
        return f"it was not done after {patience(case, wanted)} s; other programs may take this machine's cores"
    return f"its ranks ended with exit code {code}; what they said is above"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' variables: without what another job, or the user's taste, sets for MPI and Horovod."""
    variables = {name: value for name, value in given.items() if not _FROM_ANOTHER_JOB.match(name)}
    programs = str(Path(sys.executable).parent)
    variables["PATH"] = programs + os.pathsep + given.get("PATH", os.defpath)
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    variables.update(_FIXED)
    if os.geteuid() == 0:
        variables.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return variables


def _run(command: Sequence[str], variables: Mapping[str, str], *, seconds: float) -> int:
    job = subprocess.Popen(command, env=variables, cwd=ROOT, start_new_session=True)
    try:
        return job.wait(seconds)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
