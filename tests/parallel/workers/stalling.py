"""`stalling.py RANK STAGE FAULT`: rank RANK stops (or spins) at a stage of a job's life; the others go on and wait."""

from __future__ import annotations

import os
import signal
import sys

import torch

import hvfreeze.ranks.horovod_world as horovod_world
from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.machine.mpi_environment import claimed_rank
from hvfreeze.ranks.wire import open_wire
from hvfreeze.ranks.world import end_job_on_exception

culprit, stage, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
leave_mpi = horovod_world.leave_mpi


def at(name: str) -> None:
    if stage == name and claimed_rank(os.environ) == culprit:
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass


def stop_before_leaving(mpi: object) -> None:
    at("leave")
    leave_mpi(mpi)


horovod_world.leave_mpi = stop_before_leaving
at("start")
world = open_world()
end_job_on_exception(world)
wire = open_wire(world, ["activations"])
at("collective")
world.allreduce_sum(torch.ones(4), name="loss")
at("wire")
wire.put(torch.ones(4), to=(world.rank + 1) % world.size, lane="activations")
wire.get((4,), source=(world.rank - 1) % world.size, lane="activations")
wire.close()
at("close")
world.close()
