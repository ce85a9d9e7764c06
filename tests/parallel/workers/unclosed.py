"""A script that imports while its world opens, never closes it, and exits more slowly than the stall watch looks."""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

watches: list[Any] = []
"""Stall watches; see slow_import.py."""


@atexit.register
def end_slowly() -> None:
    """End MPI, as the interpreter does at last, and take one's time; registered first, it is called last."""
    from mpi4py import MPI

    MPI.Finalize()
    time.sleep(1.5)


def main() -> None:
    from hvfreeze.comm import horovod_world
    from tests.parallel.mpirun import report

    class Watch(horovod_world.StallWatch):
        def __init__(self, *arguments: Any) -> None:
            watches.append(self)
            super().__init__(*arguments)

    horovod_world.StallWatch = Watch  # type: ignore[misc]
    world = horovod_world.open_world(beside="tests.parallel.workers.slow_import")
    world.barrier(name="unclosed")
    report(world.rank, imported="tests.parallel.workers.slow_import" in sys.modules)


if __name__ == "__main__":
    main()
