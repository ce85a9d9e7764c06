"""`interrupted.py RANK STAGE ARGUMENTS`: the program, in which SIGINT comes to one rank when MPI has begun or ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from hvfreeze.__main__ import main
from hvfreeze.comm import horovod_world
from hvfreeze.comm.mpi_environment import claimed_rank
from tests.parallel.workers.checking import let_models_be_small

culprit, stage = int(sys.argv[1]), sys.argv[2]
start_mpi, leave_mpi = horovod_world.start_mpi, horovod_world.leave_mpi


def at(name: str) -> None:
    if stage == name and claimed_rank(os.environ) == culprit:
        signal.raise_signal(signal.SIGINT)


def start() -> Any:
    mpi = start_mpi()
    at("start")
    return mpi


def leave(mpi: Any) -> None:
    at("leave")
    leave_mpi(mpi)


horovod_world.start_mpi, horovod_world.leave_mpi = start, leave
let_models_be_small()
sys.exit(main(sys.argv[3:]))
