"""A rank that ends, or does not, in a way that its last argument says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.parallel.mpirun import report

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
LAST = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == RANK + 1


def leave_a_process_behind() -> None:
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["sleep", "3600"], start_new_session=True, **silent)  # type: ignore[call-overload]


def fail(mode: str) -> None:
    if mode == "raise":
        raise LookupError("on the last rank")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hang":
        time.sleep(3600)


MODES = {
    "first": lambda: report(RANK) if RANK == 0 else None,
    "orphan": leave_a_process_behind,
}

if __name__ == "__main__":
    (mode,) = sys.argv[1:]
    if mode in MODES:
        MODES[mode]()
    elif LAST:
        fail(mode)
