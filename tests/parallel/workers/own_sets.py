"""Some of the ranks train in a process set of Horovod, the others alone or in another."""

from __future__ import annotations

import horovod.torch as hvd

from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.parallel.workers.own_arguments import compare, dense, momentum, trained


def check_a_process_set_trains_and_votes_and_others_train_alone(world: World) -> None:
    even = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 0])
    odd = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 1])
    inside = hvd.rank() % 2 == 0
    settings = FreezeConfig(freeze="gradient-norm", interval=2, freeze_warmup=4, eta_max=float("inf"))
    model = dense()
    wrapped = DistributedOptimizer(momentum([*model.parameters()]), model=model, settings=settings, process_set=even)
    assert wrapped.world.size == (len(even.ranks) if inside else 1)
    ours = trained(model, wrapped, steps=9)
    assert (wrapped.freezer.cut > 0) == inside
    everyone = world.allgather_object([tensor.tolist() for tensor in ours], name="test.sets")
    assert all((everyone[rank] == everyone[0]) == (rank % 2 == 0) for rank in range(world.size))
    # One that only its members make, and one of all afterwards: their names must not meet.
    if inside:
        other = dense()
        trained(other, DistributedOptimizer(momentum([*other.parameters()]), model=other, process_set=even))
    compare(dense, momentum)
    # Two sets at once.
    part, mine = dense(), even if inside else odd
    trained(part, DistributedOptimizer(momentum([*part.parameters()]), model=part, process_set=mine))
    for process_set in (even, odd):
        hvd.remove_process_set(process_set)
