"""A script that never closes its world, and whose exit takes longer than the stall watch sleeps."""

from __future__ import annotations

import atexit
import time


@atexit.register
def end_slowly() -> None:
    """End MPI, as the interpreter does at last, and take one's time; registered first, it is called last."""
    from mpi4py import MPI

    MPI.Finalize()
    time.sleep(1.5)


def main() -> None:
    from hvfreeze.comm.horovod_world import open_world
    from tests.parallel.mpirun import report

    world = open_world()
    world.barrier(name="unclosed")
    report(world.rank)


if __name__ == "__main__":
    main()
