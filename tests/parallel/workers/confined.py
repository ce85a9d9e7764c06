"""The program with all ranks on one core: `confined.py ARGUMENTS` does what hvfreeze ARGUMENTS does."""

from __future__ import annotations

import os
import sys

from hvfreeze.imports import kept_for_good

with kept_for_good():
    from hvfreeze.__main__ import main
    from tests.parallel.mpirun import report
    from tests.parallel.workers.checking import let_models_be_small

if __name__ == "__main__":
    let_models_be_small()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    code = main(sys.argv[1:])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    report(rank, yields=os.environ.get("OMPI_MCA_mpi_yield_when_idle"))
    sys.exit(code)
