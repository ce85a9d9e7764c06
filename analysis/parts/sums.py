"""How long MPI takes to sum as many bytes as ResNet-18's gradients, on ranks of one machine with a core each.

    mpirun -n 8 --bind-to none python -m analysis.parts.sums FILE.jsonl

Rank 0 adds a line to the file: milliseconds of the slowest rank, and how OMPI_MCA_smsc has ranks copy from each other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from analysis.parts.pinned import pin
from hvfreeze.comm.mpi_environment import claimed_rank, leave_mpi, start_mpi, tune_open_mpi, yield_when_crowded

BYTES = 44_700_000
TIMES = 10
"""After a first one that is not counted."""


def measure(out: Path) -> None:
    """Sum, and write down how long it took. Collective."""
    pin(claimed_rank(os.environ))
    yield_when_crowded()
    tune_open_mpi()
    mpi = start_mpi()
    world, values, taken = mpi.COMM_WORLD, np.ones(BYTES // 4, np.float32), np.empty(1 + TIMES)
    for number in range(len(taken)):
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(mpi.IN_PLACE, values)
        taken[number] = time.perf_counter() - start
        values[:] = 1
    world.Allreduce(mpi.IN_PLACE, taken, op=mpi.MAX)
    if world.rank == 0:
        line = {"ranks": world.size, "bytes": BYTES, "smsc": os.environ.get("OMPI_MCA_smsc", "")}
        line |= {
            "median_ms": round(1e3 * float(np.median(taken[1:])), 3),
            "mpi": mpi.Get_library_version().partition(",")[0],
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    leave_mpi(mpi)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
