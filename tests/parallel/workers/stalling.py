"""`stalling.py RANK STAGE FAULT LIMIT`: rank RANK stops (or spins) at a stage of a job's life; others go on and wait.

The stages in their order: start, collective, shutdown. From when ranks know each other they may wait for LIMIT seconds:
how long they take to start is the machine's affair.
"""

from __future__ import annotations

import os
import signal
import sys

from hvfreeze.imports import kept_for_good

with kept_for_good():
    import torch

    from hvfreeze.comm.horovod_world import HorovodWorld, open_world
    from hvfreeze.comm.mpi_environment import claimed_rank
    from hvfreeze.comm.world import end_job_on_exception

culprit, stage, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def at(name: str) -> None:
    if stage == name and claimed_rank(os.environ) == culprit:
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass


at("start")
world = open_world()
assert isinstance(world, HorovodWorld)
end_job_on_exception(world)
world.watch._limit = float(sys.argv[4])
shutdown = world._hvd.shutdown
world._hvd.shutdown = lambda: (at("shutdown"), shutdown())
at("collective")
world.allreduce_sum(torch.ones(4), name="loss")
world.close()
