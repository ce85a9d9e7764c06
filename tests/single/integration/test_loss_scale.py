"""`GradScaler` with `DistributedOptimizer`, one process: PyTorch's own steps, bit for bit; evidence without scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.integration.optimizer import DistributedOptimizer

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def train(net: nn.Module, optimizer: Any, *, clip: str, steps: int = 6, scaler: Any = None) -> list[float]:
    """Train with a scaled loss; a step that overflows where a scaler is on is made again. Return the scales."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaler is None else scaler
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    generator = torch.Generator().manual_seed(1)
    scales = []
    for step in range(steps):
        batch = torch.randn(8, 4, generator=generator)
        for factor in [math.inf] * (step == 2 and scaler.is_enabled()) + [1.0]:
            optimizer.zero_grad()
            scaler.scale(net(batch).square().mean() * factor).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5 if clip == "clipped" else math.inf)
            scaler.step(optimizer)
            scales.append(scaler.get_scale())
            scaler.update()
        schedule.step()
    return scales


def wrap(net: nn.Module, make: Make, **settings: Any) -> DistributedOptimizer:
    config = FreezeConfig(**settings)
    return DistributedOptimizer(make(net.parameters()), model=net, settings=config, world=SoloWorld())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("name", "clip"),
    [
        *((name, "") for name in OPTIMIZERS),
        ("sgd", "clipped"),
        ("sgd fused", "unscaled"),
        ("adamw", "unscaled"),
        ("adamw fused", "clipped"),
    ],
)
def test_steps_are_those_of_pytorch(name: str, clip: str) -> None:
    theirs, ours = model(), model()
    plain, wrapped = OPTIMIZERS[name](theirs.parameters()), wrap(ours, OPTIMIZERS[name])
    assert train(theirs, plain, clip=clip) == train(ours, wrapped, clip=clip)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    assert wrapped.freezer.step == 6, "the step that overflowed counts as none"
    loaded = OPTIMIZERS[name](ours.parameters())
    loaded.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    steps = [state["step"] for state in loaded.state_dict()["state"].values() if "step" in state]
    assert steps == [state["step"] for state in plain.state_dict()["state"].values() if "step" in state]


def test_sparse_gradients_are_divided_too() -> None:
    ends = []
    for wraps in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2, bias=False))
        inner: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model=net, world=SoloWorld()) if wraps else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(net(torch.tensor([[1, 1, 3]])).square().sum()).backward()
        scaler.step(optimizer)
        ends.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


@pytest.mark.parametrize(("name", "clip"), [("sgd", "unscaled"), ("sgd fused", ""), ("adamw", "")])
def test_evidence_does_not_depend_on_the_scale(name: str, clip: str) -> None:
    def evidence(scaler: torch.amp.GradScaler) -> list[list[float]]:
        net = model()
        optimizer = wrap(net, OPTIMIZERS[name], freeze="coherence", interval=100)
        seen = optimizer.freezer._coherence
        assert seen is not None
        seen.every = 2
        train(net, optimizer, clip=clip, steps=8, scaler=scaler)
        return seen.latest

    plain = evidence(torch.amp.GradScaler("cpu", enabled=False))
    scaled = evidence(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    assert len(plain) == len(scaled) == 4
    torch.testing.assert_close(torch.tensor(scaled), torch.tensor(plain), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_group_without_parameters_may_be_the_last() -> None:
    net = model()
    first, *others = net.children()
    groups = [{"params": [*others[0].parameters(), *others[1].parameters()]}, {"params": [*first.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    static = FreezeConfig(freeze="static", cut=1)
    wrapped = DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), model=net, settings=static, world=SoloWorld()
    )
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train(net, wrapped, clip="")
    same = [torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)]
    assert not wrapped.param_groups[-1]["params"] and same == [True] * 2 + [False] * 4


def test_the_wrapper_is_an_optimizer_and_says_what_it_is() -> None:
    optimizer = wrap(model(), OPTIMIZERS["sgd"])
    assert (
        isinstance(optimizer, torch.optim.Optimizer) and optimizer.__class__ is type(optimizer) is DistributedOptimizer
    )
    assert "__class__" not in vars(DistributedOptimizer) and optimizer.defaults["momentum"] == 0.9
    hooks: list[Any] = []
    optimizer.register_step_post_hook(lambda *of: hooks.append(of))
    train(model(), optimizer, clip="", steps=0)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer._inner.param_groups[0]["lr"] == 0.5
