"""Every rank drives the parts as a user's own loop would, and checks what must hold after each step."""

from __future__ import annotations

import torch
from torch import nn

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.horovod_world import open_world
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World, end_job_on_exception
from tests.parallel.mpirun import report
from tests.parallel.workers import equal_ranks, frozen_blocks
from tests.parallel.workers.parts import Parts


def check_only_the_suffix_travels(world: World) -> None:
    for compression, width in (("none", 4), ("fp16", 2)):
        parts = Parts(world, compression=compression)
        sent = 0
        for cut in (0, 1, 3):
            parts.freezer.freeze(cut)
            parts.step()
            parts.step()
            sent += 2 * width * sum(p.numel() for _, p in parts.chain.named_parameters(cut))
        assert parts.reducer.payload_bytes == (sent if world.size > 1 else 0), (parts.reducer.payload_bytes, sent)


def check_the_gradient_is_the_mean_over_ranks(world: World) -> None:
    parts = Parts(world)
    images = torch.randn(6, 3, 6, 6, generator=parts.random)
    loss = parts.chain(images).square().mean()
    grads = torch.autograd.grad(loss, [p for _, p in parts.chain.named_parameters()], retain_graph=True)
    expected = [world.allreduce_sum(g, name=f"test.{i}") / world.size for i, g in enumerate(grads)]
    parts.reducer.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    parts.reducer.finish()
    for (name, parameter), mean in zip(parts.chain.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7, msg=name)
        assert parameter.grad.stride() == parameter.stride()


def check_large_halves_do_not_overflow(world: World) -> None:
    weight = nn.Parameter(torch.zeros(10))
    reducer = Reducer(world, compression="fp16")
    reducer.carry([("weight", weight)])
    reducer.begin()
    (weight * 40000.0).sum().backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((10,), 40000.0), rtol=1e-2, atol=0)


def check_unequal_frozen_sets_are_refused_by_all(world: World) -> None:
    for odd in ([3], [0, 1]):  # another size, and the same size under other names
        parameters = [(f"p{i}", nn.Parameter(torch.zeros(4))) for i in range(4)]
        reducer = Reducer(world)
        mine = odd if world.rank == world.size - 1 else ([0] if len(odd) == 1 else [2, 3])
        reducer.carry([parameters[i] for i in mine])
        reducer.begin()
        sum(parameters[i][1].sum() for i in mine).backward()  # type: ignore[union-attr]
        try:
            reducer.finish()
            refused = False
        except DivergedError:
            refused = True
        for bucket in reducer._convoy.parcels:
            try:
                for handle in bucket.handles:
                    world.wait(handle)
            except DivergedError:
                assert refused
        assert refused == (world.size > 1), "ranks with unequal frozen sets went on"


def check_a_poisoned_loss_is_known_to_all(world: World) -> None:
    parts = Parts(world)
    parts.step()
    parts.step(poison=world.rank == world.size - 1)
    assert parts.signals.nonfinite == 1
    assert not parts.reducer.gradients_are_finite()


def main() -> None:
    torch.set_num_threads(1)
    world = open_world()
    end_job_on_exception(world)
    found = sorted({**vars(equal_ranks), **vars(frozen_blocks), **globals()}.items())
    checks = [check for name, check in found if name.startswith("check_") and name != "check_replicas"]
    for check in checks:
        check(world)
    report(world.rank, checks=[check.__name__ for check in checks])
    world.close()


if __name__ == "__main__":
    main()
