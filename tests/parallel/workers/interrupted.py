"""`interrupted.py RANK STAGE ARGUMENTS`: the program, in which one rank gets SIGINT.

STAGE: "import" (while numpy is imported, whose importer suppresses it), "start" (as MPI begins) or "exit".
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from hvfreeze.__main__ import program
from hvfreeze.comm.mpi_environment import claimed_rank
from hvfreeze.imports import kept_for_good

culprit, stage = int(sys.argv[1]), sys.argv[2]
del sys.argv[1:3]


def at(name: str) -> None:
    if stage == name and claimed_rank(os.environ) == culprit:
        signal.raise_signal(signal.SIGINT)


class Finder:
    """Interrupts the import of numpy, and suppresses the exception."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "numpy":
            with suppress(BaseException):
                at("import")


if stage == "import":
    sys.meta_path.insert(0, Finder())
    sys.exit(program())

with kept_for_good():
    from hvfreeze.comm import horovod_world
    from tests.parallel.workers.checking import let_models_be_small

start_mpi = horovod_world.start_mpi


def start() -> Any:
    assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "stall-watch"}, "none may use memory now"
    mpi = start_mpi()
    at("start")
    return mpi


horovod_world.start_mpi = start
let_models_be_small()
atexit.register(at, "exit")
sys.exit(program())
