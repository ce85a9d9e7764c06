from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.optim import LARS, Update, arithmetic_of, needs_equal_arithmetic, open_optimizer

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def trained(net: nn.Module, update: Update, *, steps: int = 3, rate: float = 0.05) -> list[Tensor]:
    for _ in range(steps):
        update.optimizer.zero_grad()
        net(INPUTS).square().sum().backward()
        update.make(rate)
    return [parameter.detach().clone() for parameter in net.parameters()]


def ours(**settings: Any) -> list[Tensor]:
    net, config = model(), OptimizerConfig(**{"lr": 0.05, "weight_decay": 0.1, **settings})
    head = {"2.weight", "2.bias"}
    return trained(net, Update(open_optimizer(net.named_parameters(), config, head=head), config))


def plain(groups: Any, clip: float | None = None, *, kind: Any = torch.optim.SGD, **settings: Any) -> list[Tensor]:
    net = model()
    optimizer = kind(groups(net), **{"lr": 0.05, "weight_decay": 0.1, **settings})
    for _ in range(3):
        optimizer.zero_grad()
        net(INPUTS).square().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def everything(net: nn.Module) -> Any:
    return net.parameters()


def two_rates(net: nn.Sequential) -> Any:
    return [{"params": [*net[0].parameters(), *net[1].parameters()]}, {"params": net[2].parameters(), "lr": 0.2}]


def spared(net: nn.Module) -> Any:
    flat = [parameter for parameter in net.parameters() if parameter.dim() == 1]
    rest = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    return [{"params": rest}, {"params": flat, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda: plain(everything, momentum=0.9)),
        ({"nesterov": True, "momentum": 0.8}, lambda: plain(everything, momentum=0.8, nesterov=True)),
        ({"head_lr": "0.2"}, lambda: plain(two_rates, momentum=0.9)),
        ({"no_decay_norms": True}, lambda: plain(spared, momentum=0.9)),
        ({"clip_grad": 0.5}, lambda: plain(everything, 0.5, momentum=0.9)),
        ({"optimizer": "adamw"}, lambda: plain(everything, kind=torch.optim.AdamW, betas=(0.9, 0.999))),
        ({"optimizer": "adamw", "no_decay_norms": True}, lambda: plain(spared, kind=torch.optim.AdamW)),
        ({"optimizer": "lars"}, lambda: plain(everything, kind=LARS)),
    ],
)
def test_each_setting_is_pytorchs_own_bit_for_bit(settings: dict[str, Any], expected: Any) -> None:
    mine, theirs = ours(**settings), expected()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if settings:
        assert not all(torch.equal(a, b) for a, b in zip(mine, ours(), strict=True))


def test_a_heads_own_rate_follows_the_schedule() -> None:
    net, config = model(), OptimizerConfig(lr=0.05, head_lr="0.2")
    update = Update(open_optimizer(net.named_parameters(), config, head={"2.weight"}), config)
    trained(net, update, steps=1, rate=0.025)
    assert [group["lr"] for group in update.optimizer.param_groups] == [0.025, 0.1]


def test_lars_moves_a_tensor_by_its_own_size() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    zero = nn.Parameter(torch.zeros(2))
    optimizer = LARS([weight, zero], lr=2.0, momentum=0.5, weight_decay=0.1, trust=0.01)
    for _ in range(2):
        weight.grad, zero.grad = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 0.0])
        before = weight.detach().clone()
        optimizer.step()
    # By hand, from the paper: the first ratio is 0.01 x 5 / (10 + 0.1 x 5).
    first = 2 * (0.01 * 5 / 10.5) * (torch.tensor([0.0, 10.0]) + 0.1 * torch.tensor([3.0, 4.0]))
    ratio = 0.01 * float(before.norm()) / (10 + 0.1 * float(before.norm()))
    second = 0.5 * first + 2 * ratio * (torch.tensor([0.0, 10.0]) + 0.1 * before)
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - first - second)
    assert zero[0] < 0 and zero[1] == 0


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_each_optimizer_goes_on_bit_for_bit_from_its_state(name: str) -> None:
    config = OptimizerConfig(optimizer=name, lr=0.01, head_lr="0.02", no_decay_norms=True, clip_grad=1.0)

    def fresh() -> tuple[nn.Module, Update]:
        net = model()
        optimizer = open_optimizer(net.named_parameters(), config, head={"2.weight", "2.bias"})
        return net, Update(optimizer, config)

    (straight, whole), (stopped, half), (resumed, rest) = fresh(), fresh(), fresh()
    expected = trained(straight, whole, steps=5)
    trained(stopped, half, steps=2)
    resumed.load_state_dict(stopped.state_dict())
    rest.optimizer.load_state_dict(half.optimizer.state_dict())
    found = trained(resumed, rest, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_every_optimizer_has_its_own_defaults_and_one_that_is_given_counts() -> None:
    rates = {name: OptimizerConfig(optimizer=name).lr for name in ("sgd", "adamw", "lars")}
    assert rates == {"sgd": 0.1, "adamw": 0.001, "lars": 3.0}
    assert OptimizerConfig(optimizer="adamw", lr=0.1).lr == 0.1
    assert OptimizerConfig().weight_decay == 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, r"--optimizer \(adam\) must be one of sgd, adamw, lars"),
        ({"optimizer": "adamw", "nesterov": True}, "--nesterov"),
        ({"head_lr": "0.1,0.2"}, r"--head-lr \(0.1,0.2\) must be one number"),
        ({"head_lr": "x"}, "--head-lr"),
        ({"clip_grad": float("inf")}, "--clip-grad"),
        ({"label_smoothing": 1}, "--label-smoothing"),
        ({"mixup": -0.1}, "--mixup"),
        (
            {"mixup": 0.2, "head_fit": "exact", "augment": "none"},
            "--mixup needs --head-fit sgd",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_dict(settings)


def test_ranks_that_compute_other_norms_are_told_apart_only_where_it_matters() -> None:
    assert arithmetic_of([(3, 4)]) == arithmetic_of([(3, 4)]) != arithmetic_of([(4, 3, 2)])
    assert needs_equal_arithmetic(OptimizerConfig(optimizer="lars"))
    assert needs_equal_arithmetic(OptimizerConfig(clip_grad=1.0))
    assert not needs_equal_arithmetic(OptimizerConfig(optimizer="adamw"))


def test_memory_in_another_order_than_a_parameters_changes_no_update() -> None:
    """Fused updates read memory in its own order."""
    config = OptimizerConfig(optimizer="adamw", lr=0.05, weight_decay=0.1)
    found = []
    for gradients, state in (
        (torch.channels_last, torch.channels_last),
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ):
        weight = nn.Parameter(torch.arange(48.0).reshape(4, 3, 2, 2).to(memory_format=torch.channels_last))
        update = Update(open_optimizer([("weight", weight)], config, fused=True), config)
        for step in range(3):
            values = torch.linspace(-1, 1 + step, 48).reshape(4, 3, 2, 2)
            weight.grad = values.contiguous(memory_format=gradients)
            update.make(0.05)
            kept = update.optimizer.state[weight]
            kept["exp_avg"] = kept["exp_avg"].contiguous(memory_format=state)
        found.append(weight.detach().contiguous())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
