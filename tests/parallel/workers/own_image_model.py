"""An image model, optimizers and batches for scripts of one's own, and averages by hand to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.own_loop.optimizer import DistributedOptimizer
from hvfreeze.ranks.world import World
from tests.parallel.workers.wrapped import STEPS

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, weight_decay=1e-2),
}


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias before a BatchNorm: its gradient is nothing but rounding, which Adam would make a step of.
    first = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    body = [first, nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 3)]
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5))


def batches(rank: int, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)  # dropout
    for _ in range(steps):
        yield torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_alike(world: World, ours: nn.Module, theirs: nn.Module) -> None:
    """One rank gives the same bits; of several, sums in another order may round differently."""
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        if world.size == 1:
            assert torch.equal(mine, reference)
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)


def raises(kind: type[Exception], words: str, work: Callable[[], object]) -> None:
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody said '{words}'")


def abandon(optimizer: DistributedOptimizer) -> None:
    """Let what is on its way arrive, so that its name is free for the next optimizer."""
    optimizer.reducer.starts_itself = False  # which would say again what is wrong
    optimizer.reducer.finish()


def average_by_hand(model: nn.Module, world: World) -> None:
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            parameter.grad = world.allreduce_sum(parameter.grad / world.size, name=f"test.hand.{number}")
