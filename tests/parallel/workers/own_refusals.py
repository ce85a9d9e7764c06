"""What a script of one's own must not do: checks that `own_optimizer` runs with its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hvfreeze.errors import DivergedError, UsageError
from hvfreeze.ranks.world import World
from tests.parallel.workers.own_image_model import (
    OPTIMIZERS,
    abandon,
    batches,
    image_model,
    raises,
)
from tests.parallel.workers.wrapped import wrap


def check_what_would_lose_gradients_is_refused(world: World) -> None:
    model = image_model()
    optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), world)
    images, labels = next(batches(world.rank))
    functional.cross_entropy(model(images), labels).backward()
    raises(UsageError, "zero_grad() between backward() and step()", optimizer.zero_grad)
    optimizer.step()
    functional.cross_entropy(model(images), labels).backward()
    if world.size > 1:
        with optimizer.skip_synchronize():
            raises(UsageError, "without synchronize() before it", optimizer.step)
    optimizer.step()
    if world.size > 1:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        raises(UsageError, "call synchronize() before they are clipped", optimizer.step)
        abandon(optimizer)


def check_unequal_ranks_are_refused(world: World) -> None:
    model = image_model()
    last = world.rank == world.size - 1 and world.size > 1
    wrong = {"steps_per_epoch": 3 if last else 4}
    if world.size > 1:
        sgd = OPTIMIZERS["sgd"](model.parameters())
        raises(UsageError, "steps_per_epoch is 4 on rank 0 and 3 on rank", lambda: wrap(model, sgd, world, **wrong))
        optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), world)
        with torch.no_grad():
            model[2].bias.add_(float(last))
        images, labels = next(batches(world.rank))
        functional.cross_entropy(model(images), labels).backward()
        raises(DivergedError, "hvd.broadcast_parameters", optimizer.step)
        optimizer.reducer.finish()
    raises(UsageError, "LBFGS", lambda: wrap(model, torch.optim.LBFGS(model.parameters()), world))
    raises(
        UsageError,
        "op (9) must be hvd.Average",
        lambda: wrap(model, torch.optim.SGD([*model.parameters()]), world, op=9),
    )
