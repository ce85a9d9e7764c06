"""A script's optimizer beside its steps: its state is loaded or broadcast, and losses are reported."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.integration.horovod_compat import BROADCAST
from hvfreeze.integration.optimizer import DistributedOptimizer


class Twin(SoloWorld):
    """Rank 0, beside one that does the same."""

    size = 2

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
        self.begun.append(name)
        tensor.mul_(2)

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        return [value, value]


def wrapped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return model, DistributedOptimizer(make(model.parameters()), model=model, world=Twin())


def train(model: nn.Module, optimizer: DistributedOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def broadcast(optimizer: DistributedOptimizer) -> None:
    """Create state as `hvd.broadcast_optimizer_state` does where there is none."""
    if not optimizer.state_dict()["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        FunctionType((lambda given: given.step()).__code__, {"__name__": BROADCAST})(optimizer)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_broadcast_of_state_is_no_step_also_behind_a_loaded_freezer_state(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model, optimizer = wrapped(make)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.freezer_state_dict()))
    again, resumed = wrapped(make)
    again.load_state_dict(saved[0])
    resumed.load_freezer_state_dict(saved[1])
    broadcast(resumed)
    assert resumed.state_dict()["state"], "there is nothing to broadcast"
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in saved[0].items())
    assert resumed.freezer.step == 3 and resumed.world.begun == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("first", [False, True])
def test_a_state_that_a_script_loads_counts_also_after_a_broadcast(
    make: Callable[[Any], torch.optim.Optimizer], first: bool
) -> None:
    model, optimizer = wrapped(make)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 1)
    again, resumed = wrapped(make)
    if first:
        broadcast(resumed)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, 1)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_loss_that_is_no_number_is_reported_like_any_other() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    settings = FreezeConfig(freeze="gradient-norm", interval=1, freeze_warmup=1, vote_weight="loss")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model=model, settings=settings, world=SoloWorld())
    for loss in (1.0, math.nan):
        optimizer.report_loss(loss)
        train(model, optimizer, 1)
    with pytest.raises(UsageError, match="report_loss"):
        train(model, optimizer, 1)
