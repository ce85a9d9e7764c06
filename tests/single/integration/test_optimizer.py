"""A script's optimizer beside its steps: its state is loaded or broadcast, and losses are reported."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.integration.horovod_compat import BROADCAST
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.torchvision_shim import torchvision


class Twin(SoloWorld):
    """Rank 0, beside one that does the same."""

    size = 2

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> Any:
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


@pytest.mark.parametrize(("make", "first"), list(zip(OPTIMIZERS, (False, True))))
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


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_without_frozen_blocks_is_loaded_where_nothing_is_frozen(fused: bool) -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(given, lr=0.01, momentum=0.9, fused=fused)

    model, optimizer = wrapped(make)
    optimizer.freezer.freeze(1)
    train(model, optimizer, 1)
    again, resumed = wrapped(make)
    resumed.load_state_dict(optimizer.state_dict())
    train(again, resumed, 1)
    assert all("momentum_buffer" in resumed.state[parameter] for parameter in again.parameters())


def test_what_two_would_average_is_refused() -> None:
    model, optimizer = wrapped(OPTIMIZERS[0])
    with pytest.raises(UsageError, match="is already a DistributedOptimizer"):
        DistributedOptimizer(optimizer, model=model, world=Twin())


def test_a_copy_is_refused_with_what_to_keep() -> None:
    _, optimizer = wrapped(OPTIMIZERS[0])
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"save its state_dict\(\)"):
            duplicate(optimizer)


def test_a_group_that_is_added_after_wrapping_is_refused_with_what_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model=model, world=Twin())
    with pytest.raises(UsageError, match=r"Pass all groups first.*wrap it again"):
        optimizer.add_param_group({"params": list(model[1].parameters())})
    inner.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(UsageError, match=r"Pass all groups first.*wrap it again"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_group_is_added_to_the_wrapped_optimizer_which_is_wrapped_again(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model=model, world=Twin())
    train(model, optimizer, 1)
    if frozen:
        optimizer.freezer.freeze(2)
    before = model[0].weight.clone()
    inner.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    again = DistributedOptimizer(inner, model=model, world=Twin())
    train(model, again, 1)
    assert [len(group["params"]) for group in again.param_groups] == [4, 2]
    assert not torch.equal(before, model[0].weight), "the added group trains"


def test_a_group_that_trains_later_is_there_from_the_start() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
    inner.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    optimizer = DistributedOptimizer(inner, model=model, world=Twin())
    before = model[0].weight.clone()
    train(model, optimizer, 1)
    assert torch.equal(before, model[0].weight)
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("beside", [False, True])
def test_complex_parameters_are_refused_where_they_train(beside: bool) -> None:
    model, phase = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    if not beside:
        model[0].phase = phase
    inner = torch.optim.SGD([*model.parameters(), *[phase] * beside], lr=0.1)
    with pytest.raises(UsageError, match="has dtype complex64"):
        DistributedOptimizer(inner, model=model, world=Twin())
    phase.requires_grad_(False)
    # Also where the first attempt is still in memory, as in a notebook.
    train(model, DistributedOptimizer(inner, model=model, world=Twin()), 1)


@pytest.mark.parametrize("how", ["is used by 0 and 2", "belongs to no block"])
def test_a_sequential_that_is_no_chain_trains_with_nothing_frozen(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if how == "is used by 0 and 2":
        model[2].weight = model[0].weight
    else:
        model.scale = nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, DistributedOptimizer(inner, model=model, world=Twin()), 1)
    assert "no block will be frozen: blocks (0, 1, 2):" in caplog.text and how in caplog.text


def test_a_dropout_that_is_there_twice_stays_on_where_blocks_train() -> None:
    dropout = nn.Dropout()
    model = nn.Sequential(nn.Linear(4, 4), dropout, nn.Linear(4, 4), dropout, nn.Linear(4, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=SoloWorld())
    train(model, optimizer, 1)
    optimizer.freezer.freeze(2)
    assert not model[2].training and dropout.training and len(optimizer.freezer.chain.blocks) == 3


def test_a_scaler_that_is_off_leaves_gradients_alone() -> None:
    model, optimizer = wrapped(OPTIMIZERS[0])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
    scaler.step(optimizer)
    assert optimizer.freezer.step == 1 and not torch.equal(before["0.weight"], model[0].weight)


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


class Glued(nn.Module):
    """A model whose blocks are found in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(x).relu()).relu())
        return logits


def test_parameters_that_train_keep_their_gradients_when_blocks_are_found_frozen_and_thawed() -> None:
    torch.manual_seed(0)
    model = Glued()
    plain = copy.deepcopy(model)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=Twin())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(*, frozen: int) -> None:
        plain.first.requires_grad_(frozen == 0)
        for net, own in ((model, optimizer), (plain, reference)):
            own.zero_grad(set_to_none=False)
            net(torch.ones(3, 4)).square().sum().backward()
            own.step()

    def check(*, lost: int) -> None:
        grads = [parameter.grad for parameter in model.parameters()]
        assert grads[:lost] == [None] * lost
        assert all(map(torch.equal, grads[lost:], [parameter.grad for parameter in plain.parameters()][lost:]))

    for cut in (0, 1, 0):
        optimizer.freezer.freeze(cut)
        plain.first.zero_grad()
        step(frozen=cut)
        check(lost=2 * cut)
    assert len(optimizer.freezer.chain.blocks) == 3
    optimizer.freezer.freeze(1)
    check(lost=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_auxiliary_heads_are_blocks_of_a_model_that_is_traced() -> None:
    model = torchvision.models.GoogLeNet(num_classes=3, aux_logits=True, init_weights=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model=model, world=SoloWorld())
    sum(logits.sum() for logits in model(torch.rand(2, 3, 64, 64))).backward()
    optimizer.step()
    names = [block.name for block in optimizer.freezer.chain.blocks]
    assert (names[0], names[-1]) == ("conv1", "fc") and "aux1" in names


def test_a_state_of_other_blocks_is_refused_with_both() -> None:
    model, optimizer = wrapped(OPTIMIZERS[0])
    optimizer.freezer.freeze(1)
    state = optimizer.freezer_state_dict()
    inner = OPTIMIZERS[0](model.parameters())
    other = DistributedOptimizer(inner, model=model, blocks=["0", "2"], world=Twin())
    with pytest.raises(UsageError, match=r"has the blocks 0, 1, 2, but the model has 0, 2; pass the same blocks="):
        other.load_freezer_state_dict(state)
    del state["block_names"]  # as in states of earlier versions
    _, again = wrapped(OPTIMIZERS[0])
    again.load_freezer_state_dict(state)
    assert again.freezer.cut == 1


def test_a_model_that_is_pruned_after_wrapping_is_refused_at_a_vote_with_what_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = FreezeConfig(freeze="gradient-norm", interval=1, freeze_warmup=1)
    optimizer = DistributedOptimizer(inner, model=model, settings=settings, world=SoloWorld())
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(UsageError, match=r"no longer has 0\.weight.*pruned.*wrap the inner optimizer again"):
        train(model, optimizer, 1)
    again = DistributedOptimizer(inner, model=model, world=SoloWorld())
    again.freezer.freeze(1)
    train(model, again, 1)
    assert not model[0].weight_orig.requires_grad and model[1].weight.grad is not None


def test_a_cut_that_freezes_all_that_the_optimizer_trains_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    static = FreezeConfig(freeze="static", cut=1)
    with pytest.raises(UsageError, match=r"cut \(1\) freezes every parameter of the optimizer"):
        DistributedOptimizer(inner, model=model, settings=static, world=SoloWorld())
    assert model[0].weight.requires_grad
