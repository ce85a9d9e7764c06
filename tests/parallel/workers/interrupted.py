"""`interrupted.py RANK STAGE ARGUMENTS`: the program, in which one rank gets SIGINT as MPI begins, or at its exit."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Any

from hvfreeze.torch_imports import kept_for_good

with kept_for_good():
    from hvfreeze.__main__ import program
    from hvfreeze.comm import horovod_world
    from hvfreeze.comm.mpi_environment import claimed_rank
    from tests.parallel.workers.checking import let_models_be_small

culprit, stage = int(sys.argv[1]), sys.argv[2]
start_mpi = horovod_world.start_mpi


def at(name: str) -> None:
    if stage == name and claimed_rank(os.environ) == culprit:
        signal.raise_signal(signal.SIGINT)


def start() -> Any:
    assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "stall-watch"}, "none may use memory now"
    mpi = start_mpi()
    at("start")
    return mpi


horovod_world.start_mpi = start
let_models_be_small()
atexit.register(at, "exit")
del sys.argv[1:3]
sys.exit(program())
