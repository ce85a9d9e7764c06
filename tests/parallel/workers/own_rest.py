"""Every rank, on a node of its own as far as hvfreeze sees, whose cores its threads fill, trains with a script's loop.

`started` is by the script itself, which then hears what to set; `not-yet` is by hvfreeze, which sets it.
"""

from __future__ import annotations

import os
import socket

import torch

from hvfreeze.comm.cycle_time import LONG_CYCLE_MS
from hvfreeze.comm.horovod_world import HorovodWorld
from hvfreeze.comm.mpi_environment import CYCLE_TIME
from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.integration.script_world import RunningWorld
from tests.parallel.workers.lanes import try_collectives
from tests.parallel.workers.own_optimizer import note_what_is_told, raises

started = False
told: list[str] = []
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def start(how: str) -> World:
    global started
    started = how == "started"
    import horovod.torch as hvd

    hostname = f"node{os.environ['OMPI_COMM_WORLD_RANK']}"
    socket.gethostname = lambda: hostname
    os.environ.pop(CYCLE_TIME, None)
    note_what_is_told(told)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if started:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for own_sets
        hvd.init()
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model).world


def check_how_long_horovod_rests(world: World) -> None:
    lines = [line for line in told if "computing threads use all cores of the nodes" in line]
    assert isinstance(world, HorovodWorld) and isinstance(world, RunningWorld) == started
    if started:
        assert CYCLE_TIME not in os.environ
        assert all(f"set {CYCLE_TIME}={LONG_CYCLE_MS} before hvd.init()" in line for line in lines)
    else:
        assert os.environ[CYCLE_TIME] == str(LONG_CYCLE_MS)
        raises(UsageError, f"${CYCLE_TIME} ({LONG_CYCLE_MS}) is set", lambda: world.restart("HVFREEZE_TOLD", "1"))
        try_collectives(world, list(range(world.size)), "long")
    assert len(lines) == (world.rank == 0), told


def check_that_ranks_train_alike(world: World) -> None:
    again = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert again.world is world
    for _ in range(3):
        again.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        again.step()
    check_replicas(model, world, step=3)
