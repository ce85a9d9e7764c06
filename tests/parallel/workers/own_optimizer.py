"""Every rank wraps optimizers as a script of one's own would, and compares with a loop that averages by hand."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hvfreeze
from hvfreeze.errors import UsageError
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.own_loop.script_world import RunningWorld, script_world
from hvfreeze.ranks.equal_models import check_replicas
from hvfreeze.ranks.horovod_world import HorovodWorld
from hvfreeze.ranks.world import World
from tests.parallel.mpirun import report
from tests.parallel.workers import own_refusals, own_text_model
from tests.parallel.workers.own_image_model import (
    OPTIMIZERS,
    abandon,
    assert_alike,
    average_by_hand,
    batches,
    image_model,
    parameters,
    raises,
)
from tests.parallel.workers.wrapped import STEPS, wrap


def train_by_hand(model: nn.Module, optimizer: Any, world: World, schedule: Any, order: str, to_none: bool) -> None:
    for images, labels in batches(world.rank):
        loss = functional.cross_entropy(model(images), labels)
        if order == "between":
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        average_by_hand(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if order == "after":
            optimizer.zero_grad(set_to_none=to_none)


def train_wrapped(model: nn.Module, optimizer: Any, world: World, schedule: Any, order: str, to_none: bool) -> None:
    for images, labels in batches(world.rank):
        if order == "before":
            optimizer.zero_grad(set_to_none=to_none)
        loss = functional.cross_entropy(model(images), labels)
        if order == "between":
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        if order in ("after", "by the model"):
            (optimizer if order == "after" else model).zero_grad(set_to_none=to_none)


def check_every_optimizer_order_and_schedule_is_plain_training(world: World) -> None:
    orders = [("before", "after"), ("between", "between"), ("after", "after"), ("by the model", "after")]
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        order, reference_order = orders[number]
        for to_none in (True, False):
            ours, theirs = image_model(), image_model()
            plain, wrapped = make(theirs.parameters()), wrap(ours, make(ours.parameters()), world)
            schedules = [
                torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.05, total_steps=STEPS + 1) for one in (plain, wrapped)
            ]
            train_by_hand(theirs, plain, world, schedules[0], reference_order, to_none)
            train_wrapped(ours, wrapped, world, schedules[1], order, to_none)
            assert_alike(world, ours, theirs)
            wrapped.freezer.average_statistics()
            check_replicas(ours, world, step=STEPS)
            assert wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"], name


def check_frozen_blocks_rest_under_every_optimizer(world: World) -> None:
    for make in OPTIMIZERS.values():
        model = image_model()
        model[1].bias.requires_grad_(False)  # the user's own
        model[2].bias.requires_grad_(False)
        optimizer = wrap(model, make(model.parameters()), world)
        for images, labels in batches(world.rank, 2):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        optimizer.freezer.freeze(2)
        before, own = [t.clone() for t in model[:2].state_dict().values()], model[2].bias.clone()
        for images, labels in batches(world.rank, 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model[:2].state_dict().values(), strict=True))
        assert torch.equal(own, model[2].bias)
        optimizer.freezer.thaw(0)
        assert not model[1].bias.requires_grad and model[1].weight.requires_grad


def check_passes_add_up_and_the_last_may_be_fewer(world: World) -> None:
    ours, theirs = image_model(), image_model()
    plain = OPTIMIZERS["sgd"](theirs.parameters())
    wrapped = wrap(ours, OPTIMIZERS["sgd"](ours.parameters()), world, backward_passes_per_step=2)
    for first in (0, 2, 3):
        for model, optimizer in ((theirs, plain), (ours, wrapped)):
            optimizer.zero_grad()
            for number, (images, labels) in enumerate(batches(world.rank)):
                if first <= number < first + 2:
                    functional.cross_entropy(model(images), labels).backward()
            if model is theirs:
                average_by_hand(theirs, world)
            optimizer.step()
    assert_alike(world, ours, theirs)
    (images, labels) = next(batches(world.rank))

    def again() -> None:
        for _ in range(3):
            functional.cross_entropy(ours(images), labels).backward()

    raises(UsageError, "backward_passes_per_step=N", again)
    abandon(wrapped)


def check_thin_gradients_travel_twice_in_one_order(world: World) -> None:
    model = image_model()
    optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), world, compression="powersgd:1")
    optimizer.reducer.uncompressed_steps = 1
    for images, labels in batches(world.rank):
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.freezer.average_statistics()
    check_replicas(model, world, step=STEPS)


def check_horovods_broadcast_creates_state_and_moves_nothing(world: World) -> None:
    import horovod.torch as hvd

    model = image_model()
    before = parameters(model)
    optimizer = wrap(model, OPTIMIZERS["adamw"](model.parameters()), world, compression=hvd.Compression.fp16)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "weights moved"
    assert optimizer.freezer.step == 0 and optimizer.reducer.compression == "fp16"
    images, labels = next(batches(world.rank))
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}, "the state did not start afresh"

    # Rank 0 has loaded a checkpoint, the others have not.
    saved = copy.deepcopy(optimizer.state_dict())
    other = image_model()
    optimizer = wrap(other, OPTIMIZERS["adamw"](other.parameters()), world)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # Horovod wants the same keys in every group
    if world.rank == 0:
        optimizer.load_state_dict(saved)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    functional.cross_entropy(other(images), labels).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}, "what rank 0 loaded did not arrive"
    check_replicas(nn.ParameterList(other.parameters()), world, step=1)


def check_parameters_beside_the_model_are_averaged_too(world: World) -> None:
    model, scale = image_model(), nn.Parameter(torch.ones(()))
    optimizer = wrap(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1), world)
    for images, labels in batches(world.rank):
        optimizer.zero_grad()
        functional.cross_entropy(model(images) * scale, labels).backward()
        optimizer.step()
    assert len(set(world.allgather_object(scale.item(), name="test.scale"))) == 1
    assert scale.item() != 1


def open_as_scripts_do(how: str) -> World:
    import horovod.torch as hvd

    if how == "running":
        hvd.init()
    world = script_world()
    assert hvd.is_initialized() and hvd.size() == world.size and hvd.rank() == world.rank
    kind = RunningWorld if how == "running" else HorovodWorld
    assert type(world) is kind or world.size == 1
    return world


def main(how: str) -> None:
    torch.set_num_threads(1)
    world = open_as_scripts_do(how)
    found = sorted({**vars(own_text_model), **vars(own_refusals), **globals()}.items())
    checks = [check for name, check in found if name.startswith("check_") and name != "check_replicas"]
    for check in checks:
        check(world)
        print(check.__name__, flush=True)
    assert hvfreeze.DistributedOptimizer is DistributedOptimizer
    report(world.rank, checks=[check.__name__ for check in checks])


if __name__ == "__main__":
    main(sys.argv[1])
